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
    // The same of keys alone, which have one more.
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

// -- what either does, with the rows, scores and sums that its threads have --------------------------------------------

template <class Kind> DEVICE void begin(Kind& it) {
    UNROLL for (auto& part : it.sums)
        UNROLL for (float& sum : part) sum = 0;
    if (ALIBI) UNROLL for (int m = 0; m < Kind::MINE; m++) it.slopes[m] = it.slope(it.row(m));
}

template <class Kind> DEVICE void take_scores(Kind& it, const Tile& tile, int step) {
    UNROLL for (float& score : it.scores) score = 0;  // none of the step before lives on in registers
    begin_products();
    UNROLL for (int n = 0; n < KEY_PANELS; n++) {
        const int panel = in_turn(n);
        it.await_key(tile, panel);
        const Matrix query = it.matrix(Shared::query_place(panel)), key = it.matrix(tile.place(panel));
        if (n == 0)
            it.template multiply<false>(query, key);
        else
            it.template multiply<true>(query, key);
    }
    commit_products();
    wait_products<0>();
    hold(it.scores);
    if (!it.a.values_within)
        UNROLL for (int n = 0; n < VALUE_PANELS; n++) it.release(it.shared.free[tile.stage][n]);
    if (SOFTCAP) cap(it.scores, float(it.a.factor));
    const int start = it.rows.start(step, it.index);
    if (ALIBI) it.slant(start);
    if (!it.rows.has(step, it.index))
        UNROLL for (float& score : it.scores) score = -INFINITE;
    else if (it.rows.reach.hides(start))
        it.hide_keys(start);
}

// Both consumers raise the base of a row together.
template <class Kind> DEVICE void agree(Kind& it) {
    float most[Kind::MINE], rescale[Kind::MINE];
    UNROLL for (int m = 0; m < Kind::MINE; m++) most[m] = it.softmax.most(it.scores, m);
    it.over_keys(most, [](float x, float y) { return largest(x, y); });
    bool risen = false;
    UNROLL for (int m = 0; m < Kind::MINE; m++)
        risen |= it.softmax.rise(m, most[m], ALIBI ? 1 : it.factor, rescale[m]);
    if (!all_of_warp(!risen)) it.scale(rescale);
}

// The sum of the weights of each row, of all keys.
template <class Kind> DEVICE void all_totals(const Kind& it, float (&total)[Kind::MINE]) {
    UNROLL for (int m = 0; m < Kind::MINE; m++) total[m] = it.softmax.total[m];
    it.over_keys(total, [](float x, float y) { return x + y; });
}

// All of a portion of rows.
template <class Kind> DEVICE void consume(Kind& it) {
    begin(it);
    const int steps = it.rows.steps();
    if (steps) it.shared.query_full.wait(it.past.queries & 1);
    ROLLED for (int step = 0; step < steps; step++) {
        it.origin = broadcast(it.origin);  // so that places are worked out of it anew, in registers of the warp
        const Tile tile(it.past.steps + step, it.index);
        take_scores(it, tile, step);
        if (SPLIT == EVEN && step == steps - 1) it.release(it.shared.query_free);
        agree(it);
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
