// Shared memory of the backward whose warpgroups have dV and dK of the same keys.
#pragma once
#include "hopper/backward/loader.cuh"
#include "hopper/backward/sums.cuh"

constexpr int ROLES = 2;  // warpgroups that compute

struct Shared : Places {
    alignas(1024) T key[KEY_STAGES][CONSUMERS][64 * BLOCK_D];
    alignas(1024) T value[KEY_STAGES][CONSUMERS][64 * BLOCK_DV];
    alignas(1024) T query[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T grad_out[UPSTREAM_STAGES][BLOCK_N * BLOCK_DV];
    alignas(1024) T gradients[2][CONSUMERS][64 * BLOCK_N];  // dS^T: a row for each key
    alignas(128) float weights[4][16 * BLOCK_N];            // P^T of each warp, as its lanes hold it
    alignas(128) float sums[ROLES][4][16 * PANEL];          // a panel of dQ, of each warp, on its way
    alignas(16) float base[STAGES][BLOCK_N];
    alignas(16) float delta[UPSTREAM_STAGES][BLOCK_N];
    Barrier key_full[KEY_STAGES], value_full[KEY_STAGES], keys_free[KEY_STAGES];
    Barrier query_full[STAGES], query_free[STAGES], grad_out_full[UPSTREAM_STAGES], grad_out_free[UPSTREAM_STAGES];
    Barrier written[2], gradients_free[2];
    Barrier weights_full[4], weights_free[4];  // of a warp each, where every lane arrives: it reads what the same lane left
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    init_loaded(shared);
    UNROLL for (Barrier& free : shared.gradients_free) free.init(4);
    UNROLL for (int w = 0; w < 4; w++) shared.weights_full[w].init(32), shared.weights_free[w].init(32);
    publish_barriers();
}
