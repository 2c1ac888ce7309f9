// The gradient of 64 keys, or of their values, from a warpgroup's registers to where it belongs.
#pragma once
#include "gradient_rows.cuh"
#include "hopper/backward/done.cuh"
#include "hopper/backward/steps.cuh"
#include "hopper/backward/sums.cuh"
#include "hopper/store.cuh"

// Keys that are not there weigh 0, but 0 times NaN is NaN.
template <int COUNT> DEVICE void clear_beyond(const Keys& block, int first, float (&sums)[COUNT]) {
    if (block.extent.end >= first + 64) return;
    UNROLL for (int m = 0; m < 2; m++)
        if (first + row_of(m) >= block.extent.end)
            UNROLL for (int n = 0; n < COUNT; n++)
                if (n / 2 % 2 == m) sums[n] = 0;
}

// Keys from `first` on, with zeros past the end of the sequence, to `gradient`, or as a part of the split's sums. With
// VARLEN nothing is stored past the end: other sequences are there.
template <int COUNT>
DEVICE void store_gradient(const Arguments& a, const Keys& block, int first, float (&sums)[COUNT], Gradient which) {
    const i64 before = block.rows_before(a);
    const int heads = a.heads / a.group, rows = block.rows(a, before);
    if (VARLEN && first >= rows) return;
    clear_beyond(block, first, sums);
    if (a.splits > 1) {
        const i64 tiles = tiles_of_keys(a), all = i64(VARLEN ? 1 : a.batch) * heads * tiles;
        const i64 line = (i64(block.plane()) * heads + block.head_kv) * tiles +
                         first_of_keys(block.batch, before) + first / 64;
        float* const part = sums_of(a.parts, (2 * block.split + (which == OF_VALUE)) * all + line);
        UNROLL for (int c = 0; c < COUNT / 4; c++)
            *reinterpret_cast<Chunk<float>*>(quad_of(part, c)) =
                Chunk<float>{{sums[4 * c], sums[4 * c + 1], sums[4 * c + 2], sums[4 * c + 3]}};
        return;
    }
    void* const gradient = which == OF_KEY ? a.grad_key : a.grad_value;
    const int dim = which == OF_KEY ? a.dim : a.dim_v;
    const float scale = which == OF_KEY ? float(a.scale) : DROPOUT ? float(a.keep_scale) : 1;
    UNROLL for (int m = 0; m < 2; m++) {
        const int row = first + row_of(m);
        const i64 line = gradient_row(a, which, block.plane(), block.head_kv, before + row, heads,
                                      VARLEN ? a.key_rows : a.keys);
        T* const to = gradient && row < (VARLEN ? rows : a.keys) ? static_cast<T*>(gradient) + line * dim : nullptr;
        store_row<2 * COUNT>(to, sums, m, scale, dim);
    }
}
