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
    static constexpr int MINE = BLOCK_M / 4, CONSUMER_WARPS = 8;
    float scores[BLOCK_M / 2], sums[HALF][BLOCK_M / 2];  // of each panel of this half
    u32 weights[BLOCK_M / 16][4];
    Softmax<MINE> softmax;
    float slopes[MINE];  // ALIBI: in units of the exponential

    DEVICE void begin() {
        UNROLL for (auto& part : sums)
            UNROLL for (float& sum : part) sum = 0;
        if (ALIBI) UNROLL for (int i = 0; i < MINE; i++) slopes[i] = slope(row(i));
    }
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

    // `mine` of each row, merged over all keys of both tiles. Threads come together.
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
    DEVICE void take_scores(const Tile& tile, int step) {
        UNROLL for (float& score : scores) score = 0;  // none of the step before lives on in registers
        begin_products();
        UNROLL for (int n = 0; n < KEY_PANELS; n++) {
            const int panel = in_turn(n);
            await_key(tile, panel);
            const Matrix query = matrix(Shared::query_place(panel)), key = matrix(tile.place(panel));
            if (n == 0)
                product_nt<BLOCK_M, PANEL, BLOCK_M, false>(scores, key, query);
            else
                product_nt<BLOCK_M, PANEL, BLOCK_M, true>(scores, key, query);
        }
        commit_products();
        wait_products<0>();
        hold(scores);
        if (!a.values_within) UNROLL for (int n = 0; n < VALUE_PANELS; n++) release(shared.free[tile.stage][n]);
        if (SOFTCAP) cap(scores, float(a.factor));
        const int start = rows.start(step, index);
        if (ALIBI) slant(start);
        if (!rows.has(step, index))
            UNROLL for (float& score : scores) score = -INFINITE;
        else if (rows.reach.hides(start))
            UNROLL for (int i = 0; i < MINE; i++) {
                const Span span = row_sees(row(i));
                UNROLL for (int m = 0; m < 2; m++) {
                    const int at_key = start + key(m);
                    if (at_key < span.from || at_key >= span.to) scores[at(i, m)] = -INFINITE;
                }
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
    // The base of a row rises for all of its keys together.
    DEVICE void agree() {
        float most[MINE], rescale[MINE];
        UNROLL for (int i = 0; i < MINE; i++) most[i] = softmax.most(scores, i);
        over_keys(most, [](float x, float y) { return largest(x, y); });
        bool risen = false;
        UNROLL for (int i = 0; i < MINE; i++) risen |= softmax.rise(i, most[i], ALIBI ? 1 : factor, rescale[i]);
        if (all_of_warp(!risen)) return;
        UNROLL for (auto& part : sums)
            UNROLL for (int i = 0; i < MINE; i++)
                UNROLL for (int m = 0; m < 2; m++) part[at(i, m)] *= rescale[i];
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
        UNROLL for (int i = 0; i < MINE; i++) total[i] = softmax.total[i];
        over_keys(total, [](float x, float y) { return x + y; });
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
