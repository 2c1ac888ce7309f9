// What every warpgroup that computes has: its place in the rings, and a way to add to dQ.
#pragma once
#include "hopper/backward/results.cuh"
#include "hopper/backward/weights.cuh"
#include "hopper/backward_wide/loader.cuh"

constexpr int NONE = -1;

struct Worker {
    Shared& shared;
    const Arguments& a;
    const int warp = broadcast(thread_index() % 128 / 32);  // as the compiler knows to be all lanes'
    u32 origin;                                             // in units of 16 bytes
    Position<STAGES> query_at;
    Position<UPSTREAM_STAGES> grad_out_at;

    DEVICE Worker(Shared& shared, const Arguments& a) : shared(shared), a(a), origin(shared_address(&shared) >> 4) {}

    static DEVICE int lane() { return thread_index() % 32; }
    // What all lanes have read, or written.
    static DEVICE void release(Barrier& barrier) {
        warp_barrier();
        if (lane() == 0) barrier.arrive();
    }
    // Has addresses worked out again that would be kept from turn to turn in more registers than there are.
    DEVICE void forget_addresses() { origin = broadcast(origin); }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }

    // Keys, where those past the end of a sequence may be NaN, which a weight of 0 does not take away: of tile `index`,
    // which this warpgroup clears if it is there.
    DEVICE void begin(const Keys& block, int index) {
        shared.key_full.wait(0);
        shared.value_full.wait(0);
        if (!a.length_bytes || block.extent.end >= block.first + BLOCK_M) return;
        const int there = smaller(larger(block.extent.end - block.first - 64 * index, 0), 64);
        if (index < CONSUMERS) clear_rows<64, BLOCK_D>(shared.key[index], there);
        meet_at(1 + WORKERS, 128 * WORKERS);
    }
    // Of dQ, that a step adds to.
    DEVICE int tile_of(const Keys& block, const Step& step) const {
        return (block.batch * a.heads + step.head) * (a.padded / BLOCK_N) + step.start / BLOCK_N;
    }
    // Adds columns of dQ from 8 `first` on: from registers, or, of worker `index`, through shared memory, where the thread
    // need not wait for the L2.
    template <int COUNT> DEVICE void add_to_query(const float (&sums)[COUNT], int tile, int first, int index) {
        float* const to = quads_of(sums_of(a.sums, tile), first);
        if (DIRECT) {
            if (!a.grad_query) return;
            UNROLL for (int c = 0; c < COUNT / 4; c++) add_quad(to + c * QUADS + 4 * lane(), sums + 4 * c);
            return;
        }
        float* const staged = shared.sums[index][warp];
        if (lane() == 0) wait_additions();
        warp_barrier();
        UNROLL for (int c = 0; c < COUNT / 4; c++) {
            const float* const x = sums + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(staged + c * QUADS + 4 * lane()),
                         Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
        show_writes();
        warp_barrier();
        if (lane() || !a.grad_query) return;
        add_floats(to, staged, COUNT / 4 * QUADS);
        commit_additions();
    }
    // Before the end: shared memory is read for what is being added.
    static DEVICE void end_additions() {
        if (!DIRECT && lane() == 0) wait_additions();
    }
};
