// What a thread holds of a tile (keys, queries), and what it needs to know of each query.
#pragma once
#include "hopper/scores.cuh"

struct alignas(8) Pair {
    float at[2];
};

// The numbers of the thread's columns 8 c and 8 c + 1 past its first, and of all of them.
DEVICE Pair number(const float* from, int c) {
    return load_shared(reinterpret_cast<const Pair*>(from + 8 * c + first_column()));
}
template <int COUNT> DEVICE void numbers(Pair (&of_columns)[COUNT], const float* from) {
    UNROLL for (int c = 0; c < COUNT; c++) of_columns[c] = number(from, c);
}

// 16 columns in 16 bits, and a tile.
DEVICE void pack(u32 (&to)[4], const float* from) {
    UNROLL for (int r = 0; r < 4; r++) to[r] = pack_pair<T>(from[2 * r], from[2 * r + 1]);
}
template <int COUNT> DEVICE void pack(u32 (&to)[COUNT][4], const float (&from)[8 * COUNT]) {
    UNROLL for (int k = 0; k < COUNT; k++) pack(to[k], from + 8 * k);
}
