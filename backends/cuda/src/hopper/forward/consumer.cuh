// A warpgroup that computes: 64 rows of queries against tiles of keys, as the loader brings them.
//
// Registers: scores and weights of one tile, sums of values. `ask` puts a product under way, `got` is called once it is
// waited for. Invariants: weights, the left operand in registers, are rewritten when no product is under way. Every
// tile of the block is waited for and freed, also one that these rows do not see, and takes a turn.
#pragma once
#include "hopper/distances.cuh"
#include "hopper/forward/dropout.cuh"
#include "hopper/forward/loader.cuh"
#include "hopper/forward/softmax.cuh"
#include "hopper/store.cuh"
#include "sinks.cuh"
#include "slopes.cuh"

// A consumer's rows, and which of the block's tiles of keys they see: `count`, with `before` and `after` others around.
// Of tiles `plain` to `plain + plains` every row sees every key by position. A mask may hide all of some of them.
struct Rows {
    Work work;
    int first, count, before, after, plain, plains;
    Reach reach;

    DEVICE Rows(const Arguments& a, const Work& work, int consumer)
        : work(work), first(work.first + 64 * consumer), reach(work.seen_by(a, 64 * consumer, 64 * consumer + 64)) {
        count = MASKED ? work.seen : reach.tiles();
        before = MASKED  ? work.before
                 : count ? work.end_tile - reach.first_tile() - count
                         : work.count;
        after = work.count - before - count;
        const int end = reach.first_tile() + count;
        plain = larger(end - reach.every.to / BLOCK_N, 0);
        plains = larger(end - ceil_div(reach.every.from, BLOCK_N) - plain, 0);
    }
    DEVICE bool hides(int i) const { return u32(i - plain) >= u32(plains); }
    // Where tile i begins, counted from the last.
    DEVICE int start(int i) const { return (reach.first_tile() + count - 1 - i) * BLOCK_N; }
};

struct Consumer {
    Shared& shared;
    const Arguments& a;
    const int index;
    const float factor = float(SOFTCAP ? a.cap : a.factor) * float(SOFTCAP || ALIBI ? UNIT : 1);
    const u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Position<QUERY_STAGES> query_at;
    Position<STAGES> key_at, value_at;
    u32 told;             // MASKED: of the tile whose scores are asked for, and what
    u32 shown[2][SHOWN];  // the thread's rows see of it
    Scores scores;
    Weights weights;
    float sums[BLOCK_DV / 2];
    Softmax softmax;
    Dropout dropout;  // DROPOUT: of the tile whose scores are asked for
    float rescale[2];
    float slope;  // ALIBI: of the rows whose scores are asked for, in units of the exponential

    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }

    DEVICE void run() {
        if (index == CONSUMERS - 1) pass_turn(index);
        bool begun = false;  // the first tile, with the last of the rows before
        Schedule schedule{a, shared.ticket};
        if (TOLD)
            schedule.follow(index);
        else
            schedule.read();
        while (schedule.more()) {
            const Rows rows(a, schedule.work, index);
            if (!begun) begin(rows);
            for (int i = 1; i < rows.count; i++) step(rows, i);
            // While tiles are left that these rows do not see, the loader waits for them to be freed and deals none.
            const bool followed = CONTINUED && rows.count && !rows.after;
            if (followed) schedule.follow(index);
            const Rows next(a, schedule.work, index);
            begun = followed && schedule.more() && next.count && !next.before;
            if (begun)
                change(rows, next);
            else
                finish(rows);
            if (!followed) schedule.follow(index);
        }
    }

    // -- steps ----------------------------------------------------------------------------------------------------

    // The weights of the first tile.
    DEVICE void begin(const Rows& rows) {
        softmax = Softmax();
        UNROLL for (float& sum : sums) sum = 0;
        if (rows.work.count) await_query();
        if (rows.work.count && !rows.count) free_query();  // first: the loader may wait for it
        pass_by(rows.before);
        if (!rows.count) return;
        if (ALIBI) slope = slope_of(a, rows.work.batch, rows.work.head) * UNIT;
        ask_scores(rows);
        pass_turn(index);
        draw(rows, 0);
        wait_products<0>();
        got_scores(rows, 0);
        softmax.raise(scores, factor, rescale);  // of sums that are 0
        softmax.weigh(weights, scores, factor, true);
        if (DROPOUT) dropout.drop(weights);
        clear_beyond(rows);
    }
    // The scores of tile i beside the values of the one before, whose weights give way to its own. Exponentials are
    // left to the turns of others.
    DEVICE void step(const Rows& rows, int i) {
        ask_scores(rows);
        ask_sums();
        pass_turn(index);
        draw(rows, i);
        wait_products<1>();
        got_scores(rows, i);
        wait_products<0>();
        got_sums();
        for (bool raised = false; !softmax.weigh(weights, scores, factor, raised); raised = true) {
            softmax.raise(scores, factor, rescale);
            scale_rows(sums, rescale);
        }
        if (DROPOUT) dropout.drop(weights);
    }
    // A step where tile i is the first of other rows, so that the products go on while results are stored.
    DEVICE void change(const Rows& rows, const Rows& next) {
        const float sink = sink_of(rows);
        free_query();
        await_query();
        if (ALIBI) slope = slope_of(a, next.work.batch, next.work.head) * UNIT;
        ask_scores(next);
        ask_sums();
        pass_turn(index);
        draw(next, 0);
        wait_products<1>();
        got_scores(next, 0);
        Softmax fresh;
        fresh.raise(scores, factor, rescale);
        softmax.finish();
        wait_products<0>();
        got_sums();
        fresh.weigh(weights, scores, factor, true);
        if (DROPOUT) dropout.drop(weights);
        store(rows, sink);
        UNROLL for (float& sum : sums) sum = 0;
        softmax = fresh;
        clear_beyond(next);
    }
    // The values of the last tile, and results.
    DEVICE void finish(const Rows& rows) {
        const float sink = sink_of(rows);
        if (rows.count) {
            free_query();
            ask_sums();
            wait_products<0>();
            got_sums();
        }
        pass_by(rows.after);
        softmax.finish();
        store(rows, sink);
    }
    // Tiles that these rows do not see.
    DEVICE void pass_by(int count) {
        for (; count; count--) {
            shared.key_full[key_at.stage].wait(key_at.parity);
            await_turn(index), pass_turn(index);
            release(shared.key_free[key_at.stage]);
            shared.value_full[value_at.stage].wait(value_at.parity);
            release(shared.value_free[value_at.stage]);
            key_at.next(), value_at.next();
        }
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    DEVICE void await_query() { shared.query_full[query_at.stage][index].wait(query_at.parity); }
    DEVICE void free_query() {
        release(shared.query_free[query_at.stage][index]);
        query_at.next();
    }
    DEVICE void ask_scores(const Rows& rows) {
        shared.key_full[key_at.stage].wait(key_at.parity);
        if (MASKED) ask_mask(rows);
        await_turn(index);
        begin_products();
        product_nt<BLOCK_N, BLOCK_D>(scores, Matrix(origin + Shared::query_place(query_at.stage, index)),
                                     Matrix(origin + Shared::key_place(key_at.stage)));
        commit_products();
    }
    DEVICE void got_scores(const Rows& rows, int i) {
        hold(scores);
        if (BIAS) {
            if (SOFTCAP) cap(scores, float(a.factor));
            add_bias();
        }
        release(shared.key_free[key_at.stage]);
        key_at.next();
        if (SOFTCAP && !BIAS) cap(scores, float(a.factor));
        if (ALIBI) slant(rows, start_of(rows, i));
        if (MASKED ? rows.reach.hides(start_of(rows, i)) : rows.hides(i))
            hide(scores, start_of(rows, i), [&](int m) { return keys_of(a, rows.work.extent, rows.first + row_of(m)); });
        if (MASKED && mixed()) hide(scores, shown);
    }
    // While products are under way.
    DEVICE void draw(const Rows& rows, int i) {
        if (DROPOUT) dropout.draw(a, rows.work.batch, rows.work.head, rows.first + row_of(0), start_of(rows, i));
    }
    // Scores become exponents.
    DEVICE void slant(const Rows& rows, int start) {
        Distances distances(rows.first + row_of(0) + rows.work.extent.offset - start - first_column());
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            distances.go_to(c);
            UNROLL for (int m = 0; m < 2; m++)
                UNROLL for (int e = 0; e < 2; e++) {
                    float& score = scores[4 * c + 2 * m + e];
                    score = multiply_add(score, factor, -slope * distances.of(m, e));
                }
        }
    }
    DEVICE void add_bias() {
#if BIAS
        const T* const tile = shared.bias[key_at.stage][BIAS == BIAS_OF_ALL ? 0 : index];
        ::add_bias(scores, tile, float(SOFTCAP ? a.cap : a.factor));
        warp_barrier();  // all lanes have read it
#endif
    }
    // Where tile i of the rows begins, counted from the last; behind a mask, the one whose scores were asked for.
    DEVICE int start_of(const Rows& rows, int i) const {
        return MASKED ? int(told >> CONSUMERS) * BLOCK_N : rows.start(i);
    }
    // Whether the mask hides some of that tile. What it hides comes from global memory, and is asked for before the turn,
    // which nothing is to hold up.
    DEVICE bool mixed() const { return told >> index & 1; }
    DEVICE void ask_mask(const Rows& rows) {
        told = shared.told[key_at.stage];
        if (!mixed()) return;
        const int plane = mask_plane(a, rows.work.batch, rows.work.head);
        UNROLL for (int m = 0; m < 2; m++) {
            const u16* const row = mask_row<BLOCK_N>(a, plane, told >> CONSUMERS, rows.first + row_of(m));
            const Chunk<u32> all = *reinterpret_cast<const Chunk<u32>*>(row);
            UNROLL for (int n = 0; n < SHOWN; n++) shown[m][n] = all.at[n];
        }
    }
    DEVICE void ask_sums() {
        shared.value_full[value_at.stage].wait(value_at.parity);
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(sums, weights, Matrix(origin + Shared::value_place(value_at.stage)));
        commit_products();
    }
    // Beyond the end of a sequence may lie NaN, or another one, which a weight of 0 does not take away: the first tile
    // may hold some.
    DEVICE void clear_beyond(const Rows& rows) {
        const int there = rows.work.extent.end - start_of(rows, 0);
        if (!(VARLEN || a.length_bytes) || there >= BLOCK_N) return;
        shared.value_full[value_at.stage].wait(value_at.parity);
        clear_rows<BLOCK_N, BLOCK_DV>(shared.value[value_at.stage], there);
        meet(index);
    }
    DEVICE void got_sums() {
        hold(sums), hold(weights);
        release(shared.value_free[value_at.stage]);
        value_at.next();
    }

    // Asked for beside the last product. The rows past the last sequence have none.
    DEVICE float sink_of(const Rows& rows) const {
        return SINKS && !is_past(a, rows.work.batch) ? ::sink_of(a, rows.work.head) : -INFINITE;
    }
    DEVICE float weight_of(float total) const { return (DROPOUT ? float(a.keep_scale) : 1) / total; }
    DEVICE void store(const Rows& rows, float sink) const {
        const Work& work = rows.work;
        UNROLL for (int m = 0; m < 2; m++) {
            const int r = rows.first + row_of(m);
            float total = softmax.total[m], rescale = 1, higher = -INFINITE;  // the sink, where no score is as high
            if (SINKS) rescale = join_sink(sink, softmax.base[m], higher, total);
            const bool sunk = higher > -INFINITE;
            const bool there = r < queries_in(a, work.extent), empty = total == 0;  // it saw nothing
            const i64 line = line_of(a, work.batch, work.head, first_query(work.extent), r);
            if (a.lse && there && first_column() == 0)
                // One operation wherever this is inlined: rows end in `change` or in `finish`, as their block comes by.
                static_cast<float*>(a.lse)[line] =
                    empty ? -INFINITE
                          : multiply_add(sunk ? higher : softmax.top[m],
                                         float(sunk || BIAS ? 1 : ALIBI ? 1 / UNIT : SOFTCAP ? a.cap : a.scale),
                                         logarithm(total));
            T* const out = reinterpret_cast<T*>(a.out.at) + BEGIN_OF(a.out, work.batch, first_query(work.extent)) +
                           work.head * a.out.head;
            store_row<BLOCK_DV>(there ? out + r * a.out.row : nullptr, sums, m,
                                empty ? 0 : weight_of(total) * rescale, a.dim_v);
        }
    }
};
