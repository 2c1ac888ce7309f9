// The warpgroup with dV: it makes P of a step, which the other one makes dS of.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; P^T in 16 bits; a panel of dQ; and, from beginning to
// end, dV. Left operands in registers are written when no product is under way. A turn of the loop ends where none is:
// more than one across the turn, the compiler lets come one after another.
#pragma once
#include "hopper/backward_wide/worker.cuh"

struct OfValues : Worker<0> {
    Scores scores;
    Weights weights;
    u32 shown;  // MASKED: what the mask shows the thread's columns, 16 bits for each of its rows
    float sums[BLOCK_DV / 2];

    DEVICE OfValues(Shared& shared, const Arguments& a) : Worker(shared, a) {}

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        UNROLL for (float& sum : sums) sum = 0;
        if (step.more()) visit(block, step);
        store_gradient(a, block, block.first, sums, OF_VALUE);
    }
    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        ask_scores();
        look(block, step);
        wait_products<0>();
        make_weights(block, step);
        leave_weights();
        for (int before = NONE;;) {  // the tile of dQ of which one more panel is to be added
            forget_addresses();
            const int tile = tile_of(block, step);
            step.next();
            if (!step.more()) {
                if (before != NONE) add_query_sums(before, 1);
                ask_sums();
                wait_products<0>();
                got_sums();
                add_all_query_sums(tile);
                return;
            }
            ask_sums();
            ask_scores();
            look(block, step);
            if (before != NONE) add_query_sums(before, 1);
            wait_products<1>();
            got_sums();
            shared.gradients_full[gradients_at.stage].wait(gradients_at.parity);
            ask_query_sums(0);
            wait_products<0>();
            hold(query_sums), hold(scores), hold(weights);
            add_query_sums(tile, 0);
            if (MINE > 1) ask_query_sums(1), before = tile;
            if (SOFTCAP) got_query_sums();
            make_weights(block, step);
            if (!SOFTCAP) got_query_sums();
            leave_weights();
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void ask_scores() {
        shared.query_full[query_at.stage].wait(query_at.parity);
        begin_products();
        product_nt<BLOCK_N, BLOCK_D>(scores, matrix(Shared::key_place()), matrix(Shared::query_place(query_at.stage)));
        commit_products();
    }
    DEVICE void ask_sums() {
        shared.grad_out_full[grad_out_at.stage].wait(grad_out_at.parity);
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(sums, weights, matrix(Shared::grad_out_place(grad_out_at.stage)));
        commit_products();
    }
    DEVICE void got_sums() {
        hold(sums);
        release(shared.grad_out_free[grad_out_at.stage]);
        grad_out_at.next();
    }
    // What is asked for before a product is waited for: what the mask shows.
    DEVICE void look(const Keys& block, const Step& step) {
        if (!MASKED || !step.mixed) return;
        const int plane = mask_plane(a, block.batch, step.head), at = lane() / 8 * 4 + lane() / 4 % 2;
        shown = 0;
        UNROLL for (int n = 0; n < BLOCK_N / 4; n++) {
            const int query = step.start + n / 2 * 8 + first_column() + n % 2;
            const u32 bits = mask_row<BLOCK_M>(a, plane, block.first / BLOCK_M, query)[warp] >> at;
            shown |= (bits & 1) << n | (bits >> 2 & 1) << (n + 16);
        }
    }
    // Takes out what the thread's keys are not seen by.
    DEVICE void hide(const Keys& block, const Step& step, float instead) {
        if (block.reach.hides(step.start))
            ::hide(scores, step.start, [&](int m) {
                const int key = block.first + row_of(m);
                return key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++)
            if (!(shown >> (n / 4 * 2 + n % 2 + n / 2 % 2 * 16) & 1)) scores[n] = instead;
    }
    DEVICE void got_query_sums() {
        wait_products<0>();
        hold(query_sums);
        release(shared.gradients_free[gradients_at.stage]);
        gradients_at.next();
    }
    // P^T from S^T, in its place. Behind a softcap P^T is packed, and in its place is what the tanh leaves of it.
    DEVICE void make_weights(const Keys& block, const Step& step) {
        const float factor = SOFTCAP ? float(a.cap) * UNIT : float(a.factor);
        Pair base[BLOCK_N / 8];
        numbers(base, shared.base[query_at.stage]);
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor)), hide(block, step, -INFINITE);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++)
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) {
                    weight[e] = power(multiply_add(score[e], factor, -base[c].at[e]));
                    if (SOFTCAP && score[e] == -INFINITE) weight[e] = unseen();
                }
                if (SOFTCAP) weights[c / 2][c % 2 * 2 + m] = pack_pair<T>(weight[0], weight[1]);
                UNROLL for (int e = 0; e < 2; e++)
                    score[e] = !SOFTCAP || score[e] == -INFINITE ? weight[e]
                                                                : weight[e] * multiply_add(-score[e], score[e], 1);
            }
        if (!SOFTCAP) hide(block, step, unseen());
        release(shared.query_free[query_at.stage]);
        query_at.next();
    }
    // P^T to the warp that makes dS^T of the same keys, and in 16 bits to dV.
    DEVICE void leave_weights() {
        float* const to = shared.weights[warp] + 4 * lane();
        shared.weights_free[warp].wait(weights_at.parity ^ 1);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const float* const x = scores + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(to + c * QUADS), Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
        release(shared.weights_full[warp]);
        weights_at.next();
        if (!SOFTCAP) pack(weights, scores);
    }
};
