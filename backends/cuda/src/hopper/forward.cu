// The forward on Hopper: online softmax over tiles of keys, brought by TMA and multiplied by wgmma.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value, scores being q . k times
// a positive factor. A block is a producer, one thread of the first warpgroup, and CONSUMERS warpgroups with 64 rows of
// queries each. The tiles of keys go by from the last to the first, so that those on the diagonal come first.
//
//   producer    key 0, query, key 1, value 0, key 2, value 1, ...          into rings of STAGES tiles each
//   consumer    S0 | softmax | S1, P0 V0 | softmax beside P0 V0 | S2, P1 V1 | softmax beside P1 V1 | ...
//
// Shared memory: `Shared`. Barriers: `full` and `free` of every tile (barriers.cuh); a consumer frees keys once its
// scores are there, the query once its last scores are, values once they are added; it does so warp by warp, since
// nothing else says that the other warps of the product are done.
//
// Flags: SPECIALISED, a warpgroup of its own for the loads (else thread 0 asks for a tile when its stage is free);
// OVERLAP, softmax beside the product with the values before; PINGPONG, consumers take turns; SCHEDULE, scheduler.cuh.
//
// Invariants: weights, the left operand in registers, are rewritten when no product is under way. Every consumer waits
// for and frees every tile, also one that its rows do not see, and takes a turn at each.
#include "hopper/scheduler.cuh"
#include "hopper/store.cuh"

static_assert(BLOCK_M % 64 == 0 && BLOCK_D % PANEL == 0 && BLOCK_DV % PANEL == 0, "whole products and panels");
static_assert(WARPS == 4 * (CONSUMERS + SPECIALISED), "warps of whole warpgroups");
static_assert(SPECIALISED || SCHEDULE == 0, "without a producer nobody loads ahead");

struct Shared {
    alignas(1024) T query[CONSUMERS][64 * BLOCK_D];
    alignas(1024) T key[STAGES][BLOCK_N * BLOCK_D];
    alignas(1024) T value[STAGES][BLOCK_N * BLOCK_DV];
    Barrier query_full[CONSUMERS], query_free[CONSUMERS];
    Barrier key_full[STAGES], key_free[STAGES], value_full[STAGES], value_free[STAGES];
    Ticket ticket;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    UNROLL for (int c = 0; c < CONSUMERS; c++) shared.query_full[c].init(1), shared.query_free[c].init(4);
    UNROLL for (int s = 0; s < STAGES; s++) {
        shared.key_full[s].init(1), shared.key_free[s].init(4 * CONSUMERS);
        shared.value_full[s].init(1), shared.value_free[s].init(4 * CONSUMERS);
    }
    shared.ticket.full.init(1), shared.ticket.free.init(4 * CONSUMERS);
    publish_barriers();
}

// -- producer ---------------------------------------------------------------------------------------------------------

struct Loader {
    Shared& shared;
    const TensorMap &queries, &keys, &values;
    Position<1> query_at;
    Position<STAGES> key_at, value_at;

    DEVICE void query(const Work& work) {
        UNROLL for (int c = 0; c < CONSUMERS; c++) {
            shared.query_free[c].wait(query_at.parity ^ 1);
            load_tile<64, BLOCK_D>(shared.query[c], queries, shared.query_full[c], work.first + 64 * c, work.head,
                                   work.batch);
        }
        query_at.next();
    }
    // Tile i of those that the rows see, counted from the last.
    DEVICE void key(const Work& work, int i) {
        const int s = key_at.stage;
        shared.key_free[s].wait(key_at.parity ^ 1);
        load_tile<BLOCK_N, BLOCK_D>(shared.key[s], keys, shared.key_full[s], start(work, i), work.head_kv, work.batch);
        key_at.next();
    }
    DEVICE void value(const Work& work, int i) {
        const int s = value_at.stage;
        shared.value_free[s].wait(value_at.parity ^ 1);
        load_tile<BLOCK_N, BLOCK_DV>(shared.value[s], values, shared.value_full[s], start(work, i), work.head_kv,
                                     work.batch);
        value_at.next();
    }
    static DEVICE int start(const Work& work, int i) {
        return (work.reach.first_tile() + work.reach.tiles() - 1 - i) * BLOCK_N;
    }
};

DEVICE void produce(Loader loader, const Arguments& a) {
    const u32 tiles = tiles_of_all(a);
    for (Schedule schedule; schedule.tile < tiles;) {
        const Work work = work_at(a, schedule.tile);
        schedule.deal(a, loader.shared.ticket, tiles, [&] {
            const int count = work.reach.tiles();
            if (count == 0) return;
            loader.key(work, 0);
            loader.query(work);
            for (int i = 1; i < count; i++) {
                loader.key(work, i);
                loader.value(work, i - 1);
            }
            loader.value(work, count - 1);
        });
    }
}

// -- consumers --------------------------------------------------------------------------------------------------------

DEVICE void release(Barrier& free) {
    if (thread_index() % 32 == 0) free.arrive();
}

DEVICE void consume(Loader loader, const Arguments& a, int consumer) {
    Shared& shared = loader.shared;
    const u32 tiles = tiles_of_all(a);
    const float factor = float(a.factor);
    Position<1> query_at;
    Position<STAGES> key_at, value_at;
    Scores scores;
    Weights weights;
    float sums[BLOCK_DV / 2];
    if (PINGPONG && consumer == CONSUMERS - 1) pass_turn(consumer);

    for (Schedule schedule; schedule.tile < tiles; schedule.follow(shared.ticket, tiles)) {
        const Work work = work_at(a, schedule.tile);
        const Reach mine = SPECIALISED ? work.seen_by(a, 64 * consumer, 64 * consumer + 64) : work.reach;
        const int all = work.reach.tiles(), count = mine.tiles();
        const int last = mine.first_tile() + count - 1;
        const int before = count ? work.reach.first_tile() + all - 1 - last : all, after = all - before - count;
        const auto row = [&](int m) { return work.first + 64 * consumer + row_of(m); };

        const bool leads = !SPECIALISED && thread_index() == 0;
        if (leads && all) {
            for (int i = 0; i < STAGES && i < all; i++) {
                loader.key(work, i);
                if (i == 0) loader.query(work);
                loader.value(work, i);
            }
        }
        const auto pass_by = [&](int unseen) {
            for (; unseen; unseen--) {
                shared.key_full[key_at.stage].wait(key_at.parity);
                if (PINGPONG) await_turn(consumer), pass_turn(consumer);
                release(shared.key_free[key_at.stage]);
                shared.value_full[value_at.stage].wait(value_at.parity);
                release(shared.value_free[value_at.stage]);
                key_at.next(), value_at.next();
            }
        };
        const auto ask_scores = [&] {
            shared.key_full[key_at.stage].wait(key_at.parity);
            if (PINGPONG) await_turn(consumer);
            begin_products();
            product_nt<BLOCK_N, BLOCK_D>(scores, shared.query[consumer], shared.key[key_at.stage]);
            commit_products();
        };
        const auto got_scores = [&](int i) {
            hold(scores);
            release(shared.key_free[key_at.stage]);
            key_at.next();
            if (i == count - 1) release(shared.query_free[consumer]);
            if (leads && i + STAGES < all) loader.key(work, i + STAGES);
            if (!SPECIALISED) warp_barrier();
            const int start = (last - i) * BLOCK_N;
            if (mine.hides(start)) hide(scores, start, [&](int m) { return keys_of(a, work.extent, row(m)); });
        };
        const auto ask_sums = [&] {
            shared.value_full[value_at.stage].wait(value_at.parity);
            begin_products();
            product_nn<BLOCK_DV, BLOCK_N>(sums, weights, shared.value[value_at.stage]);
            commit_products();
        };
        const auto got_sums = [&](int i) {
            hold(sums), hold(weights);
            release(shared.value_free[value_at.stage]);
            value_at.next();
            if (leads && i + STAGES < all) loader.value(work, i + STAGES);
            if (!SPECIALISED) warp_barrier();
        };

        Softmax softmax;
        float rescale[2];
        UNROLL for (float& sum : sums) sum = 0;
        pass_by(before);
        if (all) shared.query_full[consumer].wait(query_at.parity), query_at.next();
        if (all && !count) release(shared.query_free[consumer]);
        if (OVERLAP && count) {
            ask_scores();
            if (PINGPONG) pass_turn(consumer);
            wait_products<0>();
            got_scores(0);
            softmax.step(scores, factor, rescale);
            narrow(weights, scores);
            for (int i = 1; i < count; i++) {
                ask_scores();
                ask_sums();
                if (PINGPONG) pass_turn(consumer);
                wait_products<1>();
                got_scores(i);
                softmax.step(scores, factor, rescale);
                before_waiting(softmax.total);
                wait_products<0>();
                got_sums(i - 1);
                narrow(weights, scores);
                scale_rows(sums, rescale);
            }
            ask_sums();
            wait_products<0>();
            got_sums(count - 1);
        }
        for (int i = 0; !OVERLAP && i < count; i++) {
            ask_scores();
            if (PINGPONG) pass_turn(consumer);
            wait_products<0>();
            got_scores(i);
            softmax.step(scores, factor, rescale);
            scale_rows(sums, rescale);
            narrow(weights, scores);
            ask_sums();
            wait_products<0>();
            got_sums(i);
        }
        pass_by(after);

        softmax.finish();
        UNROLL for (int m = 0; m < 2; m++) {
            const int r = row(m);
            const bool there = r < a.queries, empty = softmax.total[m] == 0;  // it saw nothing
            const i64 line = (i64(work.batch) * a.heads + work.head) * a.queries + r;
            if (there && first_column() == 0)
                static_cast<float*>(a.lse)[line] =
                    empty ? -INFINITE : softmax.top[m] * float(a.scale) + logarithm(softmax.total[m]);
            T* const out = reinterpret_cast<T*>(a.out.at) + work.batch * a.out.batch + work.head * a.out.head;
            store_row<BLOCK_DV>(there ? out + r * a.out.row : nullptr, sums, m, empty ? 0 : 1 / softmax.total[m], a.dim_v);
        }
    }
}

KERNEL forward(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
               const __grid_constant__ TensorMap values, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 tiles[];
    Shared& shared = *reinterpret_cast<Shared*>(tiles);
    if (thread_index() == 0) {
        prefetch(queries), prefetch(keys), prefetch(values);
        init_barriers(shared);
    }
    barrier();
    const Loader loader{shared, queries, keys, values};
    const int group = thread_index() / 128;
    if (SPECIALISED && group == 0) {
        give_registers<CONSUMERS == 2 ? 24 : 32>();
        if (thread_index() == 0) produce(loader, a);
    } else {
        if (SPECIALISED) take_registers<CONSUMERS == 2 ? 240 : 160>();
        consume(loader, a, group - SPECIALISED);
    }
}
