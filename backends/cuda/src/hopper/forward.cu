// The forward on Hopper: online softmax over tiles of keys, brought by TMA and multiplied by wgmma.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value, scores being q . k times
// a factor, a softcap of that, and a float mask. A block is a loader and a dealer, two threads of the first warpgroup,
// and CONSUMERS warpgroups with 64 rows of queries each. The tiles of keys go by from the last to the first: those on the diagonal come first.
//
//   dealer      query | waits for the last tiles of keys | the next rows, query | ...
//   loader      key 0, key 1, value 0, key 2, value 1, ...                 into rings of STAGES tiles each
//   consumer    S0 | softmax | S1, P0 V0 | softmax | S2, P1 V1 | softmax | ...    products beside softmax of others
//
// Shared memory: `Shared`. Barriers: `full` and `free` of every tile (barriers.cuh); a consumer frees keys once its
// scores are there, the query before the last values, values once they are added; it does so warp by warp, since
// nothing else says that the other warps of the product are done.
//
// CONTINUED says that the first scores of a tile of rows come beside the last values of the one before. MASKED: the
// loader leaves out the tiles that a mask hides from all rows of the block, and says of each other one which consumers
// need the mask's bits (mask.cuh). SOFTCAP: scores go through a tanh. BIAS: a float mask is added to them, a tile of which
// comes with every tile of keys (bias.cuh). DROPOUT: weights of some keys become 0 once they are summed. ALIBI: scores
// fall with the distance (slopes.cuh). SINKS: every row has one more key, which joins it at the end (sinks.cuh). VARLEN:
// operands hold sequences one after another, of which TMA brings rows of the next one too.
#include "hopper/forward/consumer.cuh"

static_assert(BLOCK_M % 64 == 0 && BLOCK_D % 32 == 0 && BLOCK_DV % 32 == 0, "whole products, and rows to store");
static_assert(WARPS == 4 * (1 + CONSUMERS), "warps of whole warpgroups");
static_assert(!VARLEN || (!MASKED && !BIAS), "masks are of batch entries");
static_assert(!ALIBI || !BIAS, "scores have one unit");

// Of a thread, once the first warpgroup has handed on what it does not need: no more than all have at the start, or it
// waits for ever.
constexpr int ENTRY_REGISTERS = 65536 / (32 * WARPS) / 8 * 8;
// To look up tiles takes more.
constexpr int LOADER_REGISTERS = CONSUMERS == 2 ? MASKED ? 56 : 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? MASKED ? 224 : 232 : 160;
static_assert(LOADER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * ENTRY_REGISTERS,
              "registers for all");

#if BIAS
KERNEL forward(CONSTANT TensorMap queries, CONSTANT TensorMap keys,
               CONSTANT TensorMap values, CONSTANT TensorMap biases, CONSTANT Arguments a) {
#else
KERNEL forward(CONSTANT TensorMap queries, CONSTANT TensorMap keys,
               CONSTANT TensorMap values, CONSTANT Arguments a) {
    const TensorMap& biases = keys;  // of which there are none
#endif
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    if (thread_index() == 0) {
        prefetch(queries), prefetch(keys), prefetch(values);
        init_barriers(shared);
    }
    barrier();
    const int group = broadcast(thread_index() / 128);  // as the compiler knows to be all lanes'
    if (group == 0) {
        give_registers<LOADER_REGISTERS>();
        if (thread_index() == 0) Loader{a, shared, keys, values, biases}.run();
        if (thread_index() == 32) Dealer{a, shared, queries}.run();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer{shared, a, group - 1}.run();
    }
}
