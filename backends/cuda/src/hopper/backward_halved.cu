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
#include "hopper/backward_halved/consumer.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N == PANEL, "two consumers, and queries that fill a panel");
static_assert(BLOCK_D == 3 * PANEL && BLOCK_DV % PANEL == 0, "a panel of dQ each, and half of one");
static_assert(WARPS == 4 * (1 + CONSUMERS), "warps of whole warpgroups");

constexpr int LOADER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(LOADER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65536 / 128, "registers for all");

KERNEL backward_halved(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values,
                       CONSTANT TensorMap upstream, CONSTANT Arguments a) {
    let_next_begin();
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    if (thread_index() == 0) {
        prefetch(queries), prefetch(keys), prefetch(values), prefetch(upstream);
        init_barriers(shared);
    }
    barrier();
    const int group = broadcast(thread_index() / 128);  // as the compiler knows to be all lanes'
    if (group == 0) {
        give_registers<LOADER_REGISTERS>();
        if (thread_index() == 0) Loader<Shared, Step>{a, shared, queries, keys, values, upstream}.run();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer(shared, a, group - 1).run();
    }
}
