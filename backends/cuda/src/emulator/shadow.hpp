// Shared memory that knows who touched it: who wrote each 2 bytes last, and who read them since.
//
// Two that touch the same bytes, one of them writing, where the later does not know of the earlier, are a race,
// whichever came first here. Threads that write what is there already are none: a reader is to know of one of them, and
// who writes anything else of all.
#pragma once
#include <string.h>

#include <vector>

#include "emulator/clocks.hpp"

namespace emulator {

struct Word {
    Moment written;
    std::vector<Moment> again;  // the same
    std::vector<Moment> read;
};

struct Shared {
    unsigned char* memory;
    std::vector<Word> words;
    size_t bytes, room;
};

inline Shared shared;

inline void poison(size_t bytes) {
    if (!shared.memory || bytes > shared.room) {
        shared.memory = static_cast<unsigned char*>(aligned_alloc(1024, (bytes / 1024 + 1) * 1024));
        shared.words.resize(bytes / 2 + 1);
        shared.room = bytes;
    }
    shared.bytes = bytes;
    for (size_t n = 0; n < bytes; n++) shared.memory[n] = 0xff;  // NaN in every type
    for (Word& word : shared.words) word.written = Moment(), word.again.clear(), word.read.clear();
}

// Who touches memory, and how. `proxy`: as products and copies do, which see of threads' writes what these have shown.
// `value`, if it is told: the bytes that are to be written.
struct Visit {
    Moment moment;
    const Clock& known;
    bool writes, proxy;
    const void* value = nullptr;

    bool sees(Moment written) const {
        const bool shown = !proxy || writes || written.agent < 0 || written.agent >= THREADS ||
                           known.at[SHOWN + written.agent] >= written.time;
        return shown && known.knows(written);
    }
    bool sees(const Word& word) const {
        bool one = sees(word.written), all = one;
        for (const Moment& moment : word.again) one |= sees(moment), all &= sees(moment);
        return writes ? all : one;
    }
    bool knows_readers(const Word& word) const {
        for (const Moment& moment : word.read)
            if (!known.knows(moment)) return false;
        return true;
    }
};

// Whether the visit may touch the bytes; if not, the run fails.
inline bool touch(const void* at, size_t bytes, const Visit& visit) {
    const auto no = [](const char* why) {
        fail(why);
        return false;
    };
    const size_t from = static_cast<const unsigned char*>(at) - shared.memory;
    if (from + bytes > shared.bytes || from > shared.bytes) return no("shared memory is left");
    if (from % bytes % 16) return no("shared memory is touched at an odd address");
    const bool same = visit.value && memcmp(at, visit.value, bytes) == 0;
    for (size_t n = from / 2; n < (from + bytes + 1) / 2; n++) {
        Word& word = shared.words[n];
        if (same && !(visit.sees(word) && visit.knows_readers(word))) {
            word.again.push_back(visit.moment);
            continue;
        }
        if (!visit.sees(word)) {
            if (visit.known.knows(word.written)) return no("a race: what a thread wrote was not shown to products and copies");
            return no("a race: shared memory was written with no barrier since");
        }
        if (visit.writes) {
            if (!visit.knows_readers(word)) return no("a race: shared memory was read with no barrier since");
            word.written = visit.moment;
            word.again.clear(), word.read.clear();
            continue;
        }
        bool noted = false;
        for (Moment& moment : word.read)
            if (moment.agent == visit.moment.agent) moment = visit.moment, noted = true;
        if (!noted) word.read.push_back(visit.moment);
    }
    return true;
}

inline bool touch(const void* at, size_t bytes, bool writes, int thread) {
    return touch(at, bytes, Visit{now(thread), clocks[thread], writes, false});
}
inline bool touch_with(const void* value, const void* at, size_t bytes, int thread) {
    return touch(at, bytes, Visit{now(thread), clocks[thread], true, false, value});
}

}  // namespace emulator
