// Results from the registers of a warpgroup to global memory, 16 bytes a thread.
#pragma once
#include "hopper/scores.cuh"

// The lanes of a row hold a word each of four groups of 8 columns; afterwards lane l % 4 holds group l % 4 whole.
DEVICE void gather_group(u32 (&words)[4]) {
    const bool odd = thread_index() & 1, upper = thread_index() & 2;
    UNROLL for (int n = 0; n < 4; n += 2) {
        const u32 other = shuffle_xor(odd ? words[n] : words[n + 1], 1);
        words[n] = odd ? other : words[n];
        words[n + 1] = odd ? words[n + 1] : other;
    }
    UNROLL for (int n = 0; n < 2; n++) {
        const u32 other = shuffle_xor(upper ? words[n] : words[n + 2], 2);
        words[n] = upper ? other : words[n];
        words[n + 2] = upper ? words[n + 2] : other;
    }
}

// Row m of `sums` (64 x WIDTH), times `weight`, to `at`, of which `width` columns, a multiple of 8, are there; null
// stores nothing.
template <int WIDTH> DEVICE void store_row(T* at, const float (&sums)[WIDTH / 2], int m, float weight, int width) {
    UNROLL for (int c = 0; c < WIDTH / 8; c += 4) {
        u32 words[4];
        UNROLL for (int n = 0; n < 4; n++) {
            const int first = 4 * (c + n) + 2 * m;
            words[n] = pack_pair<T>(sums[first] * weight, sums[first + 1] * weight);
        }
        gather_group(words);
        const int column = 8 * (c + thread_index() % 4);
        if (at && column < width)
            *reinterpret_cast<Chunk<u32>*>(at + column) = Chunk<u32>{{words[0], words[1], words[2], words[3]}};
    }
}
