// A warpgroup that computes: 64 keys against tiles of queries, half a tile at a time.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; columns of dQ; P^T and dS^T in 16 bits; and,
// from beginning to end, dK and dV. Invariants: left operands in registers are written, and turns of the loop end, when no
// product is under way. Every tile of the block is waited for and freed, also one that these keys are not seen by.
//
// dQ is a step behind, by which time the other consumer has left its dS; before the first step is one that adds nothing.
#pragma once
#include "hopper/backward_wide/worker.cuh"

constexpr int HALF = BLOCK_N / 2;

struct Consumer : Worker {
    const int index;
    Position<2> written_at, read_at;  // tiles of dS^T
    int before = NONE;                // the tile of dQ that the step before adds to
    float scores[HALF / 2], score_gradients[HALF / 2];
    u32 weights[HALF / 16][4], inner[HALF / 16][4];
    float panel[PANEL / 2], half_panel[PANEL / 4];  // of dQ
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    DEVICE Consumer(Shared& shared, const Arguments& a, int index) : Worker(shared, a), index(index) {}

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) visit(block, step);
        store_gradient(a, block, block.first + 64 * index, key_sums, OF_KEY);
        store_gradient(a, block, block.first + 64 * index, value_sums, OF_VALUE);
    }
    DEVICE void visit(const Keys& block, Step& step) {
        begin(block, index);
        leave_nothing();
        if (TURNS && index == CONSUMERS - 1) pass_turn(index);
        Weigher weigher(a, block, block.first + 64 * index);
        ask_scores<0>();
        weigher.look(step);
        wait_products<0>();
        for (;;) {
            forget_addresses();
            differentiate<0>(weigher, step);
            if (TURNS) await_turn(index);
            ask_sums<0>();
            leave_gradients<0>();
            got_sums();
            ask_panel();
            ask_scores<1>();
            if (TURNS) pass_turn(index);
            wait_products<1>();
            add_panel(before);
            wait_products<0>();

            forget_addresses();
            differentiate<1>(weigher, step);
            const int tile = tile_of(block, step);
            step.next();
            if (TURNS) await_turn(index);
            ask_sums<1>();
            leave_gradients<1>();
            got_sums();
            release(shared.query_free[query_at.stage]);
            release(shared.grad_out_free[grad_out_at.stage]);
            query_at.next(), grad_out_at.next();
            if (!step.more()) {
                if (TURNS) pass_turn(index);
                end(tile);
                return;
            }
            ask_half_panel();
            ask_scores<0>();
            if (TURNS) pass_turn(index);
            weigher.look(step);
            wait_products<1>();
            add_half_panel(before);
            before = tile;
            wait_products<0>();
        }
    }
    // dQ of what is left: of the step before, and of the last.
    DEVICE void end(int tile) {
        ask_half_panel();
        wait_products<0>();
        add_half_panel(before);
        ask_panel();
        wait_products<0>();
        add_panel(tile);
        ask_half_panel();
        wait_products<0>();
        add_half_panel(tile);
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    // Where half a tile of queries, or of their upstream gradients, begins.
    static DEVICE u32 half_place(int part) { return Shared::place(part * HALF * PANEL); }

    template <int PART> DEVICE void ask_scores() {
        if (PART == 0) shared.query_full[query_at.stage].wait(query_at.parity);
        const Matrix queries = matrix(Shared::query_place(query_at.stage) + half_place(PART));
        begin_products();
        product_nt<HALF, BLOCK_D, BLOCK_N>(scores, matrix(Shared::key_place(index)), queries);
        commit_products();
    }
    // P^T and dS^T in 16 bits.
    template <int PART> DEVICE void differentiate(Weigher& weigher, const Step& step) {
        if (PART == 0) shared.grad_out_full[grad_out_at.stage].wait(grad_out_at.parity);
        const Matrix upstream = matrix(Shared::grad_out_place(grad_out_at.stage) + half_place(PART));
        begin_products();
        product_nt<HALF, BLOCK_DV, BLOCK_N>(score_gradients, matrix(Shared::value_place(index)), upstream);
        commit_products();
        weigher.weigh(scores, weights, step, PART * HALF, shared.base[query_at.stage] + PART * HALF);
        Pair delta[HALF / 8];
        numbers(delta, shared.delta[grad_out_at.stage] + PART * HALF);
        wait_products<0>();
        hold(score_gradients);
        const bool hidden = weigher.hides(step);
        UNROLL for (int n = 0; n < HALF / 2; n++) {
            float& x = score_gradients[n];
            x = scores[n] * (x - delta[n / 4].at[n % 2]);
            if (hidden && is_unseen(scores[n])) x = 0;
        }
        if (!SOFTCAP) pack(weights, scores);
        pack(inner, score_gradients);
    }
    // dV and dK of half a step.
    template <int PART> DEVICE void ask_sums() {
        const Matrix upstream = matrix(Shared::grad_out_place(grad_out_at.stage) + half_place(PART));
        const Matrix queries = matrix(Shared::query_place(query_at.stage) + half_place(PART));
        begin_products();
        product_nn<BLOCK_DV, HALF, BLOCK_N>(value_sums, weights, upstream);
        product_nn<BLOCK_D, HALF, BLOCK_N>(key_sums, inner, queries);
        commit_products();
    }
    DEVICE void got_sums() {
        wait_products<0>();
        hold(value_sums), hold(key_sums), hold(weights), hold(inner);
    }
    // dS^T to shared memory, swizzled as TMA would have brought it; after the second half all of a step is there.
    template <int PART> DEVICE void leave_gradients() {
        if (PART == 0) shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        const int row = warp * 16 + lane() % 16;
        T* const to = shared.gradients[written_at.stage][index] + row * PANEL;
        UNROLL for (int k = 0; k < HALF / 16; k++)
            store_matrices(to + ((PART * HALF / 8 + 2 * k + lane() / 16) ^ row % 8) * 8, inner[k]);
        if (PART == 0) return;
        show_writes();
        release(shared.gradients_full[written_at.stage]);
        written_at.next();
    }
    DEVICE void leave_nothing() {
        UNROLL for (int k = 0; k < HALF / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) inner[k][r] = 0;
        leave_gradients<0>();
        leave_gradients<1>();
    }
    // This consumer's panel of dQ, and its half of the one in the middle, of the oldest step that was left.
    DEVICE void ask_panel() {
        shared.gradients_full[read_at.stage].wait(read_at.parity);
        ask_query_sums(panel, 2 * index * 64 * PANEL);
    }
    DEVICE void ask_half_panel() { ask_query_sums(half_panel, 64 * PANEL + index * PANEL / 2); }
    template <int COUNT> DEVICE void ask_query_sums(float (&sums)[COUNT], int columns) {
        begin_products();
        product_tn<2 * COUNT, 64, false>(sums, matrix(Shared::gradient_place(read_at.stage, 0)),
                                         matrix(Shared::key_place(0) + Shared::place(columns)));
        product_tn<2 * COUNT, 64, true>(sums, matrix(Shared::gradient_place(read_at.stage, 1)),
                                        matrix(Shared::key_place(1) + Shared::place(columns)));
        commit_products();
    }
    DEVICE void add_panel(int tile) {
        hold(panel);
        if (tile != NONE) add_to_query(panel, tile, 2 * index * (PANEL / 8), index);
    }
    // And is done with the step.
    DEVICE void add_half_panel(int tile) {
        hold(half_panel);
        release(shared.gradients_free[read_at.stage]);
        read_at.next();
        if (tile != NONE) add_to_query(half_panel, tile, PANEL / 8 + index * (PANEL / 16), index);
    }
};
