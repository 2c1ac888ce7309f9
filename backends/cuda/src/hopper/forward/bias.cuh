// A float mask, brought beside the keys by TMA, and added to scores in the registers where wgmma leaves them.
//
// BIAS_OF_ROWS: a tile of 64 rows for each consumer. BIAS_OF_ALL: a tile of one row, which all queries share.
#pragma once
#include "hopper/bias.cuh"
#include "hopper/scores.cuh"

// Tiles of a stage; rows that a load brings to one, and rows that it has room for: the swizzle repeats after 8.
constexpr int BIASES = BIAS == BIAS_OF_ALL ? 1 : CONSUMERS;
constexpr int BIAS_ROWS = BIAS == BIAS_OF_ALL ? 1 : 64, BIAS_ROOM = BIAS == BIAS_OF_ALL ? 8 : 64;
constexpr int BIAS_SIZE = SIZE_OF<BIAS_ROOM, BLOCK_N>;
constexpr int BIAS_BYTES = BIAS ? BIASES * SIZE_OF<BIAS_ROWS, BLOCK_N> * int(sizeof(T)) : 0;

// The thread's numbers of a tile, with the score that each belongs to.
template <class Use> DEVICE void each_bias(Scores& scores, const T* tile, Use use) {
    const int row = BIAS == BIAS_OF_ALL ? 0 : row_of(0);
    const T* const first = tile + row * PANEL + first_column();
    UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
        const T* const at = first + c / 8 * (BIAS_ROOM * PANEL) + (c % 8 ^ row % 8) * 8;
        UNROLL for (int m = 0; m < 2; m++) {
            const u32 pair = load_shared(reinterpret_cast<const u32*>(at + (BIAS == BIAS_OF_ALL ? 0 : 8 * m * PANEL)));
            UNROLL for (int e = 0; e < 2; e++) use(scores[4 * c + 2 * m + e], widen(T{u16(pair >> 16 * e)}));
        }
    }
}

// Scores become factor * score + mask, in natural units. A score that is NaN or inf is hidden as well where the mask is
// -inf. Few tiles have one, and those are gone over again: with a choice for every score in the straight line, ptxas lets
// all products come one after another.
DEVICE void add_bias(Scores& scores, const T* tile, float factor) {
    bool numbers = true;
    each_bias(scores, tile, [&](float& score, float bias) {
        score = multiply_add(score, factor, bias);
        numbers &= score == score;
    });
    if (all_of_warp(numbers)) return;
    each_bias(scores, tile, [](float& score, float bias) {
        if (bias == -INFINITE) score = -INFINITE;
    });
}
