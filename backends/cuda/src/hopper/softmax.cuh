// The online softmax of a warpgroup's 64 rows, two to a thread, in the registers where wgmma leaves the scores.
//
// A score is q . k times a positive factor, which is a part of the exponential. Invariants: `total` is relative to
// `top`, and of a thread's own columns until `finish`; a row that has seen no key keeps top = -inf and weights of 0.
// `top` is a q . k that no later one exceeds by more than SLACK in powers of two, so that sums are seldom rescaled.
// Weights are then at most 2^SLACK, as exact in 16 bits as those below 1.
#pragma once
#include "hopper/wgmma.cuh"
#include "positions.cuh"

constexpr float SLACK = 8;

typedef float Scores[BLOCK_N / 2];
typedef u32 Weights[BLOCK_N / 16][4];

// The thread's rows in the 64, and its first column in 8.
DEVICE int row_of(int m) { return thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4 + 8 * m; }
DEVICE int first_column() { return 2 * (thread_index() % 4); }

// The largest, or the sum, over the four lanes that share a row.
template <class Merge> DEVICE float over_row(float x, Merge merge) {
    x = merge(x, shuffle_xor(x, 1));
    return merge(x, shuffle_xor(x, 2));
}

// Takes out the keys from `start` on that rows do not see; `sees(m)` is what row m sees.
template <class Sees> DEVICE void hide(Scores& scores, int start, Sees sees) {
    UNROLL for (int m = 0; m < 2; m++) {
        const Span span = sees(m);
        const int from = span.from - start - first_column(), to = span.to - start - first_column();
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++)
            UNROLL for (int e = 0; e < 2; e++)
                if (8 * c + e < from || 8 * c + e >= to) scores[4 * c + 2 * m + e] = -INFINITE;
    }
}

// NaN prevails.
DEVICE float largest(float x, float y) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

struct Softmax {
    float top[2] = {-INFINITE, -INFINITE}, base[2] = {0, 0}, total[2] = {0, 0};

    // Turns scores into weights. What was summed before is then to be multiplied by `rescale`, unless it says that
    // nothing has changed in any row of the warp.
    DEVICE bool step(Scores& scores, float factor, float (&rescale)[2]) {
        const bool raised = raise(scores, factor, rescale);
        weigh(scores, factor);
        return raised;
    }

    // Sees to it that no score is too far above `top`, and says whether it had to.
    DEVICE bool raise(const Scores& scores, float factor, float (&rescale)[2]) {
        float here[2] = {top[0], top[1]};
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++) here[n / 2 % 2] = largest(here[n / 2 % 2], scores[n]);
        const bool low = (here[0] - top[0]) * factor <= SLACK && (here[1] - top[1]) * factor <= SLACK;
        if (__all_sync(0xffffffffu, low)) return false;
        UNROLL for (int m = 0; m < 2; m++) {
            here[m] = over_row(here[m], [](float x, float y) { return largest(x, y); });
            base[m] = here[m] == -INFINITE ? 0 : here[m] * factor + (here[m] - here[m]);  // of inf, NaN
            rescale[m] = power(top[m] * factor - base[m]);
            top[m] = here[m];
            total[m] *= rescale[m];
        }
        return true;
    }

    DEVICE void weigh(Scores& scores, float factor) {
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++) {
            scores[n] = power(multiply_add(scores[n], factor, -base[n / 2 % 2]));
            total[n / 2 % 2] += scores[n];
        }
    }

    DEVICE void finish() {
        UNROLL for (int m = 0; m < 2; m++) total[m] = over_row(total[m], [](float x, float y) { return x + y; });
    }
};

// Weights in 16 bits, as the left operand of a product.
DEVICE void narrow(Weights& weights, const Scores& scores) {
    UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
        UNROLL for (int r = 0; r < 4; r++)
            weights[k][r] = pack_pair<T>(scores[8 * k + 2 * r], scores[8 * k + 2 * r + 1]);
}

// Keeps the arithmetic behind sums of weights before the next wait, which ptxas otherwise moves up as far as it can:
// not past a store that depends on them. It never happens, as no sum is negative.
DEVICE void before_waiting(const float (&total)[2]) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}"
                 ::"f"(total[0] + total[1]), "r"(0) : "memory");
}

// Multiplies the thread's rows of `sums`.
template <int COUNT> DEVICE void scale_rows(float (&sums)[COUNT], const float (&by)[2]) {
    UNROLL for (int n = 0; n < COUNT; n++) sums[n] *= by[n / 2 % 2];
}
