// How the warpgroups of a block hand over tiles: mbarriers, positions in a ring of stages, and turns.
//
// A tile in shared memory has two mbarriers: `full` (one arrival, with the bytes that TMA is to bring) and `free` (an
// arrival of every warp that reads it). Each completes once a use, so that its parity says which use is over; who waits
// for `free` starts with the parity of a use that never was, and finds a new ring free.
#pragma once
#include "hopper/instructions.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that compute, of 64 rows each

struct Barrier {
    u64 state;

    DEVICE void init(int arrivals) { init_barrier(&state, arrivals); }
    DEVICE void arrive() { arrive_at(&state); }
    // Arrives, and holds the phase until TMA has brought `bytes`.
    DEVICE void expect(int bytes) { arrive_expecting(&state, bytes); }
    // Waits for the end of a phase of `parity`.
    DEVICE void wait(u32 parity) { await(&state, parity); }
};

// Which stage of a ring is next, and the parity of its `full`; that of its `free` is the other one.
template <int SIZE> struct Position {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

// -- consumers among themselves ---------------------------------------------------------------------------------------

// All threads of one consumer meet.
DEVICE void meet(int consumer) { meet_at(1 + CONSUMERS + consumer, 128); }

// Consumers issue their products one after another, so that one's softmax runs beside the products of the others
// (ping-pong): a named barrier each, where it and the one before meet. All take the same number of turns.
DEVICE void await_turn(int consumer) { meet_at(1 + consumer, 256); }
DEVICE void pass_turn(int consumer) {
    const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
    arrive_at(1 + next, 256);
}
