// Keys split evenly among blocks, though the GPU alone knows how many there are (SPLIT == EVEN): all pairs of tiles of
// keys, of all rows of all sequences one after another, are cut into as many stretches as there are blocks, as in
// stream-K (Osama et al. 2023).
//
//   rows      |0        |1   |2             |3 |4      |
//   blocks    |0     |1     |2     |3     |4     |5    |
//
// What a block has of the same rows is a portion. Rows that are one portion are stored as results; of others the portion
// is a part, whose place is its block's number and its rows' number together: no other portion has the same sum, as
// either grows from one portion to the next. Who has the first pair of some rows tells merge.cu where their parts begin,
// and how many.
#pragma once
#include "hopper/latent/rows.cuh"

// Rows take time whatever keys they see: that of so many pairs.
constexpr int BESIDE = 1;

// Of a sequence: tiles of rows of all its heads, and how many pairs of tiles of keys each has. Rows without keys have
// one.
struct Load {
    int tiles = 0, pairs = 1;
    Extent extent;
    Reach seen;

    DEVICE Load(const Arguments& a, int batch) {
        if (batch >= a.batch) return;
        extent = extent_at(a, batch), seen = seen_of(a, extent);
        const int each_log = highest(BLOCK_M) - highest(a.pack);
        tiles = a.packs * (queries_in(a, extent) + (1 << each_log) - 1 >> each_log);
        pairs = larger(ceil_div(seen.tiles(), 2), 1);
    }
    DEVICE int each() const { return BESIDE + pairs; }
    DEVICE int all() const { return tiles * each(); }
};

// How pairs are dealt, those of BESIDE as well: the first blocks have one more than the others.
struct Dealt {
    int blocks, own, more;  // blocks that have any

    DEVICE Dealt(int pairs) : blocks(larger(smaller(int(::blocks()), pairs), 1)) {
        own = pairs / blocks, more = pairs - own * blocks;
    }
    DEVICE int first_of(int block) const { return own * block + smaller(block, more); }
    DEVICE int block_of(int pair) const {
        const int most = more * (own + 1);
        return pair < most ? pair / (own + 1) : more + (pair - most) / own;
    }
};

// Pairs and tiles of rows of the threads of a block before this one, and of all.
struct Scan {
    int pairs, tiles, all_pairs = 0, all_tiles = 0;

    // By all of them; `room` holds what each warp has until the next barrier.
    DEVICE Scan(int own_pairs, int own_tiles, int (&room)[2][WARPS]) : pairs(own_pairs), tiles(own_tiles) {
        const int lane = thread_index() % 32, warp = thread_index() / 32;
        UNROLL for (int lanes = 1; lanes < 32; lanes *= 2) {  // up to this one
            const int from = larger(lane - lanes, 0), more = of_lane(pairs, from), rows = of_lane(tiles, from);
            if (lane >= lanes) pairs += more, tiles += rows;
        }
        if (lane == 31) store_shared(&room[0][warp], pairs), store_shared(&room[1][warp], tiles);
        barrier();
        pairs -= own_pairs, tiles -= own_tiles;
        UNROLL for (int w = 0; w < WARPS; w++) {
            const int more = load_shared(&room[0][w]), rows = load_shared(&room[1][w]);
            all_pairs += more, all_tiles += rows;
            if (w < warp) pairs += more, tiles += rows;
        }
    }
};

// Where a block begins: pairs of all blocks, and the sequence, with pairs and tiles of rows before it.
struct Begin {
    int pairs, before, tiles, batch;

    // By all threads of the block, each of which looks at a sequence at a time. A barrier follows.
    DEVICE void find(const Arguments& a, int (&room)[2][WARPS]) {
        constexpr int THREADS = 32 * WARPS;
        const int thread = thread_index();
        Load load(a, thread);
        Scan scan(load.all(), load.tiles, room);
        int total = scan.all_pairs;
        if (a.batch > THREADS) {
            int further = 0;
            ROLLED for (int b = thread + THREADS; b < a.batch; b += THREADS) further += Load(a, b).all();
            barrier();  // all have read the room
            total += Scan(further, 0, room).all_pairs;
        }
        if (thread == 0) store_shared(&pairs, total);
        const int first = Dealt(total).first_of(block_index());
        int from = 0, passed = 0, rows = 0;
        while (true) {
            const int begins = passed + scan.pairs;
            if (begins <= first && first < begins + load.all()) {
                store_shared(&before, begins), store_shared(&tiles, rows + scan.tiles);
                store_shared(&batch, from + thread);
            }
            from += THREADS, passed += scan.all_pairs, rows += scan.all_tiles;
            if (from >= a.batch || passed > first) return;
            barrier();
            load = Load(a, from + thread), scan = Scan(load.all(), load.tiles, room);
        }
    }
};

// Calls use(rows) for each portion of this block.
template <class Use> DEVICE void each_portion(const Arguments& a, const Begin& begin, Use use) {
    // Broadcast, so that the compiler knows that a warp's lanes go along together.
    const Dealt dealt(broadcast(load_shared(&begin.pairs)));
    const int block = block_index();
    int at = dealt.first_of(block), end = dealt.first_of(block + 1);
    if (block >= dealt.blocks) return;
    int before = broadcast(load_shared(&begin.before)), tiles = broadcast(load_shared(&begin.tiles));
    int batch = broadcast(load_shared(&begin.batch));
    ROLLED while (at < end) {
        const Load load(a, batch);
        const int all = broadcast(load.all()), pairs = broadcast(load.pairs);
        if (at >= before + all) {
            before += all, tiles += broadcast(load.tiles), batch++;
            continue;
        }
        const int tile = load.tiles == 1 ? 0 : broadcast((at - before) / load.each());
        const int first = before + tile * (BESIDE + pairs) + BESIDE;  // its first pair of keys
        Portion own{larger(at - first, 0)};
        own.pairs = smaller(end - first, pairs) - own.from, own.place = block + tiles + tile;
        at = smaller(end, first + pairs);
        if (own.pairs <= 0) continue;
        if (own.pairs < pairs) own.parts = own.from ? 1 : dealt.block_of(first + pairs - 1) - block + 1;
        use(Rows(a, batch, load.extent, load.seen, tile, own));
    }
}
