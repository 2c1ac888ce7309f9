// The two threads that add to dQ what the consumers leave in shared memory, in turns among blocks.
//
// Each tile of dQ has a number in global memory: how many blocks are done with it, in the order of their keys. Who adds
// waits until all before this block are, and hands on when its own additions are done. That takes longer than a step, so
// two threads take the steps by turns, each with a tile of sums in shared memory; and while its additions are under way
// a thread looks for its next turn.
//
// Of a step, dQ is there when the consumers have `written` dS of the next one, or have come to their end. A tile that a
// mask hides takes a turn too, since others know of positions alone.
//
// A block waits for none but blocks before it on the grid, which begin before it: so of those that have begun and not
// ended, the first never waits, however many there is room for.
#pragma once
#include "hopper/backward/sums.cuh"
#include "hopper/backward_ordered/shared.cuh"
#include "hopper/backward_ordered/steps.cuh"

struct Adder {
    const Arguments& a;
    Shared& shared;
    const int own;  // tile of dS with which its dQ is there, and of sums
    int shown = 1;  // tiles of dS by the time that dQ of the next step is there
    int tile;       // of dQ, of its next step
    u32 turn;       // of this block there
    u32 reached;    // blocks that were done with it when they were looked for

    DEVICE void run() {
        const Keys block(a, block_index());
        OrderedStep step(a, block, true);
        await_launch_before();  // which has made all numbers 0
        find(block, step);
        if (own == 0 && step.more()) {  // with the first tile of dS there is no dQ
            shared.written[0].wait(0);
            shared.taken[0].arrive();
        }
        while (step.more()) {
            const int its = tile;
            const u32 now = turn, adds = step.seen;
            if (reached < now) await_number(turns_of(a, its), now);
            if (adds) add(), shown++;
            step.next(), find(block, step);
            finish_additions();
            if (adds) shared.taken[own].arrive();
            leave_number(turns_of(a, its), now + 1);
        }
    }

private:
    // The next step of this thread, from here on.
    DEVICE void find(const Keys& block, OrderedStep& step) {
        for (; step.more() && shown % ADDERS != own; step.next()) shown += step.seen;
        if (!step.more()) return;
        tile = step.tile(a, block);
        turn = step.turn();
        reached = number_at(turns_of(a, tile));
    }
    DEVICE void add() {
        float* const to = sums_of(a.sums, tile);
        shared.written[own].wait(shown / ADDERS % 2);
        follow_additions();
        ROLLED for (int part = 0; part < 4 * CONSUMERS; part++) {
            const int consumer = part / 4, warp = part % 4;
            add_floats(to + (warp * (BLOCK_D / 8) + consumer * MINE / 8) * QUADS, shared.sums[own][consumer][warp],
                       MINE / 8 * QUADS);
        }
        commit_additions();
    }
};
