// How the warpgroups of a block hand over tiles: mbarriers, positions in a ring of stages, and turns.
//
// A tile in shared memory has two mbarriers: `full` (one arrival, with the bytes that TMA is to bring) and `free` (an
// arrival of every warp that reads it). Each completes once a use, so that its parity says which use is over; who waits
// for `free` starts with the parity of a use that never was, and finds a new ring free.
#pragma once
#include "numbers.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that compute, of 64 rows each

struct Barrier {
    u64 state;

    DEVICE void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
    }
    DEVICE void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }
    // Arrives, and holds the phase until TMA has brought `bytes`.
    DEVICE void expect(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(shared_address(this)), "r"(bytes) : "memory");
    }
    DEVICE bool passed(u32 parity) {
        u32 done;
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(this)), "r"(parity) : "memory");
        return done;
    }
    // Waits for the end of a phase of `parity`.
    DEVICE void wait(u32 parity) {
        while (!passed(parity)) {}
    }
};

// Makes initialised barriers known to TMA; a barrier of the block follows.
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

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
DEVICE void meet(int consumer) { asm volatile("bar.sync %0, 128;" ::"r"(1 + CONSUMERS + consumer) : "memory"); }

// Consumers issue their products one after another, so that one's softmax runs beside the products of the others
// (ping-pong): a named barrier each, where it and the one before meet. All take the same number of turns.
DEVICE void await_turn(int consumer) { asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory"); }
DEVICE void pass_turn(int consumer) {
    const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + next) : "memory");
}

// -- registers --------------------------------------------------------------------------------------------------------

// What loader and dealer give up, the consumers get: 64 Ki registers for all warps.
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
