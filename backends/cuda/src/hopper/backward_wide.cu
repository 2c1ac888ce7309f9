// The gradients of query, key and value on Hopper, made together, for head dimensions of which one warpgroup's registers
// hold dV or dK, but not both: what backward.cu computes, with the work divided otherwise.
//
// A block keeps 64 keys of one key head and visits the tiles of 64 queries that see any of them, as steps.cuh has it. It
// is a loader, one thread of the first warpgroup, and two warpgroups that compute, one with dV, the other with dK:
//
//   of values   S0 | P0 |     dV0, S1 | dQ0 | dQ0, P1 |     dV1, S2 | dQ1 | dQ1, P2 | ...
//                     P0 \                /         P1 \                /
//   of keys     dP0       | dS0 | dK0, dQ0, dP1 | dQ0   | dS1 | dK1, dQ1, dP2 | dQ1 | ...
//
// P^T is a left operand of dV in the registers where it is, and dS^T one of dK; P^T goes through shared memory in float32
// for dS^T, and dS^T in 16 bits for dQ, whose columns are shared out among both. dQ is added up in global memory as
// backward.cu has it, between the same prepare.cu and finish.cu.
//
// Barriers: `full` and `free` of every stage (barriers.cuh), and of each warp's part of P; `written` and `gradients_free`
// of both tiles of dS.
#include "hopper/backward/block.cuh"
#include "hopper/backward_wide/of_keys.cuh"
#include "hopper/backward_wide/of_values.cuh"

static_assert(BLOCK_M == 64 && BLOCK_N == PANEL, "keys of one product, and queries that fill a panel");
static_assert(BLOCK_D % PANEL == 0 && BLOCK_DV % PANEL == 0, "whole panels");
static_assert(WARPS == 4 * (1 + ROLES), "warps of whole warpgroups");

KERNEL backward_wide(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                     CONSTANT TensorMap upstream, CONSTANT Arguments a) {
    share_work<Shared, Step>(a, Maps{queries, keys, values, upstream, queries}, [&](Shared& shared, int role) {
        if (role == 0) OfValues(shared, a).run();
        else OfKeys(shared, a).run();
    });
}
