// Rows of which several have seen a part of the keys each, put together: the teams of a block, and the blocks that keys
// are split among.
//
// What a team has made of BLOCK_M rows is its share, in shared memory: numerators [BLOCK_M][PITCH<BLOCK_DV>], maxima
// [BLOCK_M], sums [BLOCK_M]. Shares are added up in their order, so that results repeat to the bit. They are weighed by
// maximum and sum, never by lse: the logarithm of 64 is not exact, and the mean of 64 equal weights is.
// Maxima are in the unit of scores: in that of the exponential where scores need nothing but a factor (FOLD), and else
// in natural units, in which the finite minimum of a mask stays finite.
#pragma once
#include "portable/products.cuh"

constexpr int MAXIMA = BLOCK_M * PITCH<BLOCK_DV>, TOTALS = MAXIMA + BLOCK_M;  // places in a share
constexpr int SHARE = TEAMS == 1 ? 0 : TOTALS + BLOCK_M;                      // Reals

// Two neighbouring columns of a row: the maximum of its scores, the sum of their weights, and the numerators.
struct Pair {
    Real top = -INFINITE, total = 0, at[2] = {0, 0};
};

// Parts of a row put together.
template <int N> DEVICE Pair all_of(const Pair (&parts)[N]) {
    const Real step = FOLD ? Real(1) : UNIT;
    Pair all;
    UNROLL for (int n = 0; n < N; n++) all.top = larger(all.top, parts[n].top);
    const Real base = all.top == -INFINITE ? Real(0) : all.top;
    UNROLL for (int n = 0; n < N; n++) {
        const Real weight = power((parts[n].top - base) * step);
        all.total += parts[n].total * weight;
        all.at[0] += parts[n].at[0] * weight;
        all.at[1] += parts[n].at[1] * weight;
    }
    return all;
}

// Calls use(r, d, pair) for columns d and d + 1, of `dim`, of the block's first `count` rows, out of what all teams
// have made of them. Threads come together; `share(n)` is room for the share of team n, which no other team has used.
template <class Share, class Use>
DEVICE void each_pair(const Real (&sums)[ROWS][COLUMNS<BLOCK_DV>], const Real (&top)[ROWS], const Real (&total)[ROWS],
                      int count, int dim, Share share, Use use) {
    Real* const mine = share(team());
    warp_barrier();
    UNROLL for (int m = 0; m < ROWS; m++) {
        if (first_row(m) >= count) continue;
        if (score_column(0) == 0)
            store_shared(mine + MAXIMA + row(m), top[m]), store_shared(mine + TOTALS + row(m), total[m]);
        UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++)
            store_shared(mine + row(m) * PITCH<BLOCK_DV> + sum_column(c), sums[m][c]);
    }
    barrier();
    for (int n = 2 * thread_index(); n < count * BLOCK_DV; n += 64 * WARPS) {
        const int r = n / BLOCK_DV, d = n % BLOCK_DV;
        if (d >= dim) continue;
        Pair parts[TEAMS];
        UNROLL for (int t = 0; t < TEAMS; t++) {
            const Real* const at = share(t);
            const Real* const numerators = at + r * PITCH<BLOCK_DV> + d;
            parts[t] = {load_shared(at + MAXIMA + r), load_shared(at + TOTALS + r), load_shared(numerators),
                        load_shared(numerators + 1)};
        }
        use(r, d, all_of(parts));
    }
}

// Two columns to `to`, of which `left` are there. `even`: rows begin where pairs do.
template <class V> DEVICE void store_pair(V* to, const Real (&pair)[2], int left, bool even) {
    struct alignas(2 * sizeof(V)) Both {
        V at[2];
    };
    const Both both = {Narrow<V>::of(pair[0]), Narrow<V>::of(pair[1])};
    if (even) {
        *reinterpret_cast<Both*>(to) = both;
    } else {
        to[0] = both.at[0];
        if (left > 1) to[1] = both.at[1];
    }
}

// What a block leaves of its rows to another block: numerators [BLOCK_DV], maximum and sum of each. Where there is
// nothing yet, every bit is 1, which is a NaN that no sum is.
constexpr int LEFT = BLOCK_DV + 2, LEFT_BY_BLOCK = BLOCK_M * LEFT;

DEVICE Real never_blank(Real x) { return x == x ? x : INFINITE - INFINITE; }

// Leaves columns d and d + 1 of a row at `row`.
DEVICE void leave(Real* row, int d, const Pair& pair) {
    store_relaxed(row + d, never_blank(pair.at[0]), never_blank(pair.at[1]));
    if (d == 0) store_relaxed(row + BLOCK_DV, never_blank(pair.top), never_blank(pair.total));
}

// Has the L2 fetch the places of what `others` blocks will leave of the first `count` rows, for who asks later waits.
DEVICE void fetch_left(const Real* rows, int others, int count) {
    constexpr int LINE = 128 / sizeof(Real), LINES = (LEFT_BY_BLOCK + LINE - 1) / LINE;
    ROLLED for (int n = thread_index(); n < others * LINES; n += 32 * WARPS) {
        const int at = n % LINES * LINE;
        if (at < count * LEFT) fetch(rows + n / LINES * LEFT_BY_BLOCK + at);
    }
}

// Columns d and d + 1 of what `others` blocks leave of a row, from `row` on, and of `own`. Waits for them, and makes the
// numerators' places blank again. It is short, as its instructions come from memory while all wait for them.
DEVICE Pair of_splits(Real* row, int others, int d, const Pair& own) {
    constexpr int AT_ONCE = 16;
    Pair parts[AT_ONCE + 1];
    parts[AT_ONCE] = own;
    for (; others > 0; others -= AT_ONCE, row += AT_ONCE * LEFT_BY_BLOCK) {
        const u32 wanted = others < AT_ONCE ? (1u << others) - 1 : (1u << AT_ONCE) - 1;
        for (u32 missing = wanted; missing;) {
            UNROLL for (int n = 0; n < AT_ONCE; n++)  // all on their way together
                if (missing >> n & 1) {
                    load_relaxed(parts[n].top, parts[n].total, row + n * LEFT_BY_BLOCK + BLOCK_DV);
                    load_relaxed(parts[n].at[0], parts[n].at[1], row + n * LEFT_BY_BLOCK + d);
                }
            UNROLL for (int n = 0; n < AT_ONCE; n++)
                if (!is_blank(parts[n].top, parts[n].total) && !is_blank(parts[n].at[0], parts[n].at[1]))
                    missing &= ~(1u << n);
        }
        UNROLL for (int n = 0; n < AT_ONCE; n++)
            if (wanted >> n & 1)
                store_relaxed(row + n * LEFT_BY_BLOCK + d, blank(Real()), blank(Real()));
            else
                parts[n] = Pair();
        parts[AT_ONCE] = all_of(parts);
    }
    return parts[AT_ONCE];
}

// The same for the maxima and sums of the first `count` rows, which many threads read. Threads come together.
DEVICE void clear_left(Real* rows, int others, int count) {
    barrier();
    for (int n = thread_index(); n < others * BLOCK_M; n += 32 * WARPS)  // as a row of one block follows another's
        if (n % BLOCK_M < count) store_relaxed(rows + n * LEFT + BLOCK_DV, blank(Real()), blank(Real()));
}
