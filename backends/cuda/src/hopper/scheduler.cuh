// Which tile of rows a block works on, and which tiles of keys its rows see.
//
// Tiles of rows are numbered so that those with most keys come first, within a section of heads that share the L2.
// There are as many blocks as SMs, and each that is done takes the next tile, counted in global memory (`a.counter`, 0
// before the launch, and null where there is a block for each tile). Dealing them out beforehand evens out worse: 10 %
// at 16,384 causal.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/mask.cuh"
#include "positions.cuh"
#include "schedule.cuh"

// A tile of rows, and the tiles of keys that any of them sees: an interval, or, MASKED, what a mask leaves of it.
struct Work {
    int batch, head, head_kv, first;  // its first row
    int first_tile, end_tile, count;
    // MASKED: where the words of its first group are, and groups after that; tiles that a consumer passes by, and those
    // that follow.
    int words, groups, before, seen;
    Extent extent;

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
    Work work{at.batch, at.head, at.head / a.group, at.tile * BLOCK_M, 0, 0, 0, 0, 0, 0, 0, extent(a, at.batch)};
    const Reach all = work.seen_by(a, 0, BLOCK_M);
    work.first_tile = all.first_tile(), work.count = all.tiles(), work.end_tile = work.first_tile + work.count;
    if (MASKED) {
        const int group = smaller(work.first / GROUP, mask_groups(a) - 1);
        work.words = mask_set(a, mask_plane(a, work.batch, work.head), group, SEEN) - a.mask_sets;
        work.groups = mask_groups(a) - 1 - group;
    }
    return work;
}

// -- what a mask leaves -----------------------------------------------------------------------------------------------

// The bits of a word of tiles that lie in [from, to).
DEVICE u32 bits_between(int word, int from, int to) {
    const auto from_on = [&](int tile) {
        tile -= 32 * word;
        return tile <= 0 ? ~0u : tile >= 32 ? 0 : ~0u << tile;
    };
    return from_on(from) & ~from_on(to);
}

// A word of the tiles that the mask shows to a consumer's rows, or hides from them: SEEN, HIDDEN.
DEVICE u32 mask_word(const Arguments& a, const Work& work, int consumer, int kind, int word) {
    return a.mask_sets[work.words + (2 * smaller(consumer, work.groups) + kind) * mask_words(a) + word];
}

// Tiles of a word that some row sees by the mask, and may see by position.
DEVICE u32 left_by_mask(const Arguments& a, const Work& work, int word) {
    u32 tiles = 0;
    UNROLL for (int c = 0; c < CONSUMERS; c++) tiles |= mask_word(a, work, c, SEEN, word);
    return tiles & bits_between(word, work.first_tile, work.end_tile);
}

// Counts the tiles that are left, and those before and among the ones that each consumer's rows see by position.
DEVICE void pick(const Arguments& a, Work& work, int* before, int* seen) {
    int tiles[CONSUMERS][2];
    UNROLL for (int c = 0; c < CONSUMERS; c++) {
        const Reach reach = work.seen_by(a, GROUP * c, GROUP * c + GROUP);
        tiles[c][0] = reach.first_tile(), tiles[c][1] = reach.first_tile() + reach.tiles();
        before[c] = seen[c] = 0;
    }
    work.count = 0;
    for (int word = work.first_tile / 32; 32 * word < work.end_tile; word++) {
        const u32 left = left_by_mask(a, work, word);
        work.count += __popc(left);
        UNROLL for (int c = 0; c < CONSUMERS; c++) {
            seen[c] += __popc(left & bits_between(word, tiles[c][0], tiles[c][1]));
            before[c] += __popc(left & bits_between(word, tiles[c][1], work.end_tile));
        }
    }
}

// The last tile before `tile` that is left; there is one.
DEVICE int left_before(const Arguments& a, const Work& work, int tile) {
    int word = tile / 32;
    u32 left = left_by_mask(a, work, word) & bits_between(word, 0, tile);
    while (!left) left = left_by_mask(a, work, --word);
    return 32 * word + 31 - __clz(left);
}

// How the producer tells the consumers the next tile, worked out; MASKED, the first one too.
struct Ticket {
    Barrier full, free;
    u32 tile;
    Work work;
    int before[CONSUMERS], seen[CONSUMERS];
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
        tell();
    }
    DEVICE void tell() {
        ticket.free.wait(~round & 1);
        if (MASKED) pick(a, work, ticket.before, ticket.seen);
        ticket.tile = tile;
        ticket.work = work;
        ticket.full.arrive();
        round++;
    }
    // Of a consumer.
    DEVICE void follow(int consumer) {
        ticket.full.wait(round & 1);
        tile = ticket.tile;
        work = ticket.work;
        if (MASKED) work.before = ticket.before[consumer], work.seen = ticket.seen[consumer];
        warp_barrier();
        if (thread_index() % 32 == 0) ticket.free.arrive();
        round++;
    }
};
