// Which rows and keys a block has: some queries of some heads that share a key head, and a part of the keys they see.
//
// Row r is query r % each of head r / each, as TMA brings a box of them. Both are powers of two, so that there may be
// more of either than the group has, or the sequence: such rows are computed and not stored.
#pragma once
#include "extents.cuh"
#include "hopper/scores.cuh"
#include "schedule.cuh"

enum { WHOLE, PARTS };  // of SPLIT: results, or parts of them for merge.cu

struct Rows {
    const Arguments& a;
    const int each = BLOCK_M / a.pack;  // queries of a head
    int batch, head_kv, head, heads;    // the first, and how many
    int first, count;                   // of its queries
    int split;
    Extent extent;
    Reach reach;

    DEVICE Rows(const Arguments& a) : a(a) {
        const Place at = place(a, a.packs, a.tiles, true);
        const int tiles = ceil_div(a.group, a.pack);  // of the heads that share a key head
        batch = at.batch, split = at.split, first = at.tile * each;
        head_kv = at.head / tiles, head = head_kv * a.group + at.head % tiles * a.pack;
        heads = smaller(a.pack, (head_kv + 1) * a.group - head);
        extent = extent_at(a, batch);
        count = smaller(each, queries_in(a, extent) - first);
        if (count > 0) reach = ::reach(sees(0), sees(count - 1));
        if (count > 0 && SPLIT) cut();
    }
    // Tiles of keys, in pairs: those of a split are of what the sequence sees, the same whatever lies beside it.
    DEVICE void cut() {
        const Span to_first = keys_of(a, extent, 0), to_last = keys_of(a, extent, queries_in(a, extent) - 1);
        const Reach seen = ::reach(to_first, to_last);
        const int own = 2 * quotient(ceil_div(seen.tiles(), 2) + a.splits - 1, a.by_splits);
        const int from = seen.first_tile() + split * own;
        reach.any.from = larger(reach.any.from, from * BLOCK_N), reach.any.to = smaller(reach.any.to, (from + own) * BLOCK_N);
    }
    DEVICE int steps() const { return ceil_div(reach.tiles(), 2); }
    // Where tile `t` of a pair begins, and whether it is one of these: the last pair may have one.
    DEVICE int start(int step, int t) const { return (reach.first_tile() + 2 * step + t) * BLOCK_N; }
    DEVICE bool has(int step, int t) const { return 2 * step + t < reach.tiles(); }

    // Of row r.
    DEVICE int query_of(int r) const { return r % each; }
    DEVICE int head_of(int r) const { return head + r / each; }
    DEVICE bool is_there(int r) const { return query_of(r) < count && r / each < heads; }
    // What query `i` of these sees.
    DEVICE Span sees(int i) const { return keys_of(a, extent, first + i); }

    // Where they are in the operands, and in lse and out.
    DEVICE int plane() const { return VARLEN ? 0 : batch; }
    DEVICE i64 line_of(int r) const {
        return ::line_of(a, batch, head_of(r), first_query(extent), first + query_of(r));
    }
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
