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

    DEVICE void add(Real other, Real more, Real first, Real second) {
        const Real step = FOLD ? Real(1) : UNIT;
        const Real here = larger(top, other), base = here == -INFINITE ? Real(0) : here;
        const Real mine = power((top - base) * step), theirs = power((other - base) * step);
        top = here;
        total = total * mine + more * theirs;
        at[0] = at[0] * mine + first * theirs;
        at[1] = at[1] * mine + second * theirs;
    }
};

// Calls use(r, d, pair) for columns d and d + 1, of `dim`, of the block's first `count` rows, out of what all teams
// have made of them. Threads come together; `share(n)` is room for the share of team n, which no other team has used.
template <class Share, class Use>
DEVICE void each_pair(const Real (&sums)[ROWS][COLUMNS<BLOCK_DV>], const Real (&top)[ROWS], const Real (&total)[ROWS],
                      int count, int dim, Share share, Use use) {
    Real* const mine = share(team());
    warp_barrier();
    UNROLL for (int m = 0; m < ROWS; m++) {
        if (score_column(0) == 0)
            store_shared(mine + MAXIMA + row(m), top[m]), store_shared(mine + TOTALS + row(m), total[m]);
        UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++)
            store_shared(mine + row(m) * PITCH<BLOCK_DV> + sum_column(c), sums[m][c]);
    }
    barrier();
    for (int n = 2 * thread_index(); n < count * BLOCK_DV; n += 64 * WARPS) {
        const int r = n / BLOCK_DV, d = n % BLOCK_DV;
        if (d >= dim) continue;
        Pair all;
        UNROLL for (int t = 0; t < TEAMS; t++) {
            const Real* const at = share(t);
            const Real* const numerators = at + r * PITCH<BLOCK_DV> + d;
            all.add(load_shared(at + MAXIMA + r), load_shared(at + TOTALS + r), load_shared(numerators),
                    load_shared(numerators + 1));
        }
        use(r, d, all);
    }
}

// Columns d and d + 1, of `dim`, of the line at `line` out of `splits` times `lines`.
DEVICE Pair of_splits(const Real* maxima, const Real* totals, const Real* parts, i64 line, int splits, i64 lines, int d,
                      int dim) {
    Pair all;
    const int second = d + 1 < dim;  // no branch, so that loads are under way together
    UNROLL_SOME for (int s = 0; s < splits; s++, line += lines) {
        const Real* const numerators = parts + line * dim + d;
        all.add(maxima[line], totals[line], numerators[0], numerators[second]);
    }
    return all;
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

// Whether this block is the last of `blocks` that count in `counter` what they have written, which then is there to be
// read. Threads come together; `scratch` is shared memory for an integer, which no thread uses any more.
DEVICE bool is_last(u32* counter, u32 blocks, u32* scratch) {
    fence();
    barrier();
    if (thread_index() == 0) store_shared(scratch, add_atomic(counter, 1));
    barrier();
    fence();
    return load_shared(scratch) + 1 == blocks;
}
