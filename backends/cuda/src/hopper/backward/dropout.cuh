// Which weights of a warpgroup's 64 keys against a tile of queries dropout keeps: a bit for each that a thread has.
//
// Philox makes the numbers of four neighbouring keys at once, for one query. Four lanes have these keys, and they have the
// same queries. So each makes those of a quarter of the queries, for all four, and they exchange bytes.
#pragma once
#include "hopper/backward/steps.cuh"
#include "hopper/scores.cuh"
#include "philox.cuh"

struct Kept {
    // For each 64 queries a byte of columns 8 c to 8 c + 7 with c % 4 = 0, with 1 and so on: four bits for the first c, and
    // four for the next, each those of both columns of both rows.
    u32 bits[BLOCK_N / 64];

    // Of a step, and of keys from `first` on, a multiple of 64.
    DEVICE void draw(const Arguments& a, int batch, int head, int first, int start) {
        const int word = thread_index() / 4 % 4, four = (first + row_of(0)) / 4;
        UNROLL for (int half = 0; half < BLOCK_N / 64; half++) {
            u32 made = 0;  // a byte for the lane with each word
            UNROLL for (int n = 0; n < 8; n++) {
                const int query = start + 64 * half + 32 * (n / 4) + 8 * word + first_column() + n % 2;
                const Words words = philox(four + n / 2 % 2 * 2, query, head, batch, a.seed_low, a.seed_high);
                UNROLL for (int w = 0; w < 4; w++) made |= u32(words.at[w] >= a.threshold) << (8 * w + n);
            }
            bits[half] = exchanged(made, word);
        }
    }
    // Of the element 4 c + 2 m + e.
    DEVICE bool keeps(int c, int m, int e) const {
        return bits[c / 8] >> (c % 4 * 8 + c / 4 % 2 * 4 + 2 * m + e) & 1;
    }

private:
    // Byte `word` of each of the four lanes, in their order.
    static DEVICE u32 exchanged(u32 made, int word) {
        const u32 beside = shuffle_xor(made, 4);
        const u32 two = word & 1 ? (made & 0xff00ff00) | (beside >> 8 & 0x00ff00ff)
                                 : (made & 0x00ff00ff) | (beside & 0x00ff00ff) << 8;
        const u32 others = shuffle_xor(two, 8);
        return word & 2 ? (two & 0xffff0000) | others >> 16 : (two & 0xffff) | others << 16;
    }
};
