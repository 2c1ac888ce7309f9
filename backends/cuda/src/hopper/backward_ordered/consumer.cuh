// A warpgroup that computes: 64 keys against tiles of queries, where others add what it makes of dQ.
//
// Registers, beside those of worker.cuh: columns of dQ, and, from beginning to end, dK and dV.
//
// A tile of dS^T is written over without asking whether it is still read. It is read for dQ after all have `written`
// it, and each consumer is done with that before it has written the next one. There are two: who writes one again has
// waited for the other, and so for all who read the first.
#pragma once
#include "hopper/backward/worker.cuh"
#include "hopper/backward_ordered/shared.cuh"
#include "hopper/backward_ordered/steps.cuh"

struct Consumer : Worker<Shared> {
    Pair of_columns[BLOCK_N / 8];
    float query_sums[MINE / 2];
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    DEVICE Consumer(Shared& shared, const Arguments& a, int index) : Worker(shared, a, index) {}

    DEVICE void run() {
        const Keys block(a);
        OrderedStep step(a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) visit(block, step);
        store_gradient(a, block, block.first + 64 * index, key_sums, OF_KEY);
        store_gradient(a, block, block.first + 64 * index, value_sums, OF_VALUE);
    }
    // A turn of the loop ends where no product is under way, in the middle of a step: more than one across the turn, the
    // compiler lets come one after another.
    DEVICE void visit(const Keys& block, OrderedStep& step) {
        begin(block);
        ask_scores();
        prepare(block, step);
        wait_products<0>();
        weigh(block, step);
        if (!SOFTCAP) pack(weights, scores);
        for (;;) {
            differentiate(block, step);
            at.next();
            step.next();
            if (!step.more()) {
                leave();
                break;
            }
            ask_scores();
            leave();
            prepare(block, step);
            wait_products<1>();
            ask_query_sums();
            if (SOFTCAP) got_sums();  // first, for want of registers
            weigh(block, step);
            if (!SOFTCAP) got_sums(), pack(weights, scores);
        }
        ask_query_sums();
        got_sums();
        show_writes();
        warp_barrier();
        release(shared.written[written_at.stage]);
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE int before() const { return at.stage ? at.stage - 1 : STAGES - 1; }
    // What is asked for before a product is waited for: base, and what the mask shows.
    DEVICE void prepare(const Keys& block, const Queries& step) {
        numbers(of_columns, shared.base[at.stage]);
        look(block, step);
    }
    DEVICE void weigh(const Keys& block, const Queries& step) {
        make_weights(block, step, [&](int c) { return of_columns[c]; });
    }
    // dV, and dS^T in 16 bits.
    DEVICE void differentiate(const Keys& block, const Queries& step) {
        const Matrix values = matrix(Shared::value_place(index)), upstream = matrix(Shared::grad_out_place(at.stage));
        shared.grad_out_full[at.stage].wait(at.parity);
        if (BLOCK_D == PANEL) numbers(of_columns, shared.delta[at.stage]);
        begin_products();
        product_nt<BLOCK_N, BLOCK_DV>(score_gradients, values, upstream);
        commit_products();
        product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, upstream);
        commit_products();
        wait_products<1>();
        if (BLOCK_D != PANEL) hold(score_gradients), numbers(of_columns, shared.delta[at.stage]);
        make_gradients(block, step, [&](int c) { return of_columns[c]; });
        wait_products<0>();
        hold(value_sums), hold(weights);
        release(shared.grad_out_free[at.stage]);
        pack(inner, score_gradients);
    }
    // What a step leaves: dS^T to the other consumer, and to dK; with it, dQ of the one before is there to be added.
    DEVICE void leave() {
        leave_gradients();
        const Matrix queries = matrix(Shared::query_place(before()));
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(key_sums, inner, queries);
        commit_products();
        show_writes();
        warp_barrier();
        release(shared.written[written_at.stage]);
    }
    // This consumer's columns of dQ, of the step that was left.
    DEVICE void ask_query_sums() {
        const int tile = written_at.stage;
        const u32 columns = Shared::place(index * MINE / PANEL * 64 * PANEL + index * MINE % PANEL);
        const Matrix gradients[] = {matrix(Shared::gradient_place(tile, 0)), matrix(Shared::gradient_place(tile, 1))};
        const Matrix keys[] = {matrix(Shared::key_place(0) + columns), matrix(Shared::key_place(1) + columns)};
        shared.written[tile].wait(written_at.parity);
        written_at.next();
        begin_products();
        product_tn<MINE, 64, false>(query_sums, gradients[0], keys[0]);
        product_tn<MINE, 64, true>(query_sums, gradients[1], keys[1]);
        commit_products();
    }
    // dK and dQ of the step that was left. dQ goes through shared memory to who adds it.
    DEVICE void got_sums() {
        wait_products<0>();
        hold(query_sums), hold(key_sums), hold(inner);
        release(shared.query_free[before()]);
        shared.taken[written_at.stage].wait(written_at.parity ^ 1);
        warp_barrier();
        float* const to = shared.sums[written_at.stage][index][thread_index() % 128 / 32] + 4 * (thread_index() % 32);
        UNROLL for (int c = 0; c < MINE / 8; c++) {
            const float* const x = query_sums + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(to + c * QUADS), Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
    }
};
