// The warpgroup with dV: it makes P of a step, which the other one makes dS of.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; P^T in 16 bits; a panel of dQ; and, from beginning to
// end, dV. Left operands in registers are written when no product is under way. A turn of the loop ends where none is:
// more than one across the turn, the compiler lets come one after another.
#pragma once
#include "hopper/backward_wide/role.cuh"

struct OfValues : Role<0, OfValues> {
    Scores scores;
    Weights weights;

    DEVICE OfValues(Shared& shared, const Arguments& a) : Role(shared, a) {}

    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        Weigher weigher(a, block, 0);
        ask_scores(scores, step.left(a, block));
        weigher.look(step);
        wait_products<0>();
        make_weights(weigher, step);
        leave_weights();
        for (int before = NONE;;) {  // the tile of dQ of which one more panel is to be added
            forget_addresses();
            const int tile = step.tile(a, block), left = step.left(a, block);
            step.next();
            if (!step.more()) {
                if (before != NONE) add_query_sums(before, 1);
                ask_sums(left);
                wait_products<0>();
                got_sums();
                add_all_query_sums(tile);
                return;
            }
            ask_sums(left);
            ask_scores(scores, step.left(a, block));
            weigher.look(step);
            if (before != NONE) add_query_sums(before, 1);
            wait_products<1>();
            got_sums();
            await_gradients(written_at);
            ask_query_sums(0);
            wait_products<0>();
            hold(query_sums), hold(scores), hold(weights);
            add_query_sums(tile, 0);
            ask_query_sums(1), before = tile;
            if (SOFTCAP) got_query_sums();
            make_weights(weigher, step);
            if (!SOFTCAP) got_query_sums();
            leave_weights();
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void ask_sums(int left) {
        const int stage = upstream_at.stage;
        await_rows<BLOCK_DV>(shared.grad_out_full[stage], upstream_at.parity, shared.grad_out[stage], left);
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(sums, weights, matrix(Shared::grad_out_place(upstream_at.stage)));
        commit_products();
    }
    DEVICE void got_sums() {
        hold(sums);
        release(shared.grad_out_free[upstream_at.stage]);
        upstream_at.next();
    }
    DEVICE void got_query_sums() {
        wait_products<0>();
        hold(query_sums);
        release(shared.gradients_free[written_at.stage]);
        written_at.next();
    }
    DEVICE void make_weights(Weigher& weigher, const Queries& step) {
        Pair base[BLOCK_N / 8];
        numbers(base, shared.base[at.stage]);
        weigher.weigh(scores, weights, step, [&](int c) { return base[c]; });
        release_together(shared.query_free[at.stage]);
        at.next();
    }
    // P^T to the warp that makes dS^T of the same keys, and in 16 bits to dV.
    DEVICE void leave_weights() {
        shared.weights_free[warp].wait(weights_at.parity ^ 1);
        leave_quads(shared.weights[warp], scores);
        shared.weights_full[warp].arrive();
        weights_at.next();
        if (!SOFTCAP) pack(weights, scores);
    }
};
