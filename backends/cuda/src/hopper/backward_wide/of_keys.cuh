// The warpgroup with dK: it makes dS of a step, of P that the other one makes.
//
// Registers: dP^T, in whose place comes dS^T; dS^T in 16 bits; a panel of dQ; and, from beginning to end, dK. As for the
// other one, left operands in registers are written, and turns of the loop end, when no product is under way.
//
// Tiles of dS^T take turns. When a warp writes one again, this warpgroup is done with it, whose warps have met since at
// the other one; `gradients_free` says that the other warpgroup is.
#pragma once
#include "hopper/backward_wide/role.cuh"

struct OfKeys : Role<1> {
    Scores gradients;
    Weights inner;
    float sums[BLOCK_D / 2];

    DEVICE OfKeys(Shared& shared, const Arguments& a) : Role(shared, a) {}

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        UNROLL for (float& sum : sums) sum = 0;
        if (step.more()) visit(block, step);
        store_gradient(a, block, block.first, sums, OF_KEY);
    }
    DEVICE void visit(const Keys& block, Step& step) {
        begin(block, 1);
        const Weigher weigher(a, block, block.first);
        ask_gradients();
        wait_products<0>();
        for (;;) {
            differentiate(weigher.hides(step));
            forget_addresses();
            const int tile = tile_of(block, step);
            step.next();
            if (!step.more()) {
                ask_sums();
                wait_products<0>();
                hold(sums), hold(inner);
                add_all_query_sums(tile);
                return;
            }
            ask_sums();
            shared.gradients_full[gradients_at.stage].wait(gradients_at.parity);
            ask_query_sums(0);
            wait_products<1>();
            hold(sums);
            release(shared.query_free[query_at.stage]);
            query_at.next();
            ask_gradients();
            wait_products<1>();
            hold(query_sums);
            add_query_sums(tile, 0);
            if (MINE > 1) ask_query_sums(1);
            wait_products<0>();
            hold(query_sums), hold(inner);
            gradients_at.next();
            if (MINE > 1) add_query_sums(tile, 1);
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void ask_gradients() {
        shared.grad_out_full[grad_out_at.stage].wait(grad_out_at.parity);
        const Matrix upstream = matrix(Shared::grad_out_place(grad_out_at.stage));
        begin_products();
        product_nt<BLOCK_N, BLOCK_DV>(gradients, matrix(Shared::value_place(0)), upstream);
        commit_products();
    }
    DEVICE void ask_sums() {
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(sums, inner, matrix(Shared::query_place(query_at.stage)));
        commit_products();
    }
    // dS^T from dP^T, in its place, and in 16 bits to both that make dQ of it.
    DEVICE void differentiate(bool hidden) {
        Pair delta[BLOCK_N / 8];
        numbers(delta, shared.delta[grad_out_at.stage]);
        hold(gradients);
        release(shared.grad_out_free[grad_out_at.stage]);
        grad_out_at.next();
        const float* const from = shared.weights[warp] + 4 * lane();
        shared.weights_full[warp].wait(weights_at.parity);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Chunk<float> weight = load_shared(reinterpret_cast<const Chunk<float>*>(from + c * QUADS));
            UNROLL for (int k = 0; k < 4; k++) {
                float& x = gradients[4 * c + k];
                x = weight.at[k] * (x - delta[c].at[k % 2]);
                if (hidden && is_unseen(weight.at[k])) x = 0;
            }
        }
        release(shared.weights_free[warp]);
        weights_at.next();
        pack(inner, gradients);
        leave_gradients();
    }
    // dS^T to shared memory, swizzled as TMA would have brought it.
    DEVICE void leave_gradients() {
        const int row = warp * 16 + lane() % 16;
        T* const to = shared.gradients[gradients_at.stage][0] + row * PANEL;
        shared.gradients_free[gradients_at.stage].wait(gradients_at.parity ^ 1);
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            store_matrices(to + ((2 * k + lane() / 16) ^ row % 8) * 8, inner[k]);
        show_writes();
        release(shared.gradients_full[gradients_at.stage]);
    }
};
