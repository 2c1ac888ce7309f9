// A warpgroup that computes: 64 keys against tiles of queries, half a tile at a time.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; P^T and dS^T in 16 bits, all of half a tile;
// columns of dQ; and, from beginning to end, dK and dV. Turns of the loop end when no product is under way.
//
// dQ is a step behind, by which time the other consumer has left its dS; before the first step is one that adds nothing.
#pragma once
#include "hopper/backward/own_keys.cuh"
#include "hopper/backward/shared.cuh"

constexpr int HALF = BLOCK_N / 2;

struct Consumer : OwnKeys<Shared, Step, Consumer> {
    Position<2> read_at;  // tile of dS, for dQ
    int before = NONE;    // the tile of dQ that the step before adds to
    float scores[HALF / 2], score_gradients[HALF / 2];
    u32 weights[HALF / 16][4], inner[HALF / 16][4];
    float panel[PANEL / 2], half_panel[PANEL / 4];  // of dQ

    DEVICE Consumer(Shared& shared, const Arguments& a, int index) : OwnKeys(shared, a, index) {}

    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        Weigher weigher(a, block, index);
        leave_nothing();
        if (index == CONSUMERS - 1) pass_turn(index);
        ask_scores(scores, step.left(a, block));
        weigher.look(step);
        wait_products<0>();
        for (;;) {
            forget_addresses();
            differentiate<0>(weigher, block, step);
            await_turn(index);
            ask_key_sums<0>();
            leave<0>();
            got_key_sums();
            ask_panel();
            ask_scores(scores, BLOCK_N, HALF);
            pass_turn(index);
            wait_products<1>();
            add_panel(before);
            wait_products<0>();

            forget_addresses();
            differentiate<HALF>(weigher, block, step);
            const int tile = step.tile(a, block);
            step.next();
            await_turn(index);
            ask_key_sums<HALF>();
            leave<HALF>();
            got_key_sums();
            release(shared.query_free[at.stage]);
            release(shared.grad_out_free[at.stage]);
            at.next();
            if (!step.more()) {
                pass_turn(index);
                end(tile);
                return;
            }
            ask_half_panel();
            ask_scores(scores, step.left(a, block));
            pass_turn(index);
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

    // -- parts of a step, of half a tile from query FROM on -------------------------------------------------------

    // P^T and dS^T in 16 bits.
    template <int FROM> DEVICE void differentiate(Weigher& weigher, const Keys& block, const Queries& step) {
        ask_score_gradients(score_gradients, step.left(a, block), FROM);
        weigher.weigh(scores, weights, step, [&](int c) { return number(shared.base[at.stage] + FROM, c); }, FROM);
        wait_products<0>();
        weigher.differentiate(score_gradients, scores, step,
                              [&](int c) { return number(shared.delta[at.stage] + FROM, c); }, FROM);
        if (!SOFTCAP) pack(weights, scores);
        pack(inner, score_gradients);
    }
    // dV and dK.
    template <int FROM> DEVICE void ask_key_sums() {
        const Matrix upstream = matrix(Shared::grad_out_place(at.stage) + Shared::place(FROM * PANEL));
        const Matrix queries = matrix(Shared::query_place(at.stage) + Shared::place(FROM * PANEL));
        begin_products();
        product_nn<BLOCK_DV, HALF, BLOCK_N>(value_sums, weights, upstream);
        product_nn<BLOCK_D, HALF, BLOCK_N>(key_sums, inner, queries);
        commit_products();
    }
    DEVICE void got_key_sums() {
        wait_products<0>();
        hold(value_sums), hold(key_sums), hold(weights), hold(inner);
    }
    // After the second half all of a step is there.
    template <int FROM> DEVICE void leave() {
        if (!FROM) shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        leave_gradients(inner, index, FROM);
        if (!FROM) return;
        show_gradients();
        written_at.next();
    }
    DEVICE void leave_nothing() {
        UNROLL for (int k = 0; k < HALF / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) inner[k][r] = 0;
        leave<0>(), leave<HALF>();
    }
    // This consumer's panel of dQ, and its half of the one in the middle, of the oldest step that was left.
    DEVICE void ask_panel() {
        await_gradients(read_at);
        ask_columns(panel, read_at.stage, 0, Shared::place(2 * index * 64 * PANEL));
    }
    DEVICE void ask_half_panel() {
        ask_columns(half_panel, read_at.stage, 0, Shared::place(64 * PANEL + index * PANEL / 2));
    }
    DEVICE void add_panel(int tile) {
        hold(panel);
        add(tile, panel, 2 * index * PANEL);
    }
    // And is done with the step.
    DEVICE void add_half_panel(int tile) {
        release(shared.gradients_free[read_at.stage]);
        read_at.next();
        hold(half_panel);
        add(tile, half_panel, PANEL + index * PANEL / 2);
    }
    template <int COUNT> DEVICE void add(int tile, const float (&sums)[COUNT], int column) {
        if (tile != NONE && a.grad_query) add_quads(quads_of(sums_of(a.sums, tile), column / 8), sums);
    }
};
