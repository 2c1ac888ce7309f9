// The epilogue of the forward: out and lse of rows or, of split keys (SPLIT), parts of them.
//
// PARTS: to merge.cu, maximum and sum of each row in `sums` (2, splits, batch, heads, queries) and its numerator in
// `parts` (splits, batch, heads, queries, dim_v). MERGED, of few splits: all three to the block of the last one, in
// `parts` (tiles of rows, splits - 1, BLOCK_M, LEFT). That block waits: those before it on the grid were begun before
// it, and wait for nobody. Parts add up exactly where they do (together.cuh).
#pragma once
#include "portable/packed.cuh"
#include "portable/softmax.cuh"
#include "portable/together.cuh"
#include "sinks.cuh"

enum { WHOLE, PARTS, MERGED };  // of SPLIT

// MERGED: the blocks that have these rows and the keys of other splits than the last.
struct Others {
    const Arguments& a;
    const PackedRows& rows;
    Real* const parts;
    const int count = a.splits - 1;
    Real* const left = parts + i64(quotient(block_index(), a.by_splits)) * count * LEFT_BY_BLOCK;

    // Whether this block is one of them, and leaves its columns d and d + 1 of the block's row r; or merges what they
    // leave with its own.
    DEVICE bool have_this() const { return rows.split < count; }
    DEVICE void leave(int r, int d, const Pair& own) const {
        ::leave(left + rows.split * LEFT_BY_BLOCK + r * LEFT, d, own);
    }
    DEVICE Pair merged(int r, int d, const Pair& own) const { return of_splits(left + r * LEFT, count, d, own); }

    // Before and after the last block waits.
    DEVICE bool are_awaited() const { return TEAMS > 1 && SPLIT == MERGED && rows.split == count; }
    DEVICE void fetch() const {
        if (are_awaited()) fetch_left(left, count, rows.count);
    }
    DEVICE void clear() const {
        if (are_awaited()) clear_left(left, count, rows.count);
    }
};

// What a block without rows has to do: with VARLEN, results of its part of the rows past the last sequence. Of PARTS
// merge.cu has them.
DEVICE void clear_past(const Arguments& a, const PackedRows& rows) {
    if (!is_past(a, rows.batch) || rows.split > 0 || SPLIT == PARTS) return;
    Real* const lse = reinterpret_cast<Real*>(a.lse);
    each_past(first_query(rows.extent), a.query_rows, rows.first / BLOCK_M, rows.tiles(), [&](i64 row) {
        for (int h = rows.first_head; h < rows.first_head + a.pack; h++) {
            clear_row(reinterpret_cast<T*>(a.out.at) + h * a.out.head + row * a.out.row, a.dim_v);
            if (lse && lane() == 0) lse[line_of(a, 0, h, 0, row)] = -INFINITE;
        }
    });
}

struct Results {
    const Arguments& a;
    const PackedRows& rows;
    Real* const parts;
    const i64 lines = lines_of(a);
    Real* const lse = reinterpret_cast<Real*>(a.lse);
    Real* const maxima = reinterpret_cast<Real*>(a.sums);
    Real* const totals = maxima + a.splits * lines;

    // Of one team: each thread has its rows in registers.
    DEVICE void store_rows(Real (&sums)[ROWS][COLUMNS<BLOCK_DV>], const Softmax& softmax, Real factor) const {
        UNROLL for (int m = 0; m < ROWS; m++) {
            const int r = rows.mine(m);
            if (r >= rows.all) continue;
            const Real top = softmax.top[m];
            Real total = softmax.total[m];
            const i64 line = line_of(r);
            if (SPLIT) {
                const i64 part = rows.split * lines + line;
                if (score_column(0) == 0) maxima[part] = FOLD ? top * factor : top, totals[part] = total;
                store_sums<Real, BLOCK_DV>(parts + part * a.dim_v, sums[m], a.dim_v);
            } else {
                Real natural = FOLD ? top * Real(a.scale) : top, rescale = 1;
                if (SINKS) rescale = join_sink(sink_of(r), FOLD ? rounded(top, factor) : top, natural, total);
                if (lse && score_column(0) == 0) lse[line] = lse_of(natural, total);
                const Real weight = weight_of(total) * rescale;
                UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= weight;
                store_sums<T, BLOCK_DV>(out_of(r), sums[m], a.dim_v);
            }
        }
    }
    // Of several teams, put together: all threads take the rows, two columns at a time. `share` is as in `each_pair`.
    template <class Share>
    DEVICE void store_together(Real (&sums)[ROWS][COLUMNS<BLOCK_DV>], Softmax& softmax, Real factor,
                               const Others& others, Share share) const {
        if (FOLD) UNROLL for (int m = 0; m < ROWS; m++) softmax.top[m] *= factor;
        const bool even = a.dim_v % 2 == 0;
        each_pair(sums, softmax.top, softmax.total, rows.count, a.dim_v, share, [&](int r, int d, Pair all) {
            if (SPLIT == MERGED) {
                if (others.have_this()) return others.leave(r, d, all);
                all = others.merged(r, d, all);
            }
            if (SPLIT == PARTS)
                store_part(rows.first + r, d, all, even);
            else
                store_pair_of(rows.first + r, d, all, even);
        });
        others.clear();
    }

private:
    DEVICE i64 line_of(int r) const {
        return ::line_of(a, rows.batch, rows.head(r), first_query(rows.extent), rows.query(r));
    }
    DEVICE T* out_of(int r) const {
        return reinterpret_cast<T*>(a.out.at) + BEGIN_OF(a.out, rows.batch, first_query(rows.extent)) +
               rows.head(r) * a.out.head + rows.query(r) * a.out.row;
    }
    DEVICE Real sink_of(int r) const { return ::sink_of(a, rows.head(r)); }
    // `natural` is the largest score in natural units.
    DEVICE Real lse_of(Real natural, Real total) const { return total == 0 ? -INFINITE : natural + logarithm(total); }
    // An exact quotient: the mean of a power of two of equal weights is exact too.
    DEVICE Real weight_of(Real total) const { return Real(a.keep_scale) / (total == 0 ? Real(1) : total); }

    // Columns d and d + 1 of row r.
    DEVICE void store_pair_of(int r, int d, Pair all, bool even) const {
        Real natural = FOLD ? all.top / UNIT : all.top, rescale = 1;
        if (SINKS) rescale = join_sink(sink_of(r), all.top, natural, all.total);
        if (lse && d == 0) lse[line_of(r)] = lse_of(natural, all.total);
        const Real weight = weight_of(all.total) * rescale;
        all.at[0] *= weight, all.at[1] *= weight;
        store_pair(out_of(r) + d, all.at, a.dim_v - d, even);
    }
    DEVICE void store_part(int r, int d, const Pair& all, bool even) const {
        const i64 part = rows.split * lines + line_of(r);
        if (d == 0) maxima[part] = all.top, totals[part] = all.total;
        store_pair(parts + part * a.dim_v + d, all.at, a.dim_v - d, even);
    }
};
