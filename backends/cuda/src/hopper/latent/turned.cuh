// A consumer of 16 rows, which are the columns of its products: a row of the tensor cores' 64 is a key, and then a column
// of the values, so that none of them is empty.
//
//   each pair of tiles    S = K Q^T | largest scores | P = 2^(S - base), to shared memory | O += V^T P, of both tiles
//
// A thread has two keys' scores of four rows; what concerns a row is shared by all warps of both consumers. Weights lie
// in a panel of their tile that holds no values: where keys were, which all have read once they agree on a base.
#pragma once
#include "hopper/latent/worker.cuh"

struct TurnedConsumer : Worker {
    static constexpr int MINE = BLOCK_M / 4, CONSUMER_WARPS = 8;  // rows of a thread
    float scores[BLOCK_M / 2], sums[HALF][BLOCK_M / 2];  // of each panel of this half
    u32 weights[BLOCK_M / 16][4];
    Softmax<MINE> softmax;
    float slopes[MINE];  // ALIBI: in units of the exponential

    // All warps have keys of the same rows.
    DEVICE void meet_rows() const { meet_all(); }
    DEVICE void make_room() {}  // they met in `agree`

    // The thread's i-th row, a column of the product; its m-th key or, of values, column; and which number is of both.
    static DEVICE int row(int i) { return 8 * (i / 2) + first_column() + i % 2; }
    static DEVICE int key(int m) { return row_of(m); }
    static DEVICE constexpr int at(int i, int m) { return 4 * (i / 2) + 2 * m + i % 2; }
    // Where a warp leaves what it has of a row to the others.
    DEVICE float* beside(int warp, int r) const {
        static_assert(sizeof shared.beside == CONSUMER_WARPS * BLOCK_M * sizeof(float), "a number of each");
        return &shared.beside[0][0] + warp * BLOCK_M + r;
    }

    // `mine` of each row, merged over all keys of both tiles.
    template <class Merge> DEVICE void over_keys(float (&mine)[MINE], Merge merge) const {
        const int lane = thread_index() % 32, warp = thread_index() / 32 % 4 + 4 * index;
        UNROLL for (int i = 0; i < MINE; i++) {
            UNROLL for (int lanes = 4; lanes < 32; lanes *= 2) mine[i] = merge(mine[i], shuffle_xor(mine[i], lanes));
            if (lane < 4) store_shared(beside(warp, row(i)), mine[i]);
        }
        meet_rows();
        UNROLL for (int i = 0; i < MINE; i++) {
            mine[i] = load_shared(beside(0, row(i)));
            UNROLL for (int w = 1; w < CONSUMER_WARPS; w++) mine[i] = merge(mine[i], load_shared(beside(w, row(i))));
        }
    }
    template <bool KEEP> DEVICE void multiply(Matrix query, Matrix key) {
        product_nt<BLOCK_M, PANEL, BLOCK_M, KEEP>(scores, key, query);
    }
    DEVICE void hide_keys(int start) {
        UNROLL for (int i = 0; i < MINE; i++) {
            const Span span = row_sees(row(i));
            UNROLL for (int m = 0; m < 2; m++)
                if (start + key(m) < span.from || start + key(m) >= span.to) scores[at(i, m)] = -INFINITE;
        }
    }
    // Scores become exponents. A distance is a whole number: the nearest keys lose no digits to those far away.
    DEVICE void slant(int start) {
        UNROLL for (int i = 0; i < MINE; i++) {
            const int stands = rows.first + rows.query_of(row(i)) + rows.extent.offset - start;
            UNROLL for (int m = 0; m < 2; m++) {
                float& score = scores[at(i, m)];
                score = multiply_add(score, factor, -slopes[i] * fabsf(float(stands - key(m))));
            }
        }
    }
    DEVICE void scale(const float (&by)[MINE]) {
        UNROLL for (auto& part : sums)
            UNROLL for (int i = 0; i < MINE; i++)
                UNROLL for (int m = 0; m < 2; m++) part[at(i, m)] *= by[i];
    }
    // Panels are free one after another, while others are multiplied.
    DEVICE void add_values(const Tile& own, const Tile& others) {
        const int more = a.values_within ? 0 : 1;
        begin_products();
        UNROLL for (int n = 0; n < HALF; n++) {
            const int panel = index * HALF + n;
            await(own, panel, more), await(others, panel, more);
            product_tn<BLOCK_M, BLOCK_N, true>(sums[n], matrix(Shared::value_place(own.stage, panel)),
                                               matrix(Shared::rest_place(index)));
            product_tn<BLOCK_M, BLOCK_N, true>(sums[n], matrix(Shared::value_place(others.stage, panel)),
                                               matrix(Shared::rest_place(other)));
            commit_products();
        }
        each_added<0>(own, others);
        if (WEIGHTS < KEY_PANELS) release(shared.rest_free[0]), release(shared.rest_free[1]);
    }
    template <int N> DEVICE void each_added(const Tile& own, const Tile& others) {
        wait_products<HALF - 1 - N>();
        hold(sums[N]);
        release(shared.free[own.stage][index * HALF + N]), release(shared.free[others.stage][index * HALF + N]);
        if constexpr (N + 1 < HALF) each_added<N + 1>(own, others);
    }
    DEVICE void finish() {
        let_next_begin();  // merge.cu
        float total[MINE];
        all_totals(*this, total);
        const bool writes = index == 0 && thread_index() % 128 < 4;
        UNROLL for (int i = 0; i < MINE; i++) {
            const int r = row(i);
            if (writes) tell(r);
            const float weight = leaves_part() ? 1 : settle(r, softmax, i, total[i], writes);
            if (!rows.is_there(r)) continue;
            const i64 part = rows.part_of(r);
            if (leaves_part() && writes) leave(part, softmax, i, total[i]);
            T* const out = rows.out_of(r);
            UNROLL for (int n = 0; n < HALF; n++)
                UNROLL for (int m = 0; m < 2; m++) {
                    const int column = (index * HALF + n) * PANEL + key(m);
                    if (column >= a.dim_v) continue;
                    if (leaves_part())
                        static_cast<float*>(a.parts)[part * a.dim_v + column] = sums[n][at(i, m)];
                    else
                        out[column] = Narrow<T>::of(sums[n][at(i, m)] * weight);
                }
        }
        if (SPLIT == EVEN) meet_rows();  // who goes on writes to what is read here
    }
};
