// The online softmax of rows whose keys two consumers share: each has the weights of its own tile, and both have the
// same base.
//
// A weight is 2^(exponent - base). The base of a row rises to its largest exponent where that is more than ROOM above
// it, so that weights of 16 bits, and their sums, keep their digits, and rows rarely rise.
#pragma once
#include "hopper/scores.cuh"

constexpr float ROOM = 8;
constexpr bool FOLD = true;  // the factor is a part of the exponential

template <class Merge> DEVICE float over_row(float x, Merge merge) {
    x = merge(x, shuffle_xor(x, 1));
    return merge(x, shuffle_xor(x, 2));
}

struct Softmax {
    float top[2] = {-INFINITE, -INFINITE}, base[2] = {-LOWEST, -LOWEST};  // the score that the base is of
    float total[2] = {0, 0};                                             // of this consumer's weights

    // The largest of the thread's scores in a row.
    static DEVICE float most(const Scores& scores, int m) {
        float most = -INFINITE;
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++)
            if (n / 2 % 2 == m) most = largest(most, scores[n]);
        return most;
    }
    // Whether the base of row m rises to that of score `most`; sums are then to be multiplied by `rescale`.
    DEVICE bool rise(int m, float most, float factor, float& rescale) {
        const float exponent = rounded(most, factor);
        rescale = 1;
        if (!(exponent - base[m] > ROOM)) return false;
        const float next = exponent + (most - most);  // of inf, NaN
        rescale = power(base[m] - next);
        top[m] = most, base[m] = next;
        total[m] *= rescale;
        return true;
    }
    DEVICE void weigh(Weights& weights, const Scores& scores, float factor) {
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) {
                const int n = 8 * k + 2 * r, m = r % 2;
                const float even = power(multiply_add(scores[n], factor, -base[m]));
                const float odd = power(multiply_add(scores[n + 1], factor, -base[m]));
                total[m] += even, total[m] += odd;
                weights[k][r] = pack_pair<T>(even, odd);
            }
    }
};
