// A warpgroup that computes: 64 keys against tiles of queries, where others add what it makes of dQ.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; P^T and dS^T in 16 bits; columns of dQ; and,
// from beginning to end, dK and dV.
//
// A tile of dS^T is written over without asking whether it is still read. It is read for dQ after all have `written`
// it, and each consumer is done with that before it has written the next one. There are two: who writes one again has
// waited for the other, and so for all who read the first.
#pragma once
#include "hopper/backward/own_keys.cuh"
#include "hopper/backward_ordered/shared.cuh"
#include "hopper/backward_ordered/steps.cuh"

struct Consumer : OwnKeys<Shared, OrderedStep, Consumer> {
    Scores scores, score_gradients;
    Weights weights, inner;
    Pair of_columns[BLOCK_N / 8];
    float query_sums[MINE / 2];

    DEVICE Consumer(Shared& shared, const Arguments& a, int index) : OwnKeys(shared, a, index) {}

    // A turn of the loop ends where no product is under way, in the middle of a step: more than one across the turn, the
    // compiler lets come one after another.
    DEVICE void visit(const Keys& block, OrderedStep& step) {
        begin(block);
        Weigher weigher(a, block, index);
        ask_scores(scores, step.left(a, block));
        prepare(weigher, step);
        wait_products<0>();
        weigh(weigher, step);
        if (!SOFTCAP) pack(weights, scores);
        for (;;) {
            differentiate(weigher, step, step.left(a, block));
            at.next();
            step.next();
            if (!step.more()) {
                leave();
                break;
            }
            ask_scores(scores, step.left(a, block));
            leave();
            prepare(weigher, step);
            wait_products<1>();
            ask_query_sums();
            if (SOFTCAP) got_sums();  // first, for want of registers
            weigh(weigher, step);
            if (!SOFTCAP) got_sums(), pack(weights, scores);
        }
        ask_query_sums();
        got_sums();
        show_gradients();
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE int before() const { return at.stage ? at.stage - 1 : STAGES - 1; }
    // What is asked for before a product is waited for: base, and what the mask shows.
    DEVICE void prepare(Weigher& weigher, const Queries& step) {
        numbers(of_columns, shared.base[at.stage]);
        weigher.look(step);
    }
    DEVICE void weigh(Weigher& weigher, const Queries& step) {
        weigher.weigh(scores, weights, step, [&](int c) { return of_columns[c]; });
    }
    // dV, and dS^T in 16 bits.
    DEVICE void differentiate(const Weigher& weigher, const Queries& step, int left) {
        const Matrix values = matrix(Shared::value_place(0, index)), upstream = matrix(Shared::grad_out_place(at.stage));
        await_rows<BLOCK_DV>(shared.grad_out_full[at.stage], at.parity, shared.grad_out[at.stage], left);
        if (BLOCK_D == PANEL) numbers(of_columns, shared.delta[at.stage]);
        begin_products();
        product_nt<BLOCK_N, BLOCK_DV>(score_gradients, values, upstream);
        commit_products();
        product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, upstream);
        commit_products();
        wait_products<1>();
        if (BLOCK_D != PANEL) hold(score_gradients), numbers(of_columns, shared.delta[at.stage]);
        weigher.differentiate(score_gradients, scores, step, [&](int c) { return of_columns[c]; });
        wait_products<0>();
        hold(value_sums), hold(weights);
        release(shared.grad_out_free[at.stage]);
        pack(inner, score_gradients);
    }
    // What a step leaves: dS^T to the other consumer, and to dK; with it, dQ of the one before is there to be added.
    DEVICE void leave() {
        leave_gradients(inner, index);
        const Matrix queries = matrix(Shared::query_place(before()));
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(key_sums, inner, queries);
        commit_products();
        show_gradients();
    }
    // This consumer's columns of dQ, of the step that was left.
    DEVICE void ask_query_sums() {
        const u32 columns = Shared::place(index * MINE / PANEL * 64 * PANEL + index * MINE % PANEL);
        await_gradients(written_at);
        ask_columns(query_sums, written_at.stage, 0, columns);
        written_at.next();
    }
    // dK and dQ of the step that was left. dQ goes through shared memory to who adds it.
    DEVICE void got_sums() {
        wait_products<0>();
        hold(query_sums), hold(key_sums), hold(inner);
        release(shared.query_free[before()]);
        shared.taken[written_at.stage].wait(written_at.parity ^ 1);
        warp_barrier();
        leave_quads(shared.sums[written_at.stage][index][thread_index() % 128 / 32], query_sums);
    }
};
