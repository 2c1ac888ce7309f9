// Shared memory that knows who touched it: who wrote and read each 2 bytes since the last barrier.
//
// Two threads that touch the same bytes, one of them writing, with no barrier of both between, are a race, whichever
// came first here.
#pragma once
#include "emulator/fibers.hpp"

namespace emulator {

constexpr int MANY = -2;

// Who came, and after how many barriers of the block and of its warp.
struct Visit {
    int thread;  // -1 for none; MANY: more than one of `warp`; and warp MANY: of more than one
    int warp;
    unsigned barriers, warp_barriers;
};

struct Word {
    Visit written, read;
};

struct Shared {
    unsigned char* memory;
    Word* words;
    size_t bytes, room;
};

inline Shared shared;

inline void poison(size_t bytes) {
    if (!shared.words || bytes > shared.room) {
        shared.memory = static_cast<unsigned char*>(aligned_alloc(256, (bytes / 256 + 1) * 256));
        shared.words = static_cast<Word*>(malloc((bytes / 2 + 1) * sizeof(Word)));
        shared.room = bytes;
    }
    shared.bytes = bytes;
    for (size_t n = 0; n < bytes; n++) shared.memory[n] = 0xff;  // NaN in every type
    for (size_t n = 0; n <= bytes / 2; n++) shared.words[n] = Word{{-1, -1, 0, 0}, {-1, -1, 0, 0}};
}

// Whether a visit and one by `thread` now have a barrier between them.
inline bool ordered(const Visit& visit, int thread) {
    if (visit.thread == -1 || visit.thread == thread || visit.barriers != machine.barriers) return true;
    return visit.warp == thread / WARP && visit.warp_barriers != machine.warp_barriers[visit.warp];
}

// Whether `thread` may touch the bytes; if not, the run fails.
inline bool touch(const void* at, size_t bytes, bool writes, int thread) {
    const auto no = [](const char* why) {
        fail(why);
        return false;
    };
    const size_t from = static_cast<const unsigned char*>(at) - shared.memory;
    if (from + bytes > shared.bytes || from > shared.bytes) return no("shared memory is left");
    if (from % bytes % 16) return no("shared memory is touched at an odd address");
    const Visit now = {thread, thread / WARP, machine.barriers, machine.warp_barriers[thread / WARP]};
    for (size_t n = from / 2; n < (from + bytes + 1) / 2; n++) {
        Word& word = shared.words[n];
        if (!ordered(word.written, thread)) return no("a race: shared memory was written with no barrier since");
        if (writes) {
            if (!ordered(word.read, thread)) return no("a race: shared memory was read with no barrier since");
            word.written = now;
        } else if (word.read.thread == -1 || word.read.barriers != machine.barriers) {
            word.read = now;
        } else if (word.read.warp != now.warp) {
            word.read = Visit{MANY, MANY, machine.barriers, 0};
        } else if (word.read.thread != thread || word.read.warp_barriers != now.warp_barriers) {
            word.read = Visit{MANY, now.warp, machine.barriers, now.warp_barriers};
        }
    }
    return true;
}

}  // namespace emulator
