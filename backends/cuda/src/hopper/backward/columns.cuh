// What a thread holds of a tile (keys, queries), or of half of one, and what it needs to know of each query.
#pragma once
#include "hopper/scores.cuh"

struct alignas(8) Pair {
    float at[2];
};

// The numbers of the thread's columns.
template <int COUNT> DEVICE void numbers(Pair (&of_columns)[COUNT], const float* from) {
    UNROLL for (int c = 0; c < COUNT; c++)
        of_columns[c] = load_shared(reinterpret_cast<const Pair*>(from + 8 * c + first_column()));
}

// A tile in 16 bits.
template <int COUNT> DEVICE void pack(u32 (&to)[COUNT][4], const float (&from)[8 * COUNT]) {
    UNROLL for (int k = 0; k < COUNT; k++)
        UNROLL for (int r = 0; r < 4; r++) to[k][r] = pack_pair<T>(from[8 * k + 2 * r], from[8 * k + 2 * r + 1]);
}

// P of what a query does not see: it weighs 0, and says so to who makes dS, where 0 times what overflows is NaN.
DEVICE float unseen() { return -0.0f; }
DEVICE bool is_unseen(float weight) { return float_bits(weight) == float_bits(unseen()); }
