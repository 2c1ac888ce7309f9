// Shared memory that knows who touched it: who wrote each 2 bytes last, and who read them since.
//
// Two that touch the same bytes, one of them writing, where the later does not know of the earlier, are a race,
// whichever came first here.
#pragma once
#include <vector>

#include "emulator/clocks.hpp"

namespace emulator {

struct Word {
    Moment written;
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
    for (Word& word : shared.words) word.written = Moment(), word.read.clear();
}

// Who touches memory, and how. `proxy`: as products and copies do, which see of threads' writes what these have shown.
struct Visit {
    Moment moment;
    const Clock& known;
    bool writes, proxy;

    bool sees(Moment written) const {
        const bool shown = !proxy || writes || written.agent < 0 || written.agent >= THREADS ||
                           known.at[SHOWN + written.agent] >= written.time;
        return shown && known.knows(written);
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
    for (size_t n = from / 2; n < (from + bytes + 1) / 2; n++) {
        Word& word = shared.words[n];
        if (!visit.sees(word.written)) {
            if (visit.known.knows(word.written)) return no("a race: what a thread wrote was not shown to products and copies");
            return no("a race: shared memory was written with no barrier since");
        }
        if (visit.writes) {
            for (const Moment& moment : word.read)
                if (!visit.known.knows(moment)) return no("a race: shared memory was read with no barrier since");
            word.written = visit.moment;
            word.read.clear();
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

}  // namespace emulator
