// The gradients of query, key and value on Hopper, made together, where dK and dV of 64 keys leave one warpgroup registers
// for half a tile of scores: head dimensions of 192 and 128.
//
// It is backward.cu, which says what is computed, with 128 keys to a block and 64 queries to a step, but that S, P, dP and
// dS are made of 32 queries at a time. dQ of a step, whose columns are three panels, is made in two parts too: of a whole
// panel beside the next step's first half, and of half of the one in the middle beside its second half.
//
//   consumer    S00 | dP, P | dS | dV dK | dQ S01 | dP, P | dS | dV dK | dQ S10 | ...
//   another                 S00 | dP, P | dS      | dV dK | dQ S01 | dP, P | dS | ...
//
// The consumers take turns as there, and have its barriers.
#include "hopper/backward/block.cuh"
#include "hopper/backward_halved/consumer.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N == PANEL, "two consumers, and queries that fill a panel");
static_assert(BLOCK_D == 3 * PANEL && BLOCK_DV % PANEL == 0, "a panel of dQ each, and half of one");
static_assert(WARPS == 4 * (1 + CONSUMERS), "warps of whole warpgroups");

KERNEL backward_halved(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                       CONSTANT TensorMap upstream, CONSTANT Arguments a) {
    share_work<Shared, Step>(a, Maps{queries, keys, values, upstream, queries},
                             [&](Shared& shared, int consumer) { Consumer(shared, a, consumer).run(); });
}
