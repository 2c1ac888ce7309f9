// Which rows and keys a block has: some queries of some heads that share a key head, and a part of the keys they see.
//
// Row r is query r % each of head r / each, as TMA brings a box of them. Both are powers of two, so that there may be
// more of either than the group has, or the sequence: such rows are computed and not stored.
#pragma once
#include "extents.cuh"
#include "hopper/scores.cuh"
#include "order.cuh"
#include "schedule.cuh"

// Of SPLIT: results; parts of them for merge.cu, of as many splits as the host says; or either, by even.cuh.
enum { WHOLE, PARTS, EVEN };

// Pairs of tiles of keys that a block has of those that rows see, from one on. EVEN: where its part is, among all, and
// how many parts these rows have, where it has the first; none where it is whole.
struct Portion {
    int from = 0, pairs = 0;
    int place = 0, parts = 0;
};

// What a sequence sees of its keys.
DEVICE Reach seen_of(const Arguments& a, Extent extent) {
    return reach(keys_of(a, extent, 0), keys_of(a, extent, queries_in(a, extent) - 1));
}

// The logarithm of how many queries of a head a tile has.
DEVICE int each_log_of(const Arguments& a) { return highest(BLOCK_M) - highest(a.pack); }

struct Rows {
    const Arguments& a;
    const int each_log = each_log_of(a), each = 1 << each_log;  // queries of a head
    int batch, head_kv, head, heads;    // of query heads the first, and how many
    int first, count;                   // of its queries, the same
    int split;
    Portion portion;
    Extent extent;
    Reach reach;

    DEVICE Rows(const Arguments& a) : a(a) {
        Place at = place(a, a.packs, a.tiles, true);
        if (SPLIT != EVEN) at.batch = by_length(a, at.batch);
        find(at, extent_at(a, at.batch));
        if (count <= 0 || SPLIT != PARTS) return;
        // Those of a split are of what the sequence sees, the same whatever lies beside it.
        const Reach seen = seen_of(a, extent);
        const int own = quotient(ceil_div(seen.tiles(), 2) + a.splits - 1, a.by_splits);
        cut(seen, Portion{split * own, own});
    }
    // A portion of the n-th tile of rows of a sequence, which sees so much of its keys.
    DEVICE Rows(const Arguments& a, int batch, Extent extent, Reach seen, int n, Portion own) : a(a) {
        const int tile = int(quotient(n, a.by_packs));
        find(Place{batch, n - tile * a.packs, tile, 0}, extent);
        portion = own, cut(seen, own);
    }
    DEVICE void find(Place at, Extent of_batch) {
        const int tiles = int(quotient(a.group + a.pack - 1, a.by_pack));  // of the heads that share a key head
        batch = at.batch, split = at.split, first = at.tile * each, extent = of_batch;
        head_kv = tiles == 1 ? at.head : at.head / tiles;  // a division takes long
        head = head_kv * a.group + (at.head - head_kv * tiles) * a.pack;
        heads = smaller(a.pack, (head_kv + 1) * a.group - head);
        count = smaller(each, queries_in(a, extent) - first);
        if (count > 0) reach = ::reach(sees(0), sees(count - 1));
    }
    // Counted from the first pair that any row of the sequence sees.
    DEVICE void cut(const Reach& seen, Portion own) {
        const int from = seen.first_tile() + 2 * own.from, to = from + 2 * own.pairs;
        reach.any.from = larger(reach.any.from, from * BLOCK_N), reach.any.to = smaller(reach.any.to, to * BLOCK_N);
    }
    DEVICE int steps() const { return ceil_div(reach.tiles(), 2); }
    // Where tile `t` of a pair begins, and whether it is one of these: the last pair may have one.
    DEVICE int start(int step, int t) const { return (reach.first_tile() + 2 * step + t) * BLOCK_N; }
    DEVICE bool has(int step, int t) const { return 2 * step + t < reach.tiles(); }

    // Of row r.
    DEVICE int query_of(int r) const { return r & (each - 1); }
    DEVICE int head_of(int r) const { return head + (r >> each_log); }
    DEVICE bool is_there(int r) const { return query_of(r) < count && r >> each_log < heads; }
    // What query `i` of these sees.
    DEVICE Span sees(int i) const { return keys_of(a, extent, first + i); }

    // Where they are in the operands, and in lse and out.
    DEVICE int plane() const { return VARLEN ? 0 : batch; }
    DEVICE i64 line_of(int r) const {
        return ::line_of(a, batch, head_of(r), first_query(extent), first + query_of(r));
    }
    // Where its part is, of all parts of rows, and how many may be.
    DEVICE i64 part_of(int r) const {
        return SPLIT == EVEN ? i64(portion.place) * BLOCK_M + r : split * lines_of(a) + line_of(r);
    }
    DEVICE i64 all_parts() const { return a.splits * (SPLIT == EVEN ? BLOCK_M : lines_of(a)); }
    DEVICE T* out_of(int r) const {
        return reinterpret_cast<T*>(a.out.at) + BEGIN_OF(a.out, batch, first_query(extent)) + head_of(r) * a.out.head +
               (first + query_of(r)) * a.out.row;
    }
};

// What a block without rows has to do: the rows past the last sequence (VARLEN). Of PARTS merge.cu has them.
DEVICE void clear_past(const Rows& rows) {
    const Arguments& a = rows.a;
    if (!is_past(a, rows.batch) || SPLIT == PARTS) return;
    each_past(first_query(rows.extent), a.query_rows, rows.first / rows.each, a.tiles, [&](i64 row) {
        for (int h = rows.head; h < rows.head + rows.heads; h++) {
            clear_row(reinterpret_cast<T*>(a.out.at) + h * a.out.head + row * a.out.row, a.dim_v);
            if (a.lse && thread_index() % 32 == 0) static_cast<float*>(a.lse)[line_of(a, 0, h, 0, row)] = -INFINITE;
        }
    });
}
