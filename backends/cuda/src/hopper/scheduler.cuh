// Which tile of rows a block works on, and which tiles of keys its rows see.
//
// Tiles of rows are numbered so that those with most keys come first, within a section of heads that share the L2.
// SCHEDULE says who takes which: 0, a block a tile, as the GPU deals them; else as many blocks as SMs, that take
// 1: every so manieth tile, 2: the same, every other round backwards, so that lengths even out, 3: the next one,
// counted in global memory (`a.counter`, 0 between launches).
#pragma once
#include "hopper/barriers.cuh"
#include "positions.cuh"
#include "schedule.cuh"

// How the producer tells the consumers the next tile (SCHEDULE 3).
struct Ticket {
    Barrier full, free;
    u32 tile;
};

struct Work {
    int batch, head, head_kv, first;  // its first row
    Extent extent;
    Reach reach;

    // What rows `from` to `to` of it see; those past the last query see nothing.
    DEVICE Reach seen_by(const Arguments& a, int from, int to) const {
        const int end = smaller(first + to, a.queries);
        if (first + from >= end) return Reach{{0, 0}, {0, 0}};
        return ::reach(keys_of(a, extent, first + from), keys_of(a, extent, end - 1));
    }
};

DEVICE int tiles_of(const Arguments& a) { return ceil_div(a.queries, BLOCK_M); }
DEVICE u32 tiles_of_all(const Arguments& a) { return u32(a.batch) * a.heads * tiles_of(a); }

DEVICE Work work_at(const Arguments& a, u32 tile) {
    const Place at = place(a, tile, a.heads, tiles_of(a), true);
    Work work{at.batch, at.head, at.head / a.group, at.tile * BLOCK_M, extent(a, at.batch), {}};
    work.reach = work.seen_by(a, 0, BLOCK_M);
    return work;
}

// The tiles of a block, one after another.
struct Schedule {
    u32 tile = block_index(), round = 0;

    // Of the producer: `load` is called once the tile after this one has been asked for.
    template <class Load> DEVICE void deal(const Arguments& a, Ticket& ticket, u32 tiles, Load load) {
        u32 next = tiles;
        if (SCHEDULE == 3) {
            const u32 taken = atomicAdd(a.counter, 1u);
            if (taken == tiles - 1) *a.counter = 0;
            next = gridDim.x + taken;
        }
        load();
        if (SCHEDULE == 3) {
            ticket.free.wait(~round & 1);
            ticket.tile = next;
            ticket.full.arrive();
            tile = next;
            round++;
        } else {
            step(tiles);
        }
    }

    // Of a consumer.
    DEVICE void follow(Ticket& ticket, u32 tiles) {
        if (SCHEDULE == 3) {
            ticket.full.wait(round & 1);
            tile = *static_cast<volatile u32*>(&ticket.tile);
            warp_barrier();
            if (thread_index() % 32 == 0) ticket.free.arrive();
            round++;
        } else {
            step(tiles);
        }
    }

    DEVICE void step(u32 tiles) {
        round++;
        const u32 back = SCHEDULE == 2 && round % 2 ? gridDim.x - 1 - block_index() : block_index();
        tile = SCHEDULE == 0 ? tiles : round * gridDim.x + back;
    }
};
