// Which tile of rows a block works on, and which tiles of keys its rows see.
//
// Tiles of rows are numbered so that those with most keys come first, within a section of heads that share the L2.
// There are as many blocks as SMs, and each that is done takes the next tile, counted in global memory (`a.counter`, 0
// before the launch, and null where there is a block for each tile). Dealing them out beforehand evens out worse: 10 %
// at 16,384 causal.
#pragma once
#include "hopper/barriers.cuh"
#include "positions.cuh"
#include "schedule.cuh"

// A tile of rows, and the tiles of keys that any of them sees.
struct Work {
    int batch, head, head_kv, first;  // its first row
    int first_tile, count;
    Extent extent;

    // Where tile i of the keys begins, counted from the last.
    DEVICE int start(int i) const { return (first_tile + count - 1 - i) * BLOCK_N; }
    // What rows `from` to `to` of it see; those past the last query see nothing.
    DEVICE Reach seen_by(const Arguments& a, int from, int to) const {
        const int end = smaller(first + to, a.queries);
        if (first + from >= end) return Reach{{0, 0}, {0, 0}};
        return reach(keys_of(a, extent, first + from), keys_of(a, extent, end - 1));
    }
};

DEVICE int tiles_of(const Arguments& a) { return ceil_div(a.queries, BLOCK_M); }
DEVICE u32 tiles_of_all(const Arguments& a) { return u32(a.batch) * a.heads * tiles_of(a); }

DEVICE Work work_at(const Arguments& a, u32 tile) {
    const Place at = place(a, smaller(tile, tiles_of_all(a) - 1), a.heads, tiles_of(a), true);
    Work work{at.batch, at.head, at.head / a.group, at.tile * BLOCK_M, 0, 0, extent(a, at.batch)};
    const Reach all = work.seen_by(a, 0, BLOCK_M);
    work.first_tile = all.first_tile(), work.count = all.tiles();
    return work;
}

// How the producer tells the consumers the next tile, worked out.
struct Ticket {
    Barrier full, free;
    u32 tile;
    Work work;
};

// The tiles of a block, one after another; `work` is meaningless once there is none.
struct Schedule {
    const Arguments& a;
    Ticket& ticket;
    const u32 tiles = tiles_of_all(a);
    u32 tile = block_index(), round = 0, taken = 0;
    Work work = work_at(a, tile);

    DEVICE bool more() const { return tile < tiles; }

    // Of the producer, shortly before it is done with a tile: a tile taken earlier would wait for its turn here, while
    // another block has nothing to do.
    DEVICE void take() {
        if (a.counter) taken = atomicAdd(a.counter, 1u);
    }
    // Of the producer, after `take`.
    DEVICE void deal() {
        tile = gridDim.x + taken;
        work = work_at(a, tile);
        ticket.free.wait(~round & 1);
        ticket.tile = tile;
        ticket.work = work;
        ticket.full.arrive();
        round++;
    }
    // Of a consumer.
    DEVICE void follow() {
        ticket.full.wait(round & 1);
        tile = ticket.tile;
        work = ticket.work;
        warp_barrier();
        if (thread_index() % 32 == 0) ticket.free.arrive();
        round++;
    }
};
