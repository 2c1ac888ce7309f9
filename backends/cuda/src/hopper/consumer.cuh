// A warpgroup that computes: 64 rows of queries against tiles of keys, as the loader brings them.
//
// Registers: scores and weights of one tile, sums of values. `ask` puts a product under way, `got` is called once it is
// waited for. Invariants: weights, the left operand in registers, are rewritten when no product is under way. Every
// tile of the block is waited for and freed, also one that these rows do not see, and takes a turn.
#pragma once
#include "hopper/loader.cuh"
#include "hopper/store.cuh"

// A consumer's rows, and which of the block's tiles of keys they see: `count`, with `before` and `after` others around.
struct Rows {
    Work work;
    int first, count, before, after;
    Reach reach;

    DEVICE Rows(const Arguments& a, const Work& work, int consumer)
        : work(work), first(work.first + 64 * consumer),
          reach(SPECIALISED ? work.seen_by(a, 64 * consumer, 64 * consumer + 64) : work.seen_by(a, 0, BLOCK_M)) {
        count = reach.tiles();
        before = count ? work.first_tile + work.count - reach.first_tile() - count : work.count;
        after = work.count - before - count;
    }
    // Where tile i begins, counted from the last.
    DEVICE int start(int i) const { return (reach.first_tile() + count - 1 - i) * BLOCK_N; }
};

struct Consumer {
    Loader loader;  // used where there is no producer
    const Arguments& a;
    const int index;
    const float factor = float(a.factor);
    Position<QUERY_STAGES> query_at;
    Position<STAGES> key_at, value_at;
    Scores scores;
    Weights weights[WEIGHTS];
    float sums[BLOCK_DV / 2];
    Softmax softmax;
    float rescale[2];
    bool grown;

    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }
    DEVICE bool leads() const { return !SPECIALISED && thread_index() == 0; }
    DEVICE void load_value(const Work& work, int i) { loader.value(work.start(i), work.head_kv, work.batch); }

    DEVICE void run() {
        Shared& shared = loader.shared;
        if (PINGPONG && index == CONSUMERS - 1) pass_turn(index);
        bool begun = false;  // the first tile, with the last of the rows before
        for (Schedule schedule{a, shared.ticket}; schedule.more();) {
            const Rows rows(a, schedule.work, index);
            if (!begun) begin(rows);
            if (OVERLAP) steps(rows);
            for (int i = 0; !OVERLAP && i < rows.count; i++) plain_step(rows, i);
            // While tiles are left that these rows do not see, the loader waits for them to be freed and deals none.
            const bool followed = CONTINUED && rows.count && !rows.after;
            if (followed) schedule.follow();
            const Rows next(a, schedule.work, index);
            begun = followed && schedule.more() && next.count && !next.before;
            if (begun)
                change(rows, next);
            else
                finish(rows);
            if (!followed) schedule.follow();
        }
    }

    // -- steps ----------------------------------------------------------------------------------------------------

    // The weights of the first tile.
    DEVICE void begin(const Rows& rows) {
        if (leads()) {
            for (int i = 0; i < STAGES && i < rows.work.count; i++) {
                loader.key(rows.work, i);
                if (i == 0) loader.query(rows.work);
                load_value(rows.work, i);
            }
        }
        softmax = Softmax();
        UNROLL for (float& sum : sums) sum = 0;
        if (rows.work.count) await_query();
        if (rows.work.count && !rows.count) free_query();  // first, as it may be what the last values wait behind
        pass_by(rows.before);
        if (!OVERLAP || !rows.count) return;
        ask_scores();
        if (PINGPONG) pass_turn(index);
        wait_products<0>();
        got_scores(rows, 0);
        softmax.step(scores, factor, rescale);  // of sums that are 0
        narrow(weights[0], scores);
    }
    // All tiles but the first.
    DEVICE void steps(const Rows& rows) {
        int i = 1;
        if (WEIGHTS == 2)
            for (; i + 1 < rows.count; i += 2) {
                step(rows, i, weights[0], weights[1]);
                step(rows, i + 1, weights[1], weights[0]);
            }
        for (; i < rows.count; i++) {
            step(rows, i, weights[0], weights[WEIGHTS - 1]);
            if (WEIGHTS == 2) copy(weights[0], weights[1]);
        }
    }
    // The scores of tile i beside the values of the one before, whose weights are `old`; its own beside these.
    DEVICE void step(const Rows& rows, int i, Weights& old, Weights& own) {
        if (MIXED) return mixed_step(rows, i, old, own);
        ask_scores();
        ask_sums(old);
        if (PINGPONG) pass_turn(index);
        wait_products<1>();
        got_scores(rows, i);
        grown = softmax.step(scores, factor, rescale);
        if (WEIGHTS == 2) narrow(own, scores);
        before_waiting(softmax.total, own);
        wait_products<0>();
        got_sums(rows, i - 1, old);
        if (WEIGHTS == 1) narrow(own, scores);
        if (grown) scale_rows(sums, rescale);
    }
    // The same, products with values and exponentials in turns: a warp that issues a product waits for most of those
    // before it, and here computes meanwhile. MIXED products go first, to run while the largest score is looked for.
    DEVICE void mixed_step(const Rows& rows, int i, Weights& old, Weights& own) {
        Shared& shared = loader.shared;
        ask_scores();
        if (PINGPONG) pass_turn(index);
        shared.value_full[value_at.stage].wait(value_at.parity);
        wait_products<0>();
        begin_products();
        const Matrix values = rows_of<BLOCK_N>(shared.value[value_at.stage]);
        product_nn<BLOCK_DV, BLOCK_N>(sums, old, values, 0, MIXED);
        got_scores(rows, i);
        grown = softmax.raise(scores, factor, rescale);
        mix<MIXED>(values, old, own);
        commit_products();
        wait_products<0>();
        got_sums(rows, i - 1, old);
        narrow(own, scores);
        if (grown) scale_rows(sums, rescale);
    }
    // The products of 16 values each from K on, and as large a part of the weights after each.
    template <int K> DEVICE void mix(const Matrix& values, Weights& old, Weights& own) {
        constexpr int GROUPS = BLOCK_N / 8, END = BLOCK_N / 16, LATE = END - MIXED;
        product_nn<BLOCK_DV, BLOCK_N>(sums, old, values, K, K + 1);
        softmax.weigh<GROUPS * (K - MIXED) / LATE, GROUPS * (K + 1 - MIXED) / LATE>(scores, factor);
        before_waiting(softmax.total, own);
        if constexpr (K + 1 < END) mix<K + 1>(values, old, own);
    }
    // A step where tile i is the first of other rows, so that the products go on while results are stored.
    DEVICE void change(const Rows& rows, const Rows& next) {
        await_query();
        ask_scores();
        ask_sums(weights[0]);
        if (PINGPONG) pass_turn(index);
        wait_products<1>();
        got_scores(next, 0);
        Softmax fresh;
        fresh.step(scores, factor, rescale);
        softmax.finish();
        before_waiting(fresh.total, weights[0]);
        wait_products<0>();
        got_sums(rows, rows.count - 1, weights[0]);
        narrow(weights[0], scores);
        store(rows);
        UNROLL for (float& sum : sums) sum = 0;
        softmax = fresh;
    }
    // The values of the last tile, and results.
    DEVICE void finish(const Rows& rows) {
        if (OVERLAP && rows.count) {
            ask_sums(weights[0]);
            wait_products<0>();
            got_sums(rows, rows.count - 1, weights[0]);
        }
        pass_by(rows.after);
        softmax.finish();
        store(rows);
    }
    // Tile i without overlap.
    DEVICE void plain_step(const Rows& rows, int i) {
        ask_scores();
        if (PINGPONG) pass_turn(index);
        wait_products<0>();
        got_scores(rows, i);
        grown = softmax.step(scores, factor, rescale);
        if (grown) scale_rows(sums, rescale);
        narrow(weights[0], scores);
        ask_sums(weights[0]);
        wait_products<0>();
        got_sums(rows, i, weights[0]);
    }
    // Tiles that these rows do not see.
    DEVICE void pass_by(int count) {
        for (; count; count--) {
            Shared& shared = loader.shared;
            shared.key_full[key_at.stage].wait(key_at.parity);
            if (PINGPONG) await_turn(index), pass_turn(index);
            release(shared.key_free[key_at.stage]);
            shared.value_full[value_at.stage].wait(value_at.parity);
            release(shared.value_free[value_at.stage]);
            key_at.next(), value_at.next();
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void await_query() { loader.shared.query_full[query_at.stage][index].wait(query_at.parity); }
    DEVICE void free_query() {
        release(loader.shared.query_free[query_at.stage][index]);
        query_at.next();
    }
    DEVICE void ask_scores() {
        Shared& shared = loader.shared;
        shared.key_full[key_at.stage].wait(key_at.parity);
        if (PINGPONG) await_turn(index);
        begin_products();
        product_nt<BLOCK_N, BLOCK_D>(scores, shared.query[query_at.stage][index], shared.key[key_at.stage]);
        commit_products();
    }
    DEVICE void got_scores(const Rows& rows, int i) {
        hold(scores);
        release(loader.shared.key_free[key_at.stage]);
        key_at.next();
        if (i == rows.count - 1) free_query();
        if (leads() && i + STAGES < rows.work.count) loader.key(rows.work, i + STAGES);
        if (!SPECIALISED) warp_barrier();
        const int start = rows.start(i);
        if (rows.reach.hides(start))
            hide(scores, start, [&](int m) { return keys_of(a, rows.work.extent, rows.first + row_of(m)); });
    }
    DEVICE void ask_sums(Weights& weights) {
        Shared& shared = loader.shared;
        shared.value_full[value_at.stage].wait(value_at.parity);
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(sums, weights, rows_of<BLOCK_N>(shared.value[value_at.stage]));
        commit_products();
    }
    DEVICE void got_sums(const Rows& rows, int i, Weights& weights) {
        hold(sums), hold(weights);
        release(loader.shared.value_free[value_at.stage]);
        value_at.next();
        if (leads() && i + STAGES < rows.work.count) load_value(rows.work, i + STAGES);
        if (!SPECIALISED) warp_barrier();
    }

    DEVICE void store(const Rows& rows) const {
        const Work& work = rows.work;
        UNROLL for (int m = 0; m < 2; m++) {
            const int r = rows.first + row_of(m);
            const float total = softmax.total[m];
            const bool there = r < a.queries, empty = total == 0;  // it saw nothing
            const i64 line = (i64(work.batch) * a.heads + work.head) * a.queries + r;
            if (there && first_column() == 0)
                static_cast<float*>(a.lse)[line] =
                    empty ? -INFINITE : softmax.top[m] * float(a.scale) + logarithm(total);
            T* const out = reinterpret_cast<T*>(a.out.at) + work.batch * a.out.batch + work.head * a.out.head;
            store_row<BLOCK_DV>(there ? out + r * a.out.row : nullptr, sums, m, empty ? 0 : 1 / total, a.dim_v);
        }
    }
};
