// Shared memory of the backward.
#pragma once
#include "hopper/backward/loader.cuh"
#include "hopper/bias.cuh"

struct Shared : Places {
    alignas(1024) T key[KEY_STAGES][CONSUMERS][64 * BLOCK_D];
    alignas(1024) T value[KEY_STAGES][CONSUMERS][64 * BLOCK_DV];
    alignas(1024) T query[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T grad_out[STAGES][BLOCK_N * BLOCK_DV];
    alignas(1024) T gradients[2][CONSUMERS][64 * BLOCK_N];  // dS^T: a row for each key
#if BIAS == 1  // BIAS_OF_ROWS
    alignas(1024) T bias[STAGES][CONSUMERS][64 * BLOCK_N];  // comes and goes with the queries
#endif
#if BIAS
    alignas(16) float rest[STAGES][BLOCK_N];
#endif
    alignas(16) float base[STAGES][BLOCK_N];
    alignas(16) float delta[STAGES][BLOCK_N];
    Barrier key_full[KEY_STAGES], value_full[KEY_STAGES], keys_free[KEY_STAGES];
    Barrier query_full[STAGES], query_free[STAGES], grad_out_full[STAGES], grad_out_free[STAGES];
    Barrier written[2], gradients_free[2];

    // A consumer's panel of a float mask, and what lse lacks; null where there is none.
    DEVICE T* bias_of(int stage, int consumer) {
#if BIAS == 1
        return bias[stage][consumer];
#else
        return nullptr;
#endif
    }
    DEVICE float* rest_of(int stage) {
#if BIAS
        return rest[stage];
#else
        return nullptr;
#endif
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    init_loaded(shared);
    UNROLL for (Barrier& free : shared.gradients_free) free.init(4 * CONSUMERS);
    publish_barriers();
}
