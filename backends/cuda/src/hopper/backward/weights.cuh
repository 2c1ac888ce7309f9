// P^T of some queries against the 64 keys of a warpgroup, from S^T as products leave it, in its place.
#pragma once
#include "hopper/backward/steps.cuh"
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

// 64 keys of a block, from `first` on.
struct Weigher {
    const Arguments& a;
    const Keys& block;
    const int first;
    u32 shown;  // MASKED: what the mask shows the thread's columns of a tile of queries, 16 bits for each of its rows

    DEVICE Weigher(const Arguments& a, const Keys& block, int first) : a(a), block(block), first(first) {}

    // What the mask shows, asked for before a product is waited for.
    DEVICE void look(const Step& step) {
        if (!MASKED || !step.mixed) return;
        const int plane = mask_plane(a, block.batch, step.head), lane = thread_index() % 32;
        const int chunk = (first - block.first) / 16 + thread_index() % 128 / 32, at = lane / 8 * 4 + lane / 4 % 2;
        shown = 0;
        UNROLL for (int n = 0; n < BLOCK_N / 4; n++) {
            const int query = step.start + n / 2 * 8 + first_column() + n % 2;
            const u32 bits = mask_row<BLOCK_M>(a, plane, block.first / BLOCK_M, query)[chunk] >> at;
            shown |= (bits & 1) << n | (bits >> 2 & 1) << (n + 16);
        }
    }
    // Whether some of the keys are hidden from some queries of a step.
    DEVICE bool hides(const Step& step) const { return block.reach.hides(step.start) || (MASKED && step.mixed); }

    // P^T of the queries of a step from `from` on. Behind a softcap P^T is packed, and in its place is what the tanh leaves
    // of it.
    template <int COUNT>
    DEVICE void weigh(float (&scores)[COUNT], u32 (&packed)[COUNT / 8][4], const Step& step, int from, const float* of) {
        const float factor = SOFTCAP ? float(a.cap) * UNIT : float(a.factor);
        Pair base[COUNT / 4];
        numbers(base, of);
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor)), hide(scores, step, from, -INFINITE);
        UNROLL for (int c = 0; c < COUNT / 4; c++)
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) {
                    weight[e] = power(multiply_add(score[e], factor, -base[c].at[e]));
                    if (SOFTCAP && score[e] == -INFINITE) weight[e] = unseen();
                }
                if (SOFTCAP) packed[c / 2][c % 2 * 2 + m] = pack_pair<T>(weight[0], weight[1]);
                UNROLL for (int e = 0; e < 2; e++)
                    score[e] = !SOFTCAP || score[e] == -INFINITE ? weight[e]
                                                                : weight[e] * multiply_add(-score[e], score[e], 1);
            }
        if (!SOFTCAP) hide(scores, step, from, unseen());
    }

private:
    // Takes out what the thread's keys are not seen by.
    template <int COUNT> DEVICE void hide(float (&scores)[COUNT], const Step& step, int from, float instead) const {
        if (block.reach.hides(step.start))
            ::hide(scores, step.start + from, [&](int m) {
                const int key = first + row_of(m);
                return key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        const u32 here = shown >> from / 4;
        UNROLL for (int n = 0; n < COUNT; n++)
            if (!(here >> (n / 4 * 2 + n % 2 + n / 2 % 2 * 16) & 1)) scores[n] = instead;
    }
};
