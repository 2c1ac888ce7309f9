// ORDERED: the thread that adds to dQ, in turn, what the consumers leave in shared memory.
//
// Each tile of dQ has a number in global memory: how many blocks are done with it, in the order of their keys. The
// thread waits for the block's turn while the consumers compute, and hands it on when its additions are done. They go
// on as soon as these were read: a step may be late by as much before they wait.
//
// Of a step, dQ is there when the consumers have `written` dS of the next one, or have come to their end. A tile that a
// mask hides takes a turn too, since others know of positions alone.
//
// A block waits for none but blocks before it on the grid, which were begun before it: so the first that is not at its
// end never waits, and it does not matter how many are there at once.
#pragma once
#include "hopper/backward/loader.cuh"

struct Adder {
    const Arguments& a;
    Shared& shared;
    Position<2> at;

    DEVICE void run() {
        const Keys block(a);
        await_launch_before();  // which has made all numbers 0
        ROLLED for (Step step(a, block, true); step.more(); step.next()) {
            const int tile = (block.batch * a.heads + step.head) * (a.padded / BLOCK_N) + step.start / BLOCK_N;
            const u32 turn = block.turn(a, step.start);
            await_number(turns_of(a, tile), turn);
            if (step.seen) add(sums_of(a.sums, tile));
            leave_number(turns_of(a, tile), turn + 1);
        }
    }
    DEVICE void add(float* tile) {
        at.next();
        shared.written[at.stage].wait(at.parity);
        ROLLED for (int part = 0; part < 4 * CONSUMERS; part++) {
            const int consumer = part / 4, warp = part % 4;
            add_floats(tile + (warp * (BLOCK_D / 8) + consumer * MINE / 8) * QUADS, shared.sums[consumer][warp],
                       MINE / 8 * QUADS);
        }
        commit_additions();
        wait_additions();
        shared.taken.arrive();
        finish_additions();
    }
};
