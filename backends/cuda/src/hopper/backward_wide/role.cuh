// What both warpgroups of a block of 64 keys have: dV or dK, from beginning to end, panels of dQ, and a place to add them
// from.
#pragma once
#include "hopper/backward/worker.cuh"
#include "hopper/backward_wide/shared.cuh"

// `Warpgroup`, which is one of these, visits the steps: with dV if INDEX is 0, else with dK.
template <int INDEX, class Warpgroup> struct Role : Worker<Shared> {
    static constexpr int MINE = BLOCK_D / PANEL / ROLES, FIRST = INDEX * MINE;  // panels of dQ of its own
    static_assert(MINE == 2, "one beside other products, and another");

    const int warp = broadcast(thread_index() % 128 / 32);  // as the compiler knows to be all lanes'
    Position<UPSTREAM_STAGES> upstream_at;
    Position<1> weights_at;
    float query_sums[PANEL / 2];
    float sums[(INDEX == 0 ? BLOCK_DV : BLOCK_D) / 2];

    DEVICE Role(Shared& shared, const Arguments& a) : Worker(shared, a, INDEX) {}

    DEVICE void run() {
        const Keys block(a, block_index());
        Step step(a, block);
        UNROLL for (float& sum : sums) sum = 0;
        if (step.more()) static_cast<Warpgroup*>(this)->visit(block, step);
        if (a.splits == 1) tell_done(0);
        store_gradient(a, block, block.first, sums, INDEX == 0 ? OF_VALUE : OF_KEY);
        if (a.splits > 1) tell_done(0);
    }

    // Panel n of its own, of dS^T in the tile where `written_at` is.
    DEVICE void ask_query_sums(int n) {
        ask_columns(query_sums, written_at.stage, 0, Shared::place((FIRST + n) * 64 * PANEL));
    }
    // Through shared memory, so that the thread need not wait for the L2.
    DEVICE void add_query_sums(int tile, int n) {
        float* const staged = shared.sums[INDEX][warp];
        const bool first = thread_index() % 32 == 0;
        if (first) wait_additions();
        warp_barrier();
        leave_quads(staged, query_sums);
        show_writes();
        warp_barrier();
        if (!first || !a.grad_query) return;
        add_floats(quads_of(sums_of(a.sums, tile), (FIRST + n) * (PANEL / 8)), staged, PANEL / 8 * QUADS);
        commit_additions();
    }
    // All of its own, where no other product is under way.
    DEVICE void add_all_query_sums(int tile) {
        await_gradients(written_at);
        UNROLL for (int n = 0; n < MINE; n++) {
            ask_query_sums(n);
            wait_products<0>();
            hold(query_sums);
            add_query_sums(tile, n);
        }
        if (thread_index() % 32 == 0) finish_additions();
        warp_barrier();
    }
};
