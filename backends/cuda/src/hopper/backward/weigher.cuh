// P^T and dS^T of the 64 keys of a warpgroup against tiles of queries, from S^T and dP^T as products leave them, and in
// their place: of a whole tile, or of some of its queries from `from` on. ALIBI takes slopes off exponents alone. DROPOUT
// takes weights out of dV, and out of dP; those that are left count 1 / (1 - p) times, in dV once it is stored.
#pragma once
#include "hopper/backward/columns.cuh"
#include "hopper/backward/dropout.cuh"
#include "hopper/backward/steps.cuh"
#include "hopper/distances.cuh"
#include "slopes.cuh"

struct Weigher {
    const Arguments& a;
    const Keys& block;
    const int index;  // of the 64 keys among the block's
    const float factor = float(SOFTCAP ? a.cap : a.factor) * float(SOFTCAP || ALIBI ? UNIT : 1);
    const float keep_scale = float(a.keep_scale);
    float slope;              // ALIBI: of the step's head, in units of the exponential
    u32 shown[BLOCK_N / 64];  // MASKED: what the mask shows the thread's columns, 16 bits for each of its rows
    Kept kept;                // DROPOUT: of the step

    DEVICE Weigher(const Arguments& a, const Keys& block, int index) : a(a), block(block), index(index) {}

    // The head's slope, what dropout keeps, and what the mask shows: asked for before a product is waited for.
    DEVICE void look(const Queries& step) {
        if (ALIBI) slope = slope_of(a, block.batch, step.head) * UNIT;
        if (DROPOUT) kept.draw(a, block.batch, step.head, block.first + 64 * index, step.start);
        if (!MASKED || !step.mixed) return;
        const int plane = mask_plane(a, block.batch, step.head), lane = thread_index() % 32;
        const int chunk = 4 * index + thread_index() % 128 / 32, at = lane / 8 * 4 + lane / 4 % 2;
        UNROLL for (u32& bits : shown) bits = 0;
        UNROLL for (int n = 0; n < BLOCK_N / 4; n++) {
            const int query = smaller(step.start + n / 2 * 8 + first_column() + n % 2, a.queries - 1);
            const u32 bits = mask_row<BLOCK_M>(a, plane, block.first / BLOCK_M, query)[chunk] >> at;
            shown[n / 16] |= (bits & 1) << n % 16 | (bits >> 2 & 1) << (n % 16 + 16);
        }
    }
    // Takes out what the thread's keys are not seen by.
    template <int COUNT>
    DEVICE void hide(float (&tile)[COUNT], const Queries& step, float instead, int from = 0) const {
        if (block.reach.hides(step.start))
            ::hide(tile, step.start + from, [&](int m) {
                const int key = block.first + 64 * index + row_of(m);
                return VARLEN || key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        UNROLL for (int n = 0; n < COUNT; n++) {
            const int column = from / 4 + n / 4 * 2 + n % 2;
            if (!(shown[column / 16] >> (column % 16 + n / 2 % 2 * 16) & 1)) tile[n] = instead;
        }
    }
    // P^T from S^T; `base(c)` is of columns 8 c on. Behind a softcap P^T is packed, and in its place is what the tanh
    // leaves of it.
    template <int COUNT, class Base>
    DEVICE void weigh(float (&scores)[COUNT], u32 (&packed)[COUNT / 8][4], const Queries& step, Base base, int from = 0) {
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor));
        hide(scores, step, -INFINITE, from);
        const int key = block.first + 64 * index + row_of(0) - block.extent.offset;
        Distances distances(key - step.start - from - first_column());
        UNROLL for (int c = 0; c < COUNT / 4; c++) {
            const Pair of = base(c);
            if (ALIBI) distances.go_to(c);
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) {
                    float exponent = multiply_add(score[e], factor, -of.at[e]);
                    if (ALIBI) exponent -= slope * distances.of(m, e);
                    weight[e] = power(exponent);
                }
                if (SOFTCAP) packed[c / 2][c % 2 * 2 + m] = packed_pair(weight, c + from / 8, m);
                UNROLL for (int e = 0; e < 2; e++) {
                    const float tanh = larger(score[e], -1);  // of what is hidden, -inf
                    score[e] = SOFTCAP ? weight[e] * multiply_add(-tanh, tanh, 1) : weight[e];
                }
            }
        }
    }
    // dS^T from dP^T and what `weigh` left; `delta(c)` is of columns 8 c on.
    template <int COUNT, class Delta>
    DEVICE void differentiate(float (&gradients)[COUNT], const float (&weighed)[COUNT], const Queries& step, Delta delta,
                              int from = 0) const {
        hold(gradients);
        UNROLL for (int c = 0; c < COUNT / 4; c++) {
            const Pair of = delta(c);
            UNROLL for (int n = 4 * c; n < 4 * c + 4; n++) {
                const float scale = DROPOUT && kept.keeps(c + from / 8, n / 2 % 2, n % 2) ? keep_scale : 0;
                gradients[n] = weighed[n] * (DROPOUT ? multiply_add(gradients[n], scale, -of.at[n % 2])
                                                     : gradients[n] - of.at[n % 2]);
            }
        }
        hide(gradients, step, 0, from);  // 0 times what overflows is NaN
    }
    // Weights as dV takes them: of two queries, columns 8 c on, and of columns 16 k on.
    DEVICE u32 packed_pair(const float* weight, int c, int m) const {
        const auto of = [&](int e) { return DROPOUT && !kept.keeps(c, m, e) ? 0.0f : weight[e]; };
        return pack_pair<T>(of(0), of(1));
    }
    DEVICE void pack_weights(u32 (&to)[4], const float* from, int k) const {
        UNROLL for (int r = 0; r < 4; r++) to[r] = packed_pair(from + 2 * r, 2 * k + r / 2, r % 2);
    }
};
