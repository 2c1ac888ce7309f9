// What both warpgroups that compute have: columns of dQ, and a gradient of the block's 64 keys to leave at the end.
#pragma once
#include "hopper/backward/columns.cuh"
#include "hopper/backward/results.cuh"
#include "hopper/backward_wide/loader.cuh"

constexpr int NONE = -1;

template <int INDEX> struct Worker {
    static constexpr int PANELS = BLOCK_D / PANEL, FIRST = INDEX * (PANELS / 2);  // of dQ, and the first of its own
    static constexpr int MINE = INDEX ? PANELS - PANELS / 2 : PANELS / 2;
    static_assert(MINE == 1 || MINE == 2, "one beside other products, and perhaps another");

    Shared& shared;
    const Arguments& a;
    const int warp = broadcast(thread_index() % 128 / 32);  // as the compiler knows to be all lanes'
    u32 origin;  // in units of 16 bytes
    Position<STAGES> query_at;
    Position<UPSTREAM_STAGES> grad_out_at;
    Position<1> weights_at;
    Position<2> gradients_at;
    float query_sums[PANEL / 2];  // a panel of dQ

    DEVICE Worker(Shared& shared, const Arguments& a) : shared(shared), a(a), origin(shared_address(&shared) >> 4) {}

    static DEVICE int lane() { return thread_index() % 32; }
    // What all lanes have read, or written.
    static DEVICE void release(Barrier& barrier) {
        warp_barrier();
        if (lane() == 0) barrier.arrive();
    }
    // Has addresses worked out again, in uniform registers, that were kept from turn to turn in others than there are.
    DEVICE void forget_addresses() { origin = broadcast(origin); }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }

    // Keys, where those past the end of a sequence may be NaN, which a weight of 0 does not take away.
    DEVICE void begin(const Keys& block) {
        shared.key_full.wait(0);
        if (!a.length_bytes || block.extent.end >= block.first + BLOCK_M) return;
        if (INDEX == 0) clear_rows<64, BLOCK_D>(shared.key, larger(block.extent.end - block.first, 0));
        meet_at(1, 128 * WORKERS);
    }

    // -- dQ -----------------------------------------------------------------------------------------------------------

    // Of dQ, that a step adds to.
    DEVICE int tile_of(const Keys& block, const Step& step) const {
        return (block.batch * a.heads + step.head) * (a.padded / BLOCK_N) + step.start / BLOCK_N;
    }
    // Panel n of its own, of dS^T in the tile where `gradients_at` is.
    DEVICE void ask_query_sums(int n) {
        const Matrix gradients = matrix(Shared::gradient_place(gradients_at.stage));
        const Matrix keys = matrix(Shared::key_place() + Shared::place((FIRST + n) * 64 * PANEL));
        begin_products();
        product_tn<PANEL, 64, false>(query_sums, gradients, keys);
        commit_products();
    }
    // Adds it, through shared memory: a thread that added it would have to wait for the L2.
    DEVICE void add_query_sums(int tile, int n) {
        float* const staged = shared.sums[INDEX][warp];
        if (lane() == 0) wait_additions();
        warp_barrier();
        UNROLL for (int c = 0; c < PANEL / 8; c++) {
            const float* const x = query_sums + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(staged + c * QUADS + 4 * lane()),
                         Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
        show_writes();
        warp_barrier();
        if (lane() || !a.grad_query) return;
        add_floats(quads_of(sums_of(a.sums, tile), (FIRST + n) * (PANEL / 8)), staged, PANEL / 8 * QUADS);
        commit_additions();
    }
    // All of its own, where no other product is under way.
    DEVICE void add_all_query_sums(int tile) {
        shared.gradients_full[gradients_at.stage].wait(gradients_at.parity);
        UNROLL for (int n = 0; n < MINE; n++) {
            ask_query_sums(n);
            wait_products<0>();
            hold(query_sums);
            add_query_sums(tile, n);
        }
        if (lane() == 0) wait_additions();
    }
};
