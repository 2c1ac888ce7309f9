// Which tile of rows a block works on, and which tiles of keys its rows see.
//
// Tiles of rows are numbered so that those with most keys come first, within a section of heads that share the L2.
// There are as many blocks as SMs, and each that is nearly done takes the next tile, counted in global memory
// (`a.counter`: BLANK before and after the launch, and null where there is a block for each tile). Dealing them out
// beforehand evens out worse: 10 % at 16,384 causal.
//
// Sequences one after another (VARLEN) come one after another, each from its last tile on. Their tiles are numbered as
// in sequences.cuh, so that there are a few numbers for nothing, which the dealer leaves out, and not as many as if each
// were as long as the longest.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/mask.cuh"
#include "hopper/extent.cuh"
#include "schedule.cuh"

// Whether the dealer tells the others the first tile as well, which takes a while to find.
constexpr bool TOLD = MASKED || VARLEN;

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
        const int end = smaller(first + to, queries_in(a, extent));
        if (first + from >= end) return Reach{{0, 0}, {0, 0}};
        return reach(keys_of(a, extent, first + from), keys_of(a, extent, end - 1));
    }
    // Where they are in the operands.
    DEVICE int plane() const { return VARLEN ? 0 : batch; }
    DEVICE int query_row() const { return int(first_query(extent)) + first; }
    DEVICE int key_row(int tile) const { return int(first_key(extent)) + tile * BLOCK_N; }
};

#if VARLEN
// Of a head.
DEVICE int tiles_of(const Arguments& a) { return int(a.query_rows / BLOCK_M) + a.batch; }
DEVICE u32 tiles_of_all(const Arguments& a) { return u32(a.heads) * tiles_of(a); }

// Without rows where the number is for nothing.
DEVICE Work begin_at(const Arguments& a, u32 tile) {
    const Place at = place(a, tile, a.heads, a.heads, tiles_of(a), false);
    const int batch = sequence_of<BLOCK_M>(a, at.tile, a.batch);
    const Extent extent = extent_in(a, batch);
    const int after = at.tile - int(first_tile_of<BLOCK_M>(batch, extent.first_query));
    const int left = ceil_div(extent.queries, BLOCK_M) - 1 - after;
    const int first = left < 0 ? extent.queries : left * BLOCK_M;
    return Work{batch, at.head, at.head / a.group, first, 0, 0, 0, 0, 0, 0, 0, extent};
}
#else
DEVICE int tiles_of(const Arguments& a) { return ceil_div(a.queries, BLOCK_M); }
DEVICE u32 tiles_of_all(const Arguments& a) { return u32(a.batch) * a.heads * tiles_of(a); }

DEVICE Work begin_at(const Arguments& a, u32 tile) {
    const Place at = place(a, tile, u32(a.batch) * a.heads, a.heads, tiles_of(a), true);
    return Work{at.batch, at.head, at.head / a.group, at.tile * BLOCK_M, 0, 0, 0, 0, 0, 0, 0, extent(a, at.batch)};
}
#endif

DEVICE Work work_at(const Arguments& a, u32 tile) {
    Work work = begin_at(a, smaller(tile, tiles_of_all(a) - 1));
    const Reach all = work.seen_by(a, 0, BLOCK_M);
    work.first_tile = all.first_tile(), work.count = all.tiles(), work.end_tile = work.first_tile + work.count;
    if (MASKED) {
        const int group = smaller(work.first / GROUP, mask_groups(a) - 1);
        work.words = mask_set<BLOCK_N>(a, mask_plane(a, work.batch, work.head), group, SEEN) - a.mask_sets;
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
    return a.mask_sets[work.words + (2 * smaller(consumer, work.groups) + kind) * mask_words<BLOCK_N>(a) + word];
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
        work.count += ones(left);
        UNROLL for (int c = 0; c < CONSUMERS; c++) {
            seen[c] += ones(left & bits_between(word, tiles[c][0], tiles[c][1]));
            before[c] += ones(left & bits_between(word, tiles[c][1], work.end_tile));
        }
    }
}

// The tiles that are left, from the last to the first, and what is told of each: its number, and for each consumer
// whether the mask hides any of it from those rows.
struct Left {
    int word = 0;  // that these are of
    u32 tiles = 0, hidden[CONSUMERS];

    DEVICE void begin(const Work& work) { word = ceil_div(work.end_tile, 32), tiles = 0; }
    // There is one.
    DEVICE u32 next(const Arguments& a, const Work& work) {
        while (!tiles) {
            tiles = left_by_mask(a, work, --word);
            UNROLL for (int c = 0; c < CONSUMERS; c++) hidden[c] = mask_word(a, work, c, HIDDEN, word);
        }
        const int bit = highest(tiles);
        tiles ^= 1u << bit;
        u32 told = u32(32 * word + bit) << CONSUMERS;
        UNROLL for (int c = 0; c < CONSUMERS; c++) told |= (hidden[c] >> bit & 1) << c;
        return told;
    }
};

// -- who works on which -----------------------------------------------------------------------------------------------

// How the dealer tells the others a tile, worked out (`full`). It deals the next one when the consumers have read this
// one and the loader has little of it left (`free`).
struct Ticket {
    Barrier full, free;
    u32 tile;
    Work work;
    int before[CONSUMERS], seen[CONSUMERS];
};

// The tiles of a block, one after another; `work` is meaningless once there is none. All but those who are TOLD work out
// the first one by themselves, and there is no ticket of round 0.
struct Schedule {
    const Arguments& a;
    Ticket& ticket;
    const u32 tiles = tiles_of_all(a);
    u32 tile = block_index(), round = TOLD ? 0 : 1;
    Work work = work_at(a, tile);

    DEVICE bool more() const { return tile < tiles; }

    // Of the dealer.
    DEVICE void tell() {
        if (MASKED) pick(a, work, ticket.before, ticket.seen);
        ticket.tile = tile, ticket.work = work;
        ticket.full.arrive();
        round++;
    }
    // The next tile, shortly before the block is done with this one: taken earlier, it would wait for its turn here,
    // while another block has nothing to do.
    DEVICE void deal() {
        ticket.free.wait(~round & 1);
        do {
            tile = blocks() + (a.counter ? taken() : 0);
            work = work_at(a, tile);
        } while (VARLEN && more() && work.first >= queries_in(a, work.extent));
        tell();
    }
    // Tiles that were taken before this one. Every block takes one too many, so that the last has counted them all.
    DEVICE u32 taken() const {
        const u32 before = take_number(a.counter) - BLANK;
        if (before == tiles - 1) *a.counter = BLANK;
        return before;
    }
    // Of the others.
    DEVICE void follow() {
        ticket.full.wait(round & 1);
        tile = ticket.tile, work = ticket.work;
        round++;
    }
    // Of a consumer.
    DEVICE void follow(int consumer) {
        follow();
        if (MASKED) work.before = ticket.before[consumer], work.seen = ticket.seen[consumer];
        read();
    }
    // Of a consumer that knows the tile of a round.
    DEVICE void read() {
        warp_barrier();
        if (thread_index() % 32 == 0) ticket.free.arrive();
    }
    // Of the loader.
    DEVICE void want() { ticket.free.arrive(); }
};
