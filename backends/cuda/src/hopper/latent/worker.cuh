// What either kind of consumer is: a warpgroup that has the scores of every other tile of keys, and one half of the
// output's columns.
#pragma once
#include "hopper/latent/loader.cuh"
#include "hopper/latent/softmax.cuh"
#include "sinks.cuh"
#include "slopes.cuh"

struct Worker {
    Shared& shared;
    const Arguments& a;
    const Rows& rows;
    const Past past;
    const int index, other = 1 - index;
    const float factor = float(SOFTCAP ? a.cap : a.factor) * float(SOFTCAP || ALIBI ? UNIT : 1);
    u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes

    // The threads of one, and of both.
    DEVICE void meet_own() const { meet_at(5 + index, 128); }
    DEVICE void meet_all() const { meet_at(7, 256); }
    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }
    // A panel of keys or, where values come in their place, `more` loads later.
    DEVICE void await(const Tile& tile, int panel, int more = 0) const {
        shared.full[tile.stage][panel].wait((tile.uses_before(a) + more) & 1);
    }
    // The n-th panel of keys that comes.
    DEVICE void await_key(const Tile& tile, int panel) const {
        if (panel < VALUE_PANELS)
            await(tile, panel);
        else
            shared.rest_full[index].wait(tile.step & 1);
    }
    DEVICE float slope(int r) const { return slope_of(a, rows.batch, smaller(rows.head_of(r), a.heads - 1)) * UNIT; }
    DEVICE Span row_sees(int r) const { return rows.sees(smaller(rows.query_of(r), rows.count - 1)); }
    // Whether a step goes beyond a sequence's end, where NaN may lie, or another one, which a weight of 0 does not take
    // away.
    DEVICE bool ends(int step) const { return rows.start(step, 0) + 2 * BLOCK_N > rows.extent.end; }
    DEVICE void clear_beyond(const Tile& tile, int step) const {
        const int there = larger(rows.extent.end - rows.start(step, index), 0);
        meet_own();  // whose products have read these rows
        if (there < BLOCK_N) clear_rows<BLOCK_N, BLOCK_DV>(shared.values[tile.stage][0], there);
        meet_all();
    }

    // -- results --------------------------------------------------------------------------------------------------

    DEVICE bool leaves_part() const { return SPLIT == PARTS || rows.portion.parts; }
    // What sums of row r are multiplied by, whose softmax is row m of `softmax`; with its lse, where `writes`.
    template <class Softmax> DEVICE float settle(int r, const Softmax& softmax, int m, float total, bool writes) const {
        const bool there = rows.is_there(r);
        const float top = softmax.exponent(m, ALIBI ? 1 : factor);
        float rescale = 1, higher = -INFINITE;  // the sink, where no score is as high
        if (SINKS) rescale = join_sink(there ? sink_of(a, rows.head_of(r)) : -INFINITE, top, higher, total);
        const bool sunk = higher > -INFINITE, empty = total == 0;
        if (a.lse && there && writes)
            static_cast<float*>(a.lse)[rows.line_of(r)] =
                empty ? -INFINITE
                      : multiply_add(sunk ? higher : softmax.base[m],
                                     float(sunk ? 1 : ALIBI ? 1 / UNIT : SOFTCAP ? a.cap : a.scale), logarithm(total));
        return empty ? 0 : rescale / total;
    }
    // Where the parts of row r begin, and how many there are.
    DEVICE void tell(int r) const {
        if (SPLIT != EVEN || rows.portion.from || !rows.is_there(r)) return;
        int* const told = reinterpret_cast<int*>(static_cast<float*>(a.sums) + 2 * rows.all_parts()) + 2 * rows.line_of(r);
        told[0] = int(rows.part_of(r)), told[1] = rows.portion.parts;
    }
    // Maximum and sum of a row, the m-th of `softmax`, whose part lies at `part`.
    template <class Softmax> DEVICE void leave(i64 part, const Softmax& softmax, int m, float total) const {
        float* const maxima = static_cast<float*>(a.sums);
        maxima[part] = softmax.is_seen(m) ? softmax.exponent(m, ALIBI ? 1 : factor) : -INFINITE;
        maxima[rows.all_parts() + part] = total;
    }
};

// What either does of a portion of rows.
template <class Kind> DEVICE void consume(Kind& it) {
    it.begin();
    const int steps = it.rows.steps();
    if (steps) it.shared.query_full.wait(it.past.queries & 1);
    ROLLED for (int step = 0; step < steps; step++) {
        it.origin = broadcast(it.origin);  // so that places are worked out of it anew, in registers of the warp
        const Tile tile(it.past.steps + step, it.index);
        it.take_scores(tile, step);
        if (SPLIT == EVEN && step == steps - 1) it.release(it.shared.query_free);
        it.agree();
        it.softmax.weigh(it.weights, it.scores, ALIBI ? 1 : it.factor);
        if (!it.a.values_within)  // not only those of its half: no phase of its own tile passes unseen
            UNROLL for (int n = 0; n < VALUE_PANELS; n++) it.await(tile, n, 1);
        if (it.ends(step)) it.clear_beyond(tile, step);
        it.make_room();
        store_packed(it.shared.rest[it.index], it.weights);
        show_writes();
        it.meet_rows();
        it.add_values(tile, Tile(it.past.steps + step, it.other));
    }
    it.finish();
}
