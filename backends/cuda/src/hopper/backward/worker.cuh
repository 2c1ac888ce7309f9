// What warpgroups of every backward have in common that compute: keys against tiles of queries, as the loader brings them.
//
// Invariants: left operands in registers are written when no product is under way. Every tile of the block is waited for
// and freed, also one that these keys are not seen by.
#pragma once
#include "hopper/backward/loader.cuh"
#include "hopper/backward/results.cuh"
#include "hopper/backward/weigher.cuh"

constexpr int NONE = -1;

template <class Shared> struct Worker {
    Shared& shared;
    const Arguments& a;
    const int index;
    u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Position<STAGES> at;
    Position<2> written_at;  // tile of dS
    Position<KEY_STAGES> keys_at;

    DEVICE Worker(Shared& shared, const Arguments& a, int index) : shared(shared), a(a), index(index) {}

    static DEVICE void release(Barrier& barrier) {
        if (thread_index() % 32 == 0) barrier.arrive();
    }
    // What lanes have read or written, where no product has had them meet since.
    static DEVICE void release_together(Barrier& barrier) {
        warp_barrier();
        release(barrier);
    }
    DEVICE void await_keys() {
        shared.key_full[keys_at.stage].wait(keys_at.parity);
        shared.value_full[keys_at.stage].wait(keys_at.parity);
    }
    // Keys and values, where those past the end of a sequence may be NaN, which a weight of 0 does not take away.
    DEVICE void begin(const Keys& block) {
        await_keys();
        if (!(VARLEN || a.length_bytes) || block.extent.end >= block.first + BLOCK_M) return;
        if (index < CONSUMERS) {
            const int there = smaller(larger(block.extent.end - block.first - 64 * index, 0), 64);
            clear_rows<64, BLOCK_D>(shared.key[keys_at.stage][index], there);
            clear_rows<64, BLOCK_DV>(shared.value[keys_at.stage][index], there);
        }
        meet_at(1, 32 * COMPUTING);  // before the first turn, which takes the same barrier
    }
    // Waits for queries, or their upstream gradients, of which `left` are the sequence's. With VARLEN those that follow are
    // the next sequence's, and may be NaN as well.
    template <int WIDTH> DEVICE void await_rows(Barrier& full, u32 parity, T* tile, int left) {
        full.wait(parity);
        if (!VARLEN || left >= BLOCK_N) return;
        clear_rows<BLOCK_N, WIDTH>(tile, left);
        meet(index);
    }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }
    // Has addresses worked out again that would be kept from turn to turn in more registers than there are.
    DEVICE void forget_addresses() { origin = broadcast(origin); }

    // S^T of a tile of queries, of which `left` are the sequence's, or of those from `from` on, where the tile is there
    // already; and dP^T.
    template <int COUNT> DEVICE void ask_scores(float (&scores)[COUNT], int left, int from = 0) {
        const Matrix queries = matrix(Shared::query_place(at.stage) + Shared::place(from * PANEL));
        if (!from) await_rows<BLOCK_D>(shared.query_full[at.stage], at.parity, shared.query[at.stage], left);
        begin_products();
        product_nt<2 * COUNT, BLOCK_D, BLOCK_N>(scores, matrix(Shared::key_place(keys_at.stage, index)), queries);
        commit_products();
    }
    template <int COUNT> DEVICE void ask_score_gradients(float (&gradients)[COUNT], int left, int from = 0) {
        const Matrix upstream = matrix(Shared::grad_out_place(at.stage) + Shared::place(from * PANEL));
        if (!from) await_rows<BLOCK_DV>(shared.grad_out_full[at.stage], at.parity, shared.grad_out[at.stage], left);
        begin_products();
        product_nt<2 * COUNT, BLOCK_DV, BLOCK_N>(gradients, matrix(Shared::value_place(keys_at.stage, index)), upstream);
        commit_products();
    }
    DEVICE void await_gradients(Position<2> tile) { shared.written[tile.stage].wait(tile.parity); }
    // Columns of dQ of 64 queries, of dS^T of all keys in a tile, where these queries begin `queries` on, and of keys,
    // where the columns begin `columns` on.
    template <int COUNT> DEVICE void ask_columns(float (&sums)[COUNT], int tile, u32 queries, u32 columns) {
        const auto gradients = [&](int c) { return matrix(Shared::gradient_place(tile, c) + queries); };
        const auto keys = [&](int c) { return matrix(Shared::key_place(keys_at.stage, c) + columns); };
        begin_products();
        product_tn<2 * COUNT, 64, false>(sums, gradients(0), keys(0));
        if (CONSUMERS > 1) product_tn<2 * COUNT, 64, true>(sums, gradients(1), keys(1));
        commit_products();
    }
    // dS^T to shared memory: of the keys of consumer `tile`, against queries from `from` on.
    template <int COUNT> DEVICE void leave_gradients(const u32 (&packed)[COUNT][4], int tile, int from = 0) {
        store_packed(shared.gradients[written_at.stage][tile], packed, from);
    }
    DEVICE void show_gradients() {
        show_writes();
        release_together(shared.written[written_at.stage]);
    }
};
