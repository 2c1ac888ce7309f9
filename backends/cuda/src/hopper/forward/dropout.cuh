// Which weights of a tile dropout keeps, in the registers where wgmma wants them.
//
// Philox makes the numbers of four neighbouring keys at once, which two lanes have, two keys each. So each of the two
// makes those of one of their rows, for both, and they exchange bits: 4 (c % 8) + 0 to 3 of word c / 8 are of columns
// 8 c + 4 h to 4 h + 3, of half h of the row's lanes.
#pragma once
#include "hopper/scores.cuh"
#include "philox.cuh"

struct Dropout {
    static constexpr int WORDS = (BLOCK_N / 8 + 7) / 8;
    u32 kept[2][WORDS];  // by row; the lane's own two keys lowest in each four bits

    // For rows `query` and eight further, and keys from `start` on, a multiple of 4.
    DEVICE void draw(const Arguments& a, int batch, int head, int query, int start) {
        const int upper = thread_index() % 2, block = start / 4 + thread_index() % 4 / 2;
        UNROLL for (int w = 0; w < WORDS; w++) {
            u32 made = 0;
            UNROLL for (int c = 8 * w; c < BLOCK_N / 8 && c < 8 * w + 8; c++) {
                const Words words = philox(block + 2 * c, query + 8 * upper, head, batch, a.seed_low, a.seed_high);
                UNROLL for (int n = 0; n < 4; n++) made |= u32(words.at[n] >= a.threshold) << (4 * (c % 8) + n);
            }
            const u32 other = shuffle_xor(made, 1);
            kept[0][w] = (upper ? other : made) >> 2 * upper;
            kept[1][w] = (upper ? made : other) >> 2 * upper;
        }
    }
    // Weights of dropped keys become 0. No product may be under way.
    DEVICE void drop(Weights& weights) const {
        UNROLL for (int row = 0; row < 2; row++)
            UNROLL for (int w = 0; w < WORDS; w++) {
                // The two keys of columns 8 c on, where they are the highest bits of bytes: for even c, and for odd.
                const u32 bits = kept[row][w];
                const u32 first[2] = {bits << 7, bits << 3}, second[2] = {bits << 6, bits << 2};
                drop_pair<0>(weights, first, second, row, w), drop_pair<1>(weights, first, second, row, w);
                drop_pair<2>(weights, first, second, row, w), drop_pair<3>(weights, first, second, row, w);
            }
    }

private:
    // Those that byte BYTE tells of.
    template <int BYTE>
    static DEVICE void drop_pair(Weights& weights, const u32 (&first)[2], const u32 (&second)[2], int row, int w) {
        const int k = 4 * w + BYTE;
        if (k < BLOCK_N / 16)
            UNROLL for (int odd = 0; odd < 2; odd++)
                weights[k][2 * odd + row] &= spread_bits<BYTE>(first[odd], second[odd]);
    }
};
