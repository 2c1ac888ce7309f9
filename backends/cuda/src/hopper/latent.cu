// The forward of wide heads on Hopper, above all of latent ones (MLA): values are the first columns of the keys, and
// are read once.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value, for heads of up to
// BLOCK_D columns. A block takes BLOCK_M rows, of the heads that share a key head (latent/rows.cuh), and visits the keys that
// any of them sees, two tiles of 64 at a time: a loader, a warp of the first warpgroup, and two consumers, each with
// the scores of one tile and half of the output's columns. Of 64 rows registers hold no more of 512 columns than that.
//
//   loader      panels of 64 columns of both tiles, as they are free
//   consumer    scores of its own tile | weights | its columns of the values of both
//
// Shared memory: `Shared`. Keys may be split among blocks (SPLIT: rows.cuh), and lie in pages (PAGED), of which a load
// brings PAGE_ROWS. SOFTCAP, ALIBI, SINKS and VARLEN as in forward.cu.
#if BLOCK_M == 16
#include "hopper/latent/turned.cuh"
typedef TurnedConsumer ThisConsumer;
#else
#include "hopper/latent/consumer.cuh"
typedef Consumer ThisConsumer;
#endif

static_assert(BLOCK_N == 64 && WARPS == 12, "keys of a warpgroup, and a loader with two consumers");
static_assert(BLOCK_M == 64 ? STAGES == 2 : BLOCK_M == 16 && STAGES == 3, "a third tile has room beside few rows");
static_assert(BLOCK_D % PANEL == 0 && BLOCK_DV % (2 * PANEL) == 0, "whole panels");

// Up to 504 for a warp of the loader's group and one of either consumer; each is a multiple of 8.
constexpr int LOADER_REGISTERS = SPLIT == EVEN ? 64 : STAGES > 2 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = 248 - LOADER_REGISTERS / 16 * 8;

// By roles; each(use) calls use(rows) for all rows that the block has.
template <class Each>
DEVICE void share_work(Shared& shared, const Arguments& a, const TensorMap& queries, const TensorMap& keys,
                       const TensorMap& values, Each each) {
    const int group = broadcast(thread_index() / 128);  // as the compiler knows to be all lanes'
    Past past;
    if (group == 0) {
        give_registers<LOADER_REGISTERS>();
        if (thread_index() < 32) each([&](const Rows& rows) {
            Loader{a, shared, rows, past, queries, keys, values}.run();
            past.add(rows);
        });
    } else {
        take_registers<CONSUMER_REGISTERS>();
        each([&](const Rows& rows) {
            ThisConsumer own{{shared, a, rows, past, broadcast(thread_index() / 128) - 1}};
            consume(own);
            past.add(rows);
        });
    }
}

KERNEL latent(CONSTANT TensorMap queries, CONSTANT TensorMap keys, CONSTANT TensorMap values, CONSTANT Arguments a) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    if (thread_index() == 0) {
        prefetch(queries), prefetch(keys), prefetch(values);
        init_barriers(shared);
    }
    if (SPLIT == EVEN) {
        shared.begin.find(a, reinterpret_cast<int(&)[2][WARPS]>(shared.beside));
        barrier();
        share_work(shared, a, queries, keys, values, [&](auto use) { each_portion(a, shared.begin, use); });
    } else {
        const Rows rows(a);
        if (VARLEN && rows.count <= 0) return clear_past(rows);
        barrier();
        share_work(shared, a, queries, keys, values, [&](auto use) { use(rows); });
    }
}
