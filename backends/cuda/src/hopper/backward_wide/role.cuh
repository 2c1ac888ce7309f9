// What both warpgroups of a block of 64 keys have: panels of dQ.
#pragma once
#include "hopper/backward_wide/worker.cuh"

template <int INDEX> struct Role : Worker {
    static constexpr int PANELS = BLOCK_D / PANEL, FIRST = INDEX * (PANELS / 2);  // of dQ, and the first of its own
    static constexpr int MINE = INDEX ? PANELS - PANELS / 2 : PANELS / 2;
    static_assert(MINE == 1 || MINE == 2, "one beside other products, and perhaps another");

    Position<1> weights_at;
    Position<2> gradients_at;
    float query_sums[PANEL / 2];

    DEVICE Role(Shared& shared, const Arguments& a) : Worker(shared, a) {}

    // Panel n of its own, of dS^T in the tile where `gradients_at` is.
    DEVICE void ask_query_sums(int n) {
        const Matrix gradients = matrix(Shared::gradient_place(gradients_at.stage, 0));
        const Matrix keys = matrix(Shared::key_place(0) + Shared::place((FIRST + n) * 64 * PANEL));
        begin_products();
        product_tn<PANEL, 64, false>(query_sums, gradients, keys);
        commit_products();
    }
    DEVICE void add_query_sums(int tile, int n) { add_to_query(query_sums, tile, (FIRST + n) * (PANEL / 8), INDEX); }
    // All of its own, where no other product is under way.
    DEVICE void add_all_query_sums(int tile) {
        shared.gradients_full[gradients_at.stage].wait(gradients_at.parity);
        UNROLL for (int n = 0; n < MINE; n++) {
            ask_query_sums(n);
            wait_products<0>();
            hold(query_sums);
            add_query_sums(tile, n);
        }
        end_additions();
    }
};
