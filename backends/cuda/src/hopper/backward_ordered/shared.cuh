// Shared memory of the backward that adds to dQ in turn.
#pragma once
#include "hopper/backward/loader.cuh"

constexpr int MINE = BLOCK_D / CONSUMERS;  // columns of dQ that a consumer has
constexpr int ADDERS = 2;                  // threads that add dQ, and tiles of it on their way

struct Shared : Places {
    alignas(1024) T key[KEY_STAGES][CONSUMERS][64 * BLOCK_D];
    alignas(1024) T value[KEY_STAGES][CONSUMERS][64 * BLOCK_DV];
    alignas(1024) T query[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T grad_out[STAGES][BLOCK_N * BLOCK_DV];
    alignas(1024) T gradients[2][CONSUMERS][64 * BLOCK_N];  // dS^T: a row for each key
    alignas(128) float sums[ADDERS][CONSUMERS][4][16 * MINE];  // dQ, of each warp, on its way
    alignas(16) float base[STAGES][BLOCK_N];
    alignas(16) float delta[STAGES][BLOCK_N];
    Barrier key_full[KEY_STAGES], value_full[KEY_STAGES], keys_free[KEY_STAGES];
    Barrier query_full[STAGES], query_free[STAGES], grad_out_full[STAGES], grad_out_free[STAGES];
    Barrier written[2];
    Barrier taken[ADDERS];  // sums, by who adds them
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    init_loaded(shared);
    UNROLL for (Barrier& taken : shared.taken) taken.init(1);
    publish_barriers();
}
