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

// A tile of rows takes time whatever keys it sees: that of so many pairs.
constexpr int BESIDE = 1;

// What there is to do for a sequence: tiles of rows, of all its heads, and pairs of tiles of keys for each. Rows without
// keys have one. There is no more than the host has counted, whatever the GPU's offsets and lengths say.
struct SequenceWork {
    int row_tiles = 0, pairs = 1;
    Extent extent;
    Reach seen;

    DEVICE SequenceWork(const Arguments& a, int batch) {
        if (batch >= a.batch) return;
        extent = extent_at(a, batch), seen = seen_of(a, extent);
        const int each_log = each_log_of(a);
        const int queries = larger(smaller(queries_in(a, extent), a.queries), 0);
        row_tiles = a.packs * (queries + (1 << each_log) - 1 >> each_log);
        pairs = larger(smaller(ceil_div(seen.tiles(), 2), ceil_div(a.keys, 2 * BLOCK_N)), 1);
    }
    // In pairs, of a tile of rows and of all.
    DEVICE int each() const { return BESIDE + pairs; }
    DEVICE int all() const { return row_tiles * each(); }
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
    int pairs, row_tiles, all_pairs = 0, all_row_tiles = 0;

    // By all of them; `room` holds what each warp has until the next barrier.
    DEVICE Scan(int own_pairs, int own_row_tiles, int (&room)[2][WARPS]) : pairs(own_pairs), row_tiles(own_row_tiles) {
        const int lane = thread_index() % 32, warp = thread_index() / 32;
        UNROLL for (int lanes = 1; lanes < 32; lanes *= 2) {  // up to this one
            const int from = larger(lane - lanes, 0), more = of_lane(pairs, from), tiles = of_lane(row_tiles, from);
            if (lane >= lanes) pairs += more, row_tiles += tiles;
        }
        if (lane == 31) store_shared(&room[0][warp], pairs), store_shared(&room[1][warp], row_tiles);
        barrier();
        pairs -= own_pairs, row_tiles -= own_row_tiles;
        UNROLL for (int w = 0; w < WARPS; w++) {
            const int more = load_shared(&room[0][w]), tiles = load_shared(&room[1][w]);
            all_pairs += more, all_row_tiles += tiles;
            if (w < warp) pairs += more, row_tiles += tiles;
        }
    }
};

// Where a block begins: pairs of all blocks, and the sequence, with pairs and tiles of rows before it.
struct Begin {
    int all_pairs, pairs, row_tiles, batch;

    // By all threads of the block, each of which looks at a sequence at a time. A barrier follows.
    DEVICE void find(const Arguments& a, int (&room)[2][WARPS]) {
        constexpr int THREADS = 32 * WARPS;
        const int thread = thread_index();
        SequenceWork work(a, thread);
        Scan scan(work.all(), work.row_tiles, room);
        int all = scan.all_pairs;
        if (a.batch > THREADS) {
            int further = 0;
            ROLLED for (int b = thread + THREADS; b < a.batch; b += THREADS) further += SequenceWork(a, b).all();
            barrier();  // all have read the room
            all += Scan(further, 0, room).all_pairs;
        }
        if (thread == 0) store_shared(&all_pairs, all);
        const int first = Dealt(all).first_of(block_index());
        int from = 0, passed = 0, passed_tiles = 0;
        while (true) {
            const int begins = passed + scan.pairs;
            if (begins <= first && first < begins + work.all()) {
                store_shared(&pairs, begins), store_shared(&row_tiles, passed_tiles + scan.row_tiles);
                store_shared(&batch, from + thread);
            }
            from += THREADS, passed += scan.all_pairs, passed_tiles += scan.all_row_tiles;
            if (from >= a.batch || passed > first) return;
            barrier();
            work = SequenceWork(a, from + thread), scan = Scan(work.all(), work.row_tiles, room);
        }
    }
};

// Calls use(rows) for each portion of this block.
template <class Use> DEVICE void each_portion(const Arguments& a, const Begin& begin, Use use) {
    // Broadcast, so that the compiler knows that a warp's lanes go along together.
    const Dealt dealt(broadcast(load_shared(&begin.all_pairs)));
    const int block = block_index();
    int at = dealt.first_of(block), end = dealt.first_of(block + 1);
    if (block >= dealt.blocks || at == end) return;  // nobody has written the rest
    int before = broadcast(load_shared(&begin.pairs)), row_tiles = broadcast(load_shared(&begin.row_tiles));
    int batch = broadcast(load_shared(&begin.batch));
    ROLLED while (at < end && batch < a.batch) {
        const SequenceWork work(a, batch);
        const int each = broadcast(work.each()), tiles = broadcast(work.row_tiles);
        if (at >= before + tiles * each) {
            before += tiles * each, row_tiles += tiles, batch++;
            continue;
        }
        const int tile = tiles == 1 ? 0 : (at - before) / each;
        const int first = before + tile * each + BESIDE, last = first + each - BESIDE;  // its pairs of tiles of keys
        Portion own{larger(at - first, 0)};
        own.pairs = smaller(end, last) - first - own.from, own.place = block + row_tiles + tile;
        at = smaller(end, last);
        if (own.pairs <= 0) continue;
        if (own.pairs < last - first) own.parts = own.from ? 1 : dealt.block_of(last - 1) - block + 1;
        use(Rows(a, batch, work.extent, work.seen, tile, own));
    }
}
