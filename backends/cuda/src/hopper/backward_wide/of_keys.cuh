// The warpgroup with dK: it makes dS of a step, of P that the other one makes.
//
// Registers: dP^T, in whose place comes dS^T; dS^T in 16 bits; a panel of dQ; and, from beginning to end, dK. As for the
// other one, left operands in registers are written, and turns of the loop end, when no product is under way.
//
// Tiles of dS^T take turns. When a warp writes one again, this warpgroup is done with it, whose warps have met since at
// the other one; `gradients_free` says that the other warpgroup is.
#pragma once
#include "hopper/backward_wide/role.cuh"

struct OfKeys : Role<1, OfKeys> {
    Scores gradients;
    Weights inner;

    DEVICE OfKeys(Shared& shared, const Arguments& a) : Role(shared, a) {}

    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        Weigher weigher(a, block, 0);
        ask_gradients(step.left(a, block));
        weigher.look(step);
        wait_products<0>();
        for (;;) {
            differentiate(weigher, step);
            forget_addresses();
            const int tile = step.tile(a, block);
            step.next();
            if (!step.more()) {
                ask_sums();
                wait_products<0>();
                hold(sums), hold(inner);
                add_all_query_sums(tile);
                return;
            }
            ask_sums();
            await_gradients(written_at);
            ask_query_sums(0);
            wait_products<1>();
            hold(sums);
            release(shared.query_free[at.stage]);
            at.next();
            ask_gradients(step.left(a, block));
            weigher.look(step);
            wait_products<1>();
            hold(query_sums);
            add_query_sums(tile, 0);
            ask_query_sums(1);
            wait_products<0>();
            hold(query_sums), hold(inner);
            written_at.next();
            add_query_sums(tile, 1);
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void ask_gradients(int left) {
        const int stage = upstream_at.stage;
        await_rows<BLOCK_DV>(shared.grad_out_full[stage], upstream_at.parity, shared.grad_out[stage], left);
        const Matrix upstream = matrix(Shared::grad_out_place(upstream_at.stage));
        begin_products();
        product_nt<BLOCK_N, BLOCK_DV>(gradients, matrix(Shared::value_place(0, 0)), upstream);
        commit_products();
    }
    // Queries are there, and those of the next sequence cleared, since the other warpgroup has made weights of them.
    DEVICE void ask_sums() {
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(sums, inner, matrix(Shared::query_place(at.stage)));
        commit_products();
    }
    // dS^T from dP^T, in its place, and in 16 bits to both that make dQ of it.
    DEVICE void differentiate(const Weigher& weigher, const Queries& step) {
        Pair delta[BLOCK_N / 8];
        numbers(delta, shared.delta[upstream_at.stage]);
        hold(gradients);
        release_together(shared.grad_out_free[upstream_at.stage]);
        upstream_at.next();
        Scores weighed;
        shared.weights_full[warp].wait(weights_at.parity);
        take_quads(weighed, shared.weights[warp]);
        shared.weights_free[warp].arrive();
        weights_at.next();
        weigher.differentiate(gradients, weighed, step, [&](int c) { return delta[c]; });
        pack(inner, gradients);
        shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        leave_gradients(inner, 0);
        show_gradients();
    }
};
