// backward.cu, which says what is computed, where dQ is to be the same to the last bit every time: blocks add to it in
// turn, in the order of their keys.
//
// dQ goes through shared memory to two more threads of the first warpgroup, which wait for the block's turn and add
// (adder.cuh). A step takes 64 queries, so that there is room for two tiles of dQ.
//
//   loader      K, V | Q0, dO0 | Q1, dO1 | ...                          into rings of STAGES tiles each
//   consumer    S0 | weights | dP0, dV0 | dS0 | S1, dK0 | dQ0 | weights | dP1, dV1 | dS1 | S2, dK1 | dQ1 | weights | ...
//   adders                                                              dQ0                              dQ1
//
// So a warpgroup has products under way while it computes weights and dS, and asks for dQ when the other one has had time
// to leave its dS.
//
// Barriers: `full` and `free` of every stage (barriers.cuh); `written` of each tile of dS, for which no `free` is needed:
// consumer.cuh says why; and `taken` of each tile of dQ, when it was added.
#include "hopper/backward/block.cuh"
#include "hopper/backward_ordered/adder.cuh"
#include "hopper/backward_ordered/consumer.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N == PANEL, "two consumers, and queries that fill a panel");
static_assert(BLOCK_D == BLOCK_DV && (BLOCK_D == PANEL || BLOCK_D == 2 * PANEL), "as many registers as there are");
static_assert(WARPS == 4 * (1 + CONSUMERS), "warps of whole warpgroups");

KERNEL backward_ordered(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                        CONSTANT TensorMap upstream, CONSTANT Arguments a) {
    share_work<Shared, OrderedStep>(
        a, Maps{queries, keys, values, upstream, queries},
        [&](Shared& shared, int consumer) { Consumer(shared, a, consumer).run(); },
        [&](Shared& shared) {
            const int adder = thread_index() / 32 - 1;  // of warps that have nothing else to do
            if (thread_index() % 32 == 0 && 0 <= adder && adder < ADDERS) Adder{a, shared, adder}.run();
        });
}
