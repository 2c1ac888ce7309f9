// The gradients of query, key and value on Hopper, made together: with P = exp(S - lse) and dS = P (dP - delta),
//
//   S^T = K Q^T,  dP^T = V dO^T,  dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K.
//
// A block keeps BLOCK_M keys of one key head, and maybe other keys after them (own_tiles.cuh), and visits, for each query head that shares it, the tiles of BLOCK_N
// queries that see any of them: a step each. It is a loader, one thread of the first warpgroup, and CONSUMERS warpgroups
// with 64 keys each. dK and dV stay in registers to the end; blocks that split the steps of the same keys leave theirs as
// sums in float32. dQ is added up in global memory by all blocks whose keys its queries see: in which order is left open,
// so that its last bits are not the same every time (backward_ordered.cu repeats them). finish.cu makes gradients of all
// sums.
//
//   loader      K, V | Q0, dO0 | Q1, dO1 | ...                          into rings of STAGES tiles each
//   consumer    S0 dP0 | P0 | dS0 | dV0 dK0 | S1 dP1 | P1 | dS1 | dV1 dQ0 dK1 | S2 dP2 | P2 | dS2 | dV2 dQ1 dK2 | ...
//
// P is computed beside dP, dS is left beside dV, and dQ is added beside dK. Nothing but tiles of dS holds the consumers
// together, so that one's numbers are beside the other's products too. P^T and dS^T are left operands of dV and dK in the
// registers where they are; dS^T goes through shared memory for dQ alone.
//
// BIAS: a float mask is added to scores. A tile of it comes with every tile of queries, or each thread loads what its keys
// have for all queries (biased.cuh).
//
// DROPOUT: dV is of the weights that are kept, times 1 / (1 - p), and so is dP, which is 0 elsewhere (dropout.cuh).
//
// Barriers: `full` and `free` of every stage (barriers.cuh), that of keys included where a block goes on with others, and `written` and `gradients_free` of both tiles of dS.
#include "hopper/backward/block.cuh"
#include "hopper/backward/consumer.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N % PANEL == 0, "two consumers, and queries that fill panels");
static_assert(BLOCK_D == BLOCK_DV && (BLOCK_D == PANEL || BLOCK_D == 2 * PANEL), "as many registers as there are");
static_assert(WARPS == 4 * (1 + CONSUMERS), "warps of whole warpgroups");

#if BIAS == 1  // BIAS_OF_ROWS
KERNEL backward(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                CONSTANT TensorMap upstream, CONSTANT TensorMap biases, CONSTANT Arguments a) {
#else
KERNEL backward(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                CONSTANT TensorMap upstream, CONSTANT Arguments a) {
    const TensorMap& biases = queries;  // of which there are none
#endif
    share_work<Shared, Step>(a, Maps{queries, keys, values, upstream, biases},
                             [&](Shared& shared, int consumer) { Consumer(shared, a, consumer).run(); });
}
