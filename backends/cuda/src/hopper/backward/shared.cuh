// Shared memory of the backward.
#pragma once
#include "hopper/backward/loader.cuh"

struct Shared : Places {
    alignas(1024) T key[CONSUMERS][64 * BLOCK_D];
    alignas(1024) T value[CONSUMERS][64 * BLOCK_DV];
    alignas(1024) T query[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T grad_out[STAGES][BLOCK_N * BLOCK_DV];
    alignas(1024) T gradients[2][CONSUMERS][64 * BLOCK_N];  // dS^T: a row for each key
    alignas(16) float base[STAGES][BLOCK_N];
    alignas(16) float delta[STAGES][BLOCK_N];
    Barrier key_full, value_full;
    Barrier query_full[STAGES], query_free[STAGES], grad_out_full[STAGES], grad_out_free[STAGES];
    Barrier written[2], gradients_free[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    init_loaded(shared);
    UNROLL for (Barrier& free : shared.gradients_free) free.init(4 * CONSUMERS);
    publish_barriers();
}
