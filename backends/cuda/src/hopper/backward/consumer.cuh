// A warpgroup that computes: 64 keys against tiles of queries.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; P^T and dS^T in 16 bits; a part of dQ; and,
// from beginning to end, dK and dV.
//
// dQ is a step behind, by which time the other consumer has left its dS; before the first step is one that adds nothing.
// It is added from registers: nothing waits for the L2 then, and no shared memory is taken to add it from. A turn of the
// loop begins where no product is under way: where one was, the compiler would let all come one after another.
#pragma once
#include "hopper/backward/biased.cuh"
#include "hopper/backward/own_keys.cuh"
#include "hopper/backward/shared.cuh"

// What a consumer has of dQ of a step: 64 queries with all columns, or half the columns of all 64 queries.
constexpr bool BY_QUERIES = BLOCK_N > 64;
constexpr int MINE = BY_QUERIES ? BLOCK_D : BLOCK_D / CONSUMERS;
static_assert(!BY_QUERIES || BLOCK_N == 64 * CONSUMERS, "64 queries to each consumer");

struct Consumer : OwnKeys<Shared, Step, Consumer> {
    Position<2> read_at;  // tile of dS, for dQ
    Scores scores, score_gradients;
    Weights weights, inner;
    float query_sums[MINE / 2];

    DEVICE Consumer(Shared& shared, const Arguments& a, int index) : OwnKeys(shared, a, index) {}

    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        BiasedWeigher weigher(a, block, index);
        int before = NONE;  // the tile of dQ that the step before adds to
        leave_nothing();
        do {
            ask_scores(scores, step.left(a, block));
            ask_score_gradients(score_gradients, step.left(a, block));
            weigher.look(step);
            if (BIAS && BiasedWeigher::EARLY) weigher.fetch(step, bias());
            wait_products<1>();
            differentiate(weigher, step);
            leave_gradients(inner, index);
            ask_value_sums();
            show_gradients();
            written_at.next();
            ask_query_sums();
            wait_products<1>();
            got_value_sums();
            ask_key_sums();
            wait_products<1>();
            got_query_sums(before);
            before = step.tile(a, block) + (BY_QUERIES ? index : 0);
            step.next();
            wait_products<0>();
            got_key_sums();
            at.next();
        } while (step.more());
        end(before);
    }
    // dQ of the last step.
    DEVICE void end(int tile) {
        ask_query_sums();
        wait_products<0>();
        got_query_sums(tile);
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    // P^T and dS^T in 16 bits. The branch of a wait parts the exponentials: those before it are beside dP, and those that
    // the compiler leaves behind it are beside the arithmetic of dS. All before it takes longer, and so does none.
    DEVICE void differentiate(BiasedWeigher& weigher, const Queries& step) {
        const auto base = [&](int c) { return number(shared.base[at.stage], c); };
        const auto rest = [&](int c) { return number(shared.rest_of(at.stage), c); };
        if (BIAS) weigher.weigh_biased(scores, weights, step, base, rest, bias());
        else weigher.weigh(scores, weights, step, base);
        hold(scores);
        shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        wait_products<0>();
        weigher.differentiate(score_gradients, scores, step, [&](int c) { return number(shared.delta[at.stage], c); });
        if (BIAS) weigher.mend(score_gradients, scores, weights, step, bias());
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++) {  // side by side, so that a register comes free for each taken
            if (!SOFTCAP) weigher.pack_weights(weights[k], scores + 8 * k, k);
            pack(inner[k], score_gradients + 8 * k);
        }
    }
    DEVICE const T* bias() { return shared.bias_of(at.stage, index); }
    DEVICE void leave_nothing() {
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) inner[k][r] = 0;
        if (CONTINUED) shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        leave_gradients(inner, index);
        show_gradients();
        written_at.next();
    }
    // dV and dK of a step.
    DEVICE void ask_value_sums() {
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, matrix(Shared::grad_out_place(at.stage)));
        commit_products();
    }
    DEVICE void ask_key_sums() {
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(key_sums, inner, matrix(Shared::query_place(at.stage)));
        commit_products();
    }
    DEVICE void got_value_sums() {
        hold(value_sums), hold(weights);
        release(shared.grad_out_free[at.stage]);
    }
    DEVICE void got_key_sums() {
        hold(key_sums), hold(inner);
        release(shared.query_free[at.stage]);
    }
    // This consumer's part of dQ, of the oldest step that was left.
    DEVICE void ask_query_sums() {
        const int first = BY_QUERIES ? 0 : index * MINE;
        await_gradients(read_at);
        ask_columns(query_sums, read_at.stage, BY_QUERIES ? Shared::place(index * 64 * PANEL) : 0,
                    Shared::place(first / PANEL * 64 * PANEL + first % PANEL));
    }
    DEVICE void got_query_sums(int tile) {
        release(shared.gradients_free[read_at.stage]);
        read_at.next();
        hold(query_sums);
        if (tile == NONE || !a.grad_query) return;
        add_quads(quads_of(sums_of(a.sums, tile), BY_QUERIES ? 0 : index * MINE / 8), query_sums);
    }
};
