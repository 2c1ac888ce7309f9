// Shared memory of the backward of wide heads, and who brings the tiles there: for both kernels, that of 64 keys, where P
// goes from one warpgroup to the other, and that of 128, 64 to each.
#pragma once
#include "hopper/backward/steps.cuh"
#include "hopper/backward/sums.cuh"

constexpr int WORKERS = 2;                                               // warpgroups that compute
constexpr int UPSTREAM_STAGES = BLOCK_DV > 128 && !DIRECT ? 1 : STAGES;  // of dO, as there is room
constexpr bool SHARE_KEYS = CONSUMERS == 1;

struct Shared {
    alignas(1024) T key[CONSUMERS][64 * BLOCK_D];
    alignas(1024) T value[CONSUMERS][64 * BLOCK_DV];
    alignas(1024) T query[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T grad_out[UPSTREAM_STAGES][BLOCK_N * BLOCK_DV];
    alignas(1024) T gradients[2][CONSUMERS][64 * BLOCK_N];                     // dS^T: a row for each key
    alignas(128) float weights[4][SHARE_KEYS ? 16 * BLOCK_N : 4];              // P^T of each warp, as its lanes hold it
    alignas(128) float sums[WORKERS][4][DIRECT || !SHARE_KEYS ? 4 : 16 * PANEL];  // a panel of dQ, on its way
    alignas(16) float base[STAGES][BLOCK_N];
    alignas(16) float delta[UPSTREAM_STAGES][BLOCK_N];
    Barrier key_full, value_full;
    Barrier query_full[STAGES], query_free[STAGES], grad_out_full[UPSTREAM_STAGES], grad_out_free[UPSTREAM_STAGES];
    Barrier weights_full[4], weights_free[4];  // of a warp each
    Barrier gradients_full[2], gradients_free[2];

    // Where its tiles begin, in units of 16 bytes from its own beginning.
    static DEVICE constexpr u32 place(int elements) { return elements * sizeof(T) / 16; }
    static DEVICE u32 key_place(int tile) { return place(tile * 64 * BLOCK_D); }
    static DEVICE u32 value_place(int tile) { return place(BLOCK_M * BLOCK_D + tile * 64 * BLOCK_DV); }
    static DEVICE u32 query_place(int stage) { return place(BLOCK_M * (BLOCK_D + BLOCK_DV) + stage * BLOCK_N * BLOCK_D); }
    static DEVICE u32 grad_out_place(int stage) { return query_place(STAGES) + place(stage * BLOCK_N * BLOCK_DV); }
    static DEVICE u32 gradient_place(int stage, int tile) {
        return grad_out_place(UPSTREAM_STAGES) + place((stage * CONSUMERS + tile) * 64 * BLOCK_N);
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    const auto init = [](Barrier& full, int writers, Barrier& free, int readers) {
        full.init(writers), free.init(readers);
    };
    shared.key_full.init(1), shared.value_full.init(1);
    UNROLL for (int s = 0; s < STAGES; s++) init(shared.query_full[s], 1, shared.query_free[s], 4 * WORKERS);
    UNROLL for (int s = 0; s < UPSTREAM_STAGES; s++)
        init(shared.grad_out_full[s], 1, shared.grad_out_free[s], 4 * WORKERS);
    UNROLL for (int w = 0; w < 4; w++) init(shared.weights_full[w], 1, shared.weights_free[w], 1);
    UNROLL for (int n = 0; n < 2; n++)
        init(shared.gradients_full[n], 4 * CONSUMERS, shared.gradients_free[n], SHARE_KEYS ? 4 : 4 * WORKERS);
    publish_barriers();
}

struct Loader {
    const Arguments& a;
    Shared& shared;
    const TensorMap &queries, &keys, &values, &upstream;
    Position<STAGES> query_at;
    Position<UPSTREAM_STAGES> grad_out_at;

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        if (step.more()) {
            rows<BLOCK_D>(shared.key, keys, shared.key_full, block);
            rows<BLOCK_DV>(shared.value, values, shared.value_full, block);
        }
        await_launch_before();  // base and delta; and so that the next launch, which waits for this one, has the sums
        for (; step.more(); step.next()) {
            const int q = query_at.stage, g = grad_out_at.stage;
            const i64 line = (i64(block.batch) * a.heads + step.head) * a.padded + step.start;
            shared.query_free[q].wait(query_at.parity ^ 1);
            tile<BLOCK_D>(shared.query[q], queries, shared.base[q], static_cast<float*>(a.base) + line,
                          shared.query_full[q], step, block.batch);
            shared.grad_out_free[g].wait(grad_out_at.parity ^ 1);
            tile<BLOCK_DV>(shared.grad_out[g], upstream, shared.delta[g], static_cast<float*>(a.delta) + line,
                           shared.grad_out_full[g], step, block.batch);
            query_at.next(), grad_out_at.next();
        }
    }
    // The block's own rows of keys, or of values.
    template <int WIDTH>
    DEVICE void rows(T (&to)[CONSUMERS][64 * WIDTH], const TensorMap& map, Barrier& full, const Keys& block) {
        full.expect(BLOCK_M * WIDTH * sizeof(T));
        UNROLL for (int c = 0; c < CONSUMERS; c++)
            copy_tile<64, WIDTH>(to[c], map, full, block.first + 64 * c, block.head_kv, block.batch);
    }
    // Rows of queries, or of their upstream gradients, with a number for each.
    template <int WIDTH>
    DEVICE void tile(T* to, const TensorMap& map, float* numbers, const float* from, Barrier& full, const Step& step,
                     int batch) {
        full.expect(BLOCK_N * (WIDTH * sizeof(T) + sizeof(float)));
        copy_tile<BLOCK_N, WIDTH>(to, map, full, step.start, step.head, batch);
        copy_bytes(numbers, from, BLOCK_N * sizeof(float), &full.state);
    }
};
