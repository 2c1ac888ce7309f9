// A warpgroup that computes: scores and weights of every other tile of keys, for all rows of the block, and one half of
// the output's columns, to which both consumers' weights are multiplied.
//
//   each pair of tiles    S = Q K^T | largest scores | P = 2^(S - base), to shared memory | O += own P V + other's P V
//
// A warp has the same 16 rows as one of the other consumer, and reads no other rows of its weights: the two alone wait
// for one another. Weights lie in a panel of their tile that holds no values: where keys were, all warps that multiply
// them are waited for.
#pragma once
#include "hopper/latent/loader.cuh"
#include "hopper/latent/softmax.cuh"
#include "hopper/store.cuh"
#include "sinks.cuh"
#include "slopes.cuh"

// Columns of the output that a product adds to, of the half that a consumer has.
constexpr int WIDE = 128, OUTPUTS = HALF * PANEL / WIDE, EACH = WIDE / PANEL;

struct alignas(8) Two {
    float at[2];
};

struct Consumer {
    Shared& shared;
    const Arguments& a;
    const Rows& rows;
    const Past past;
    const int index, other = 1 - index;
    const float factor = float(SOFTCAP ? a.cap : a.factor) * float(SOFTCAP || ALIBI ? UNIT : 1);
    u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Scores scores;
    Weights weights;
    float sums[OUTPUTS][WIDE / 2];
    Softmax softmax;
    float slope[2];  // ALIBI: of each row, in units of the exponential

    DEVICE void run() {
        UNROLL for (auto& part : sums)
            UNROLL for (float& sum : part) sum = 0;
        if (ALIBI) UNROLL for (int m = 0; m < 2; m++) slope[m] = slope_of(a, rows.batch, head_of(m)) * UNIT;
        const int steps = rows.steps();
        if (steps) shared.query_full.wait(past.queries & 1);
        ROLLED for (int step = 0; step < steps; step++) {
            origin = broadcast(origin);  // so that places are worked out of it anew, in registers of the warp
            const Tile tile(past.steps + step, index);
            take_scores(tile, step);
            if (SPLIT == EVEN && step == steps - 1) release(shared.query_free);
            agree();
            softmax.weigh(weights, scores, ALIBI ? 1 : factor);
            if (!a.values_within)  // not only those of its half: no phase of its own tile passes unseen
                UNROLL for (int n = 0; n < VALUE_PANELS; n++) await(tile, n, 1);
            if (rows.start(step, 0) + 2 * BLOCK_N > rows.extent.end) clear_beyond(tile, step);
            if (WEIGHTS < KEY_PANELS) meet_own();  // all its warps have read the keys there
            store_packed(shared.rest[index], weights);
            show_writes();
            meet_other();
            add_values(tile, Tile(past.steps + step, other));
        }
        finish();
    }

private:
    // The two warps that have the same rows meet.
    DEVICE void meet_other() { meet_at(1 + thread_index() % 128 / 32, 64); }
    DEVICE void meet_own() { meet_at(5 + index, 128); }
    DEVICE void meet_all() { meet_at(7, 256); }
    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }
    DEVICE int head_of(int m) const { return smaller(rows.head_of(row_of(m)), a.heads - 1); }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }
    DEVICE void await(const Tile& tile, int panel, int more = 0) {
        shared.full[tile.stage][panel].wait((tile.uses_before(a) + more) & 1);
    }

    // -- scores ---------------------------------------------------------------------------------------------------

    DEVICE void take_scores(const Tile& tile, int step) {
        UNROLL for (float& score : scores) score = 0;  // none of the step before lives on in registers
        begin_products();
        UNROLL for (int n = 0; n < KEY_PANELS; n++) {
            const int panel = in_turn(n);
            if (panel < VALUE_PANELS)
                await(tile, panel);
            else
                shared.rest_full[index].wait(tile.step & 1);
            const Matrix query = matrix(Shared::query_place(panel)), key = matrix(tile.place(panel));
            if (n == 0)
                product_nt<BLOCK_N, PANEL, BLOCK_N, false, BLOCK_M>(scores, query, key);
            else
                product_nt<BLOCK_N, PANEL, BLOCK_N, true, BLOCK_M>(scores, query, key);
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
            hide(scores, start, [&](int m) { return rows.sees(smaller(rows.query_of(row_of(m)), rows.count - 1)); });
    }
    // Scores become exponents. A distance is a whole number: the nearest keys lose no digits to those far away.
    DEVICE void slant(int start) {
        UNROLL for (int m = 0; m < 2; m++) {
            const int stands = rows.first + rows.query_of(row_of(m)) + rows.extent.offset - start - first_column();
            UNROLL for (int c = 0; c < BLOCK_N / 8; c++)
                UNROLL for (int e = 0; e < 2; e++) {
                    float& score = scores[4 * c + 2 * m + e];
                    score = multiply_add(score, factor, -slope[m] * fabsf(float(stands) - float(8 * c + e)));
                }
        }
    }
    // Both consumers raise the base of a row together.
    DEVICE void agree() {
        float most[2], rescale[2];
        UNROLL for (int m = 0; m < 2; m++) {
            most[m] = over_row(Softmax::most(scores, m), [](float x, float y) { return largest(x, y); });
            if (first_column() == 0) store_shared(&shared.beside[index][row_of(m)], most[m]);
        }
        meet_other();
        bool risen = false;
        UNROLL for (int m = 0; m < 2; m++) {
            most[m] = largest(most[m], load_shared(&shared.beside[other][row_of(m)]));
            risen |= softmax.rise(m, most[m], ALIBI ? 1 : factor, rescale[m]);
        }
        if (all_of_warp(!risen)) return;
        UNROLL for (auto& part : sums) scale_rows(part, rescale);
    }

    // -- values ---------------------------------------------------------------------------------------------------

    // Beyond the end of a sequence may lie NaN, or another one, which a weight of 0 does not take away.
    DEVICE void clear_beyond(const Tile& tile, int step) {
        const int there = larger(rows.extent.end - rows.start(step, index), 0);
        meet_own();  // whose products have read these rows
        if (there < BLOCK_N) clear_rows<BLOCK_N, BLOCK_DV>(shared.values[tile.stage][0], there);
        meet_all();
    }
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
        float total[2];
        UNROLL for (int m = 0; m < 2; m++) {
            total[m] = over_row(softmax.total[m], [](float x, float y) { return x + y; });
            if (first_column() == 0) store_shared(&shared.beside[index][row_of(m)], total[m]);
        }
        meet_other();
        UNROLL for (int m = 0; m < 2; m++) {
            total[m] += load_shared(&shared.beside[other][row_of(m)]);
            if (SPLIT == EVEN && rows.portion.from == 0) tell(row_of(m));
            if (SPLIT == PARTS || rows.portion.parts)
                store_part(m, total[m]);
            else
                store(m, total[m]);
        }
        if (SPLIT == EVEN) meet_other();  // who goes on writes to what is read here
    }
    DEVICE void store(int m, float total) const {
        const int r = row_of(m);
        const bool there = rows.is_there(r);
        const float top = softmax.exponent(m, ALIBI ? 1 : factor);
        float rescale = 1, higher = -INFINITE;  // the sink, where no score is as high
        if (SINKS) rescale = join_sink(there ? sink_of(a, rows.head_of(r)) : -INFINITE, top, higher, total);
        const bool sunk = higher > -INFINITE, empty = total == 0;
        if (a.lse && there && index == 0 && first_column() == 0)
            static_cast<float*>(a.lse)[rows.line_of(r)] =
                empty ? -INFINITE
                      : multiply_add(sunk ? higher : softmax.base[m],
                                     float(sunk ? 1 : ALIBI ? 1 / UNIT : SOFTCAP ? a.cap : a.scale), logarithm(total));
        T* const out = rows.out_of(r);
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
            const int first = index * HALF * PANEL + n * WIDE;
            store_row<WIDE>(there ? out + first : nullptr, sums[n], m, empty ? 0 : rescale / total, a.dim_v - first);
        }
    }
    // Where the parts of a row begin, and how many there are.
    DEVICE void tell(int r) const {
        if (index || first_column() || !rows.is_there(r)) return;
        int* const told = reinterpret_cast<int*>(static_cast<float*>(a.sums) + 2 * rows.all_parts()) + 2 * rows.line_of(r);
        told[0] = int(rows.part_of(r)), told[1] = rows.portion.parts;
    }
    DEVICE void store_part(int m, float total) const {
        const int r = row_of(m);
        if (!rows.is_there(r)) return;
        const i64 part = rows.part_of(r);
        float* const maxima = static_cast<float*>(a.sums);
        if (index == 0 && first_column() == 0) {
            maxima[part] = softmax.is_seen(m) ? softmax.exponent(m, ALIBI ? 1 : factor) : -INFINITE;
            maxima[rows.all_parts() + part] = total;
        }
        float* const parts = static_cast<float*>(a.parts) + part * a.dim_v;
        UNROLL for (int n = 0; n < OUTPUTS; n++)
            UNROLL for (int c = 0; c < WIDE / 8; c++) {
                const int column = index * HALF * PANEL + n * WIDE + 8 * c + first_column(), at = 4 * c + 2 * m;
                if (column < a.dim_v) *reinterpret_cast<Two*>(parts + column) = Two{{sums[n][at], sums[n][at + 1]}};
            }
    }
};
