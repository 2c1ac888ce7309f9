// What warpgroups of the backward have in common that compute: 64 keys against tiles of queries, as the loader brings
// them.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; P^T and dS^T in 16 bits. Invariants: left
// operands in registers are written when no product is under way. Every tile of the block is waited for and freed, also
// one that these keys are not seen by.
#pragma once
#include "hopper/backward/columns.cuh"
#include "hopper/backward/results.cuh"

constexpr int NONE = -1;

template <class Shared> struct Worker {
    Shared& shared;
    const Arguments& a;
    const int index;
    const float factor = SOFTCAP ? float(a.cap) * UNIT : float(a.factor);
    const u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Position<STAGES> at;
    Position<2> written_at;  // tile of dS
    Scores scores, score_gradients;
    Weights weights, inner;
    u32 shown[BLOCK_N / 64];  // MASKED: what the mask shows the thread's columns, 16 bits for each of its rows

    DEVICE Worker(Shared& shared, const Arguments& a, int index) : shared(shared), a(a), index(index) {}

    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }
    // Keys and values, where those past the end of a sequence may be NaN, which a weight of 0 does not take away.
    DEVICE void begin(const Keys& block) {
        shared.key_full.wait(0);
        shared.value_full.wait(0);
        if (!a.length_bytes || block.extent.end >= block.first + BLOCK_M) return;
        const int there = smaller(larger(block.extent.end - block.first - 64 * index, 0), 64);
        clear_rows<64, BLOCK_D>(shared.key[index], there);
        clear_rows<64, BLOCK_DV>(shared.value[index], there);
        meet_at(1, 128 * CONSUMERS);  // before the first turn, which takes the same barrier
    }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }
    DEVICE void ask_scores() {
        const Matrix keys = matrix(Shared::key_place(index)), queries = matrix(Shared::query_place(at.stage));
        shared.query_full[at.stage].wait(at.parity);
        begin_products();
        product_nt<BLOCK_N, BLOCK_D>(scores, keys, queries);
        commit_products();
    }
    // What the mask shows, asked for before a product is waited for.
    DEVICE void look(const Keys& block, const Queries& step) {
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
    DEVICE void hide(Scores& tile, const Keys& block, const Queries& step, float instead) const {
        if (block.reach.hides(step.start))
            ::hide(tile, step.start, [&](int m) {
                const int key = block.first + 64 * index + row_of(m);
                return key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++)
            if (!(shown[n / 32] >> (n % 32 / 4 * 2 + n % 2 + n / 2 % 2 * 16) & 1)) tile[n] = instead;
    }
    // P^T from S^T, in its place; `base(c)` is of columns 8 c on. Behind a softcap P^T is packed, and in its place is what
    // the tanh leaves of it.
    template <class Base> DEVICE void make_weights(const Keys& block, const Queries& step, Base base) {
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor));
        hide(scores, block, step, -INFINITE);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Pair of = base(c);
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) weight[e] = power(multiply_add(score[e], factor, -of.at[e]));
                if (SOFTCAP) weights[c / 2][c % 2 * 2 + m] = pack_pair<T>(weight[0], weight[1]);
                UNROLL for (int e = 0; e < 2; e++) {
                    const float tanh = larger(score[e], -1);  // of what is hidden, -inf
                    score[e] = SOFTCAP ? weight[e] * multiply_add(-tanh, tanh, 1) : weight[e];
                }
            }
        }
    }
    // dS^T from dP^T, in its place.
    template <class Delta> DEVICE void make_gradients(const Keys& block, const Queries& step, Delta delta) {
        hold(score_gradients);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Pair of = delta(c);
            UNROLL for (int n = 4 * c; n < 4 * c + 4; n++)
                score_gradients[n] = scores[n] * (score_gradients[n] - of.at[n % 2]);
        }
        hide(score_gradients, block, step, 0);  // 0 times what overflows is NaN
    }
    // dS^T to shared memory, swizzled as TMA would have brought it.
    DEVICE void leave_gradients() {
        const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane % 16;
        T* const to = shared.gradients[written_at.stage][index] + row * PANEL;
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++) {
            const int panel = 16 * k / PANEL, chunk = 2 * k % 8 + lane / 16;
            store_matrices(to + panel * 64 * PANEL + (chunk ^ row % 8) * 8, inner[k]);
        }
    }
};
