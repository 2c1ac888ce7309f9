// A consumer of 64 rows: scores and weights of every other tile of keys, for all rows of the block, and one half of the
// output's columns, to which both consumers' weights are multiplied.
//
//   each pair of tiles    S = Q K^T | largest scores | P = 2^(S - base), to shared memory | O += own P V + other's P V
//
// A warp has the same 16 rows as one of the other consumer, and reads no other rows of its weights: the two alone wait
// for one another. Weights lie in a panel of their tile that holds no values: where keys were, all warps that multiply
// them are waited for.
#pragma once
#include "hopper/latent/worker.cuh"
#include "hopper/store.cuh"

// Columns of the output that a product adds to, of the half that a consumer has.
constexpr int WIDE = 128, OUTPUTS = HALF * PANEL / WIDE, EACH = WIDE / PANEL;

struct alignas(8) Two {
    float at[2];
};

struct Consumer : Worker {
    static constexpr int MINE = 2;  // rows of a thread
    Scores scores;
    Weights weights;
    float sums[OUTPUTS][WIDE / 2];
    Softmax<MINE> softmax;
    float slopes[MINE];  // ALIBI: in units of the exponential

    static DEVICE int row(int m) { return row_of(m); }
    // The two warps that have the same rows meet.
    DEVICE void meet_rows() const { meet_at(1 + thread_index() % 128 / 32, 64); }
    // All its warps have read the keys there.
    DEVICE void make_room() {
        if (WEIGHTS < KEY_PANELS) meet_own();
    }

    // -- scores ---------------------------------------------------------------------------------------------------

    template <bool KEEP> DEVICE void multiply(Matrix query, Matrix key) {
        product_nt<BLOCK_N, PANEL, BLOCK_N, KEEP>(scores, query, key);
    }
    DEVICE void hide_keys(int start) {
        hide(scores, start, [&](int m) { return row_sees(row(m)); });
    }
    // Scores become exponents. A distance is a whole number: the nearest keys lose no digits to those far away.
    DEVICE void slant(int start) {
        UNROLL for (int m = 0; m < 2; m++) {
            const int stands = rows.first + rows.query_of(row_of(m)) + rows.extent.offset - start - first_column();
            UNROLL for (int c = 0; c < BLOCK_N / 8; c++)
                UNROLL for (int e = 0; e < 2; e++) {
                    float& score = scores[4 * c + 2 * m + e];
                    score = multiply_add(score, factor, -slopes[m] * fabsf(float(stands) - float(8 * c + e)));
                }
        }
    }
    // `mine` of each row, merged over all keys of both tiles.
    template <class Merge> DEVICE void over_keys(float (&mine)[MINE], Merge merge) const {
        UNROLL for (int m = 0; m < MINE; m++) {
            mine[m] = over_row(mine[m], merge);
            if (first_column() == 0) store_shared(&shared.beside[index][row(m)], mine[m]);
        }
        meet_rows();
        UNROLL for (int m = 0; m < MINE; m++) mine[m] = merge(mine[m], load_shared(&shared.beside[other][row(m)]));
    }
    DEVICE void scale(const float (&by)[MINE]) {
        UNROLL for (auto& part : sums) scale_rows(part, by);
    }

    // -- values ---------------------------------------------------------------------------------------------------

    // Panels are free one after another, while others are multiplied.
    DEVICE void add_values(const Tile& own, const Tile& others) {
        const int more = a.values_within ? 0 : 1;
        begin_products();
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
            const int first = index * HALF + n * EACH;
            UNROLL for (int panel = first; panel < first + EACH; panel++)
                await(own, panel, more), await(others, panel, more);
            product_nn<WIDE, BLOCK_N>(sums[n], weights, matrix(Shared::value_place(own.stage, first)));
            commit_products();
            if (n > 0) added<1>(n - 1, own, others), begin_products();
            product_nn<WIDE, BLOCK_N>(sums[n], matrix(Shared::rest_place(other)),
                                      matrix(Shared::value_place(others.stage, first)));
            commit_products();
        }
        added<0>(OUTPUTS - 1, own, others);
        hold(weights);
        if (WEIGHTS < KEY_PANELS) release(shared.rest_free[other]);
    }
    template <int PENDING> DEVICE void added(int n, const Tile& own, const Tile& others) {
        wait_products<PENDING>();
        hold(sums[n]);
        UNROLL for (int panel = index * HALF + n * EACH; panel < index * HALF + (n + 1) * EACH; panel++)
            release(shared.free[own.stage][panel]), release(shared.free[others.stage][panel]);
    }

    // -- results --------------------------------------------------------------------------------------------------

    DEVICE void finish() {
        let_next_begin();  // merge.cu
        float total[MINE];
        all_totals(*this, total);
        UNROLL for (int m = 0; m < MINE; m++) {
            if (writes()) tell(row(m));
            if (leaves_part())
                store_part(m, total[m]);
            else
                store(m, total[m]);
        }
        if (SPLIT == EVEN) meet_rows();  // who goes on writes to what is read here
    }
    // Whether this thread writes what there is once of a row.
    DEVICE bool writes() const { return index == 0 && first_column() == 0; }
    DEVICE void store(int m, float total) const {
        const int r = row_of(m);
        const float weight = settle(r, softmax, m, total, writes());
        T* const out = rows.out_of(r);
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
            const int first = index * HALF * PANEL + n * WIDE;
            store_row<WIDE>(rows.is_there(r) ? out + first : nullptr, sums[n], m, weight, a.dim_v - first);
        }
    }
    DEVICE void store_part(int m, float total) const {
        const int r = row_of(m);
        if (!rows.is_there(r)) return;
        const i64 part = rows.part_of(r);
        if (writes()) leave(part, softmax, m, total);
        float* const parts = static_cast<float*>(a.parts) + part * a.dim_v;
        UNROLL for (int n = 0; n < OUTPUTS; n++)
            UNROLL for (int c = 0; c < WIDE / 8; c++) {
                const int column = index * HALF * PANEL + n * WIDE + 8 * c + first_column(), at = 4 * c + 2 * m;
                if (column < a.dim_v) *reinterpret_cast<Two*>(parts + column) = Two{{sums[n][at], sums[n][at + 1]}};
            }
    }
};
