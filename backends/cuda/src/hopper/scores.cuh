// A warpgroup's tile of scores in the registers where wgmma leaves them: 64 rows, two to a thread, and BLOCK_N columns.
#pragma once
#include "hopper/tangent.cuh"
#include "hopper/wgmma.cuh"
#include "positions.cuh"

typedef float Scores[BLOCK_N / 2];
typedef u32 Weights[BLOCK_N / 16][4];  // the same in 16 bits, as the left operand of a product

// The thread's rows in the 64, and its first column in 8.
DEVICE int row_of(int m) { return thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4 + 8 * m; }
DEVICE int first_column() { return 2 * (thread_index() % 4); }

// The largest, or the sum, over the four lanes that share a row.
template <class Merge> DEVICE float over_row(float x, Merge merge) {
    x = merge(x, shuffle_xor(x, 1));
    return merge(x, shuffle_xor(x, 2));
}

// Scores q . k become tanh(factor q . k), PART at a time, with a branch for each: all together, they take more registers
// than there are.
template <int COUNT> DEVICE void cap(float (&scores)[COUNT], float factor) {
    constexpr int PART = 8;
    UNROLL for (int first = 0; first < COUNT; first += PART) {
        float most = 0;
        UNROLL for (int n = first; n < first + PART; n++)
            scores[n] *= factor, most = larger(most, fabsf(scores[n]));
        if (all_of_warp(most <= SMALL)) {
            UNROLL for (int n = first; n < first + PART; n++) scores[n] = tangent_of_small(scores[n]);
        } else {
            UNROLL for (int n = first; n < first + PART; n++)
                scores[n] = fabsf(scores[n]) <= SMALL ? tangent_of_small(scores[n]) : tangent_of_large(scores[n]);
        }
    }
}

// Takes out the columns from `start` on that rows do not see, for which `instead` is put; `sees(m)` is what row m sees.
template <int COUNT, class Sees>
DEVICE void hide(float (&scores)[COUNT], int start, Sees sees, float instead = -INFINITE) {
    UNROLL for (int m = 0; m < 2; m++) {
        const Span span = sees(m);
        const int from = span.from - start - first_column(), to = span.to - start - first_column();
        UNROLL for (int c = 0; c < COUNT / 4; c++)
            UNROLL for (int e = 0; e < 2; e++)
                if (8 * c + e < from || 8 * c + e >= to) scores[4 * c + 2 * m + e] = instead;
    }
}

// Multiplies the thread's rows of `sums`.
template <int COUNT> DEVICE void scale_rows(float (&sums)[COUNT], const float (&by)[2]) {
    UNROLL for (int n = 0; n < COUNT; n++) sums[n] *= by[n / 2 % 2];
}
