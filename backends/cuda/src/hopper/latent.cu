// The forward of wide heads on Hopper, above all of latent ones (MLA): values are the first columns of the keys, and
// are read once.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value, for heads of up to
// BLOCK_D columns. A block takes 64 rows, of the heads that share a key head (latent/rows.cuh), and visits the keys that
// any of them sees, two tiles of 64 at a time: a loader, a warp of the first warpgroup, and two consumers, each with
// the scores of one tile and half of the output's columns. Registers hold no more of 512 columns than that.
//
//   loader      panels of 64 columns of both tiles, as they are free
//   consumer    scores of its own tile | weights | its columns of the values of both
//
// Shared memory: `Shared`. Keys may be split among blocks (SPLIT), and lie in pages (PAGED), of which a load brings
// PAGE_ROWS. SOFTCAP, ALIBI, SINKS and VARLEN as in forward.cu.
#include "hopper/latent/consumer.cuh"

static_assert(BLOCK_M == 64 && BLOCK_N == 64 && WARPS == 12, "rows of a warpgroup, twice");
static_assert(BLOCK_D % PANEL == 0 && BLOCK_DV % (2 * PANEL) == 0, "whole panels");

constexpr int LOADER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

KERNEL latent(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values, CONSTANT Arguments a) {
    const Rows rows(a);
    if (VARLEN && rows.count <= 0) return clear_past(rows);
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    if (thread_index() == 0) {
        prefetch(queries), prefetch(keys), prefetch(values);
        init_barriers(shared);
    }
    barrier();
    const int group = broadcast(thread_index() / 128);  // as the compiler knows to be all lanes'
    if (group == 0) {
        give_registers<LOADER_REGISTERS>();
        if (thread_index() < 32) Loader{a, shared, rows, queries, keys, values}.run();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer{shared, a, rows, group - 1}.run();
    }
}
