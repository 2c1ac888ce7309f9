// The online softmax of a warpgroup's 64 rows, two to a thread, in the registers where wgmma leaves the scores.
//
// A score is q . k, or its tanh for a softcap, times a positive factor, which is a part of the exponential; with a float
// mask it is the score itself, and the base is taken off first: a large mask is not rounded again. With slopes it is the
// exponent itself. Weights are taken relative to `top`, the largest score of a tile before; only where they add up to too
// much is the largest of their own tile looked for, and they are taken again. So a tile costs a comparison for a row, and
// not one for a score.
// A warp goes that way together, but only the rows that ask for it rise: bits of a row do not depend on its neighbours.
//
// Invariants: `total` is relative to `top`, and of a thread's own columns until `finish`. Weights of a tile, those of a
// row in one thread, add up to no more than MOST, or are at most 1 each: as exact in 16 bits as those below 1. A row
// that has seen no key has top = -inf and a base so low that the first one it sees weighs inf, which is too much.
#pragma once
#include "hopper/scores.cuh"

constexpr float MOST = 256;
constexpr bool FOLD = !BIAS;  // the factor is a part of the exponential

// Takes out what a mask hides: bits of 32 columns, of which eight are the thread's (mask.cuh).
constexpr int SHOWN = (BLOCK_N + 31) / 32;
DEVICE void hide(Scores& scores, const u32 (&shown)[2][SHOWN]) {
    UNROLL for (int m = 0; m < 2; m++) {
        // Bit 16 (j % 2) + 4 (j / 2) + 2 c + e is of column 16 j + 8 c + e from the thread's first.
        u32 own = 0;
        UNROLL for (int n = 0; n < SHOWN; n++)
            own |= (shown[m][n] >> 4 * (thread_index() % 4) & 0x000f000f) << 4 * n;
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++)
            UNROLL for (int e = 0; e < 2; e++)
                if (!(own >> (c / 2 % 2 * 16 + c / 4 * 4 + c % 2 * 2 + e) & 1)) scores[4 * c + 2 * m + e] = -INFINITE;
    }
}

struct Softmax {
    float top[2] = {-INFINITE, -INFINITE}, base[2] = {-LOWEST, -LOWEST}, total[2] = {0, 0};
    bool asks[2] = {true, true};  // whether the thread's weights of a row were too large as they were taken

    // What the exponential is taken of.
    DEVICE float above_base(float score, float factor, int m) const {
        return BIAS ? (score - base[m]) * UNIT : ALIBI ? score - base[m] : multiply_add(score, factor, -base[m]);
    }

    // Turns scores into weights, in 16 bits as the left operand of a product. False if some of the warp's may be too
    // large: never where `raised` says that rows that asked for it have risen.
    DEVICE bool weigh(Weights& weights, const Scores& scores, float factor, bool raised) {
        float sum[2] = {0, 0};
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) {
                const int n = 8 * k + 2 * r, m = r % 2;
                const float even = power(above_base(scores[n], factor, m));
                const float odd = power(above_base(scores[n + 1], factor, m));
                sum[m] += even, sum[m] += odd;
                weights[k][r] = pack_pair<T>(even, odd);
            }
        UNROLL for (int m = 0; m < 2; m++) asks[m] = !(sum[m] <= MOST);  // NaN is not
        if (!all_of_warp(!asks[0] && !asks[1]) && !raised) return false;
        UNROLL for (int m = 0; m < 2; m++) total[m] += sum[m];
        return true;
    }

    // Makes the largest score of each row that asks for it its `top`. What was summed before is then to be multiplied by
    // `rescale`.
    DEVICE void raise(const Scores& scores, float factor, float (&rescale)[2]) {
        const auto most = [](float x, float y) { return largest(x, y); };
        float here[2] = {top[0], top[1]};
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++) here[n / 2 % 2] = largest(here[n / 2 % 2], scores[n]);
        UNROLL for (int m = 0; m < 2; m++) {
            here[m] = over_row(here[m], most);
            rescale[m] = 1;
            if (over_row(asks[m], most) == 0) continue;
            const float first = BIAS || ALIBI ? here[m] : here[m] * factor;
            base[m] = here[m] == -INFINITE ? -LOWEST : first + (here[m] - here[m]);  // of inf, NaN
            rescale[m] = power(BIAS ? (top[m] - base[m]) * UNIT : (ALIBI ? top[m] : top[m] * factor) - base[m]);
            top[m] = here[m];
            total[m] *= rescale[m];
        }
    }

    DEVICE void finish() {
        UNROLL for (int m = 0; m < 2; m++) total[m] = over_row(total[m], [](float x, float y) { return x + y; });
    }
};
