// Blocks that share the steps of one tile of gradients, SPLIT: where few blocks have long ways. Each leaves sums, not
// scaled, those of value in `sums`, others in `parts`, and add_parts.cu puts them together.
#pragma once
#include "portable/products.cuh"
#include "positions.cuh"

// Those of one split, of all steps of its tile.
DEVICE Span share_of(const Arguments& a, int steps, int split) {
    if (!SPLIT) return Span{0, steps};
    return Span{int(i64(steps) * split / a.splits), int(i64(steps) * (split + 1) / a.splits)};
}

// A thread's sums of one row, which begins at number `to` of a gradient: there, scaled, or among the parts of a split,
// each of `count` numbers.
template <int WIDTH>
DEVICE void store_share(void* gradient, Real* parts, i64 count, int split, i64 to, Real (&sums)[COLUMNS<WIDTH>],
                        int dim, Real scale) {
    if (SPLIT) return store_sums<Real, WIDTH>(parts + split * count + to, sums, dim);
    UNROLL for (Real& sum : sums) sum *= scale;
    store_sums<T, WIDTH>(reinterpret_cast<T*>(gradient) + to, sums, dim);
}
