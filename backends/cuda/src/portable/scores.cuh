// A tile of scores: softcap, and which of its weights dropout keeps.
//
// The same for a tile (queries, keys) and its transpose: rows are a thread's own, columns go by.
#pragma once
#include "philox.cuh"
#include "portable/generic.cuh"
#include "portable/products.cuh"

typedef Real Scores[ROWS][COLUMNS<BLOCK_N>];

// Products q . k as scores, in natural units unless they need nothing but a factor (FOLD). `tangents` gets the tanh.
DEVICE void scale_scores(Scores& s, Scores& tangents, const Arguments& a) {
    if (FOLD) return;
    const Real factor = Real(a.factor), cap = Real(a.cap);
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            s[m][n] *= factor;
            if (SOFTCAP) {
                tangents[m][n] = tangent(s[m][n]);
                s[m][n] = tangents[m][n] * cap;
            }
        }
}

// Which of a thread's weights dropout keeps, a bit for each.
struct Kept {
    static constexpr int WORDS = (ROWS * COLUMNS<BLOCK_N> + 63) / 64;
    u64 bits[WORDS];
    DEVICE bool at(int m, int n) const {
        const int element = m * COLUMNS<BLOCK_N> + n;
        return bits[element / 64] >> element % 64 & 1;
    }
};

// Philox makes the numbers of four neighbouring keys at once, and four keys lie with 4 / EACH lanes, STEP apart, that
// hold EACH of them. So a lane makes the numbers of every (4 / EACH)th element for all of these lanes, and they
// exchange bits. `words(m, n)` are the numbers of the block that element (m, n) is in.
template <int STEP, int EACH, class Make> DEVICE Kept deal(const Arguments& a, Make words) {
    constexpr int SHARING = 4 / EACH, GROUPS = (ROWS * COLUMNS<BLOCK_N> + 3) / 4, AT_ONCE = 8;
    const int mine = lane() / STEP % SHARING;
    Kept kept;
    UNROLL for (int n = 0; n < Kept::WORDS; n++) kept.bits[n] = 0;
    UNROLL for (int first = 0; first < GROUPS; first += AT_ONCE) {
        u32 made = 0;
        UNROLL for (int q = 0; q < AT_ONCE && first + q < GROUPS; q++) {
            const int element = 4 * (first + q) + EACH * mine;
            const Words w = words(element / COLUMNS<BLOCK_N>, element % COLUMNS<BLOCK_N>);
            UNROLL for (int k = 0; k < 4; k++) made |= u32(w.at[k] >= a.threshold) << (4 * q + k);
        }
        UNROLL for (int other = 0; other < SHARING; other++) {
            const u32 given = (other ? shuffle_xor(made, other * STEP) : made) >> EACH * mine;
            UNROLL for (int q = 0; q < AT_ONCE && first + q < GROUPS; q++) {
                const u64 bits = given >> 4 * q & ((1 << EACH) - 1);
                kept.bits[4 * (first + q) / 64] |= bits << (4 * (first + q) % 64 + EACH * (mine ^ other));
            }
        }
    }
    return kept;
}

// For a tile (queries, keys) of batch entry b; `head(m)` and `query(m)` are of a thread's row.
template <class Head, class Query>
DEVICE Kept kept_by_rows(const Arguments& a, int b, Head head, Query query, int start) {
    return deal<1, PAIR>(a, [&](int m, int n) {
        return philox((start + score_column(n)) / 4, query(m), head(m), b, a.seed_low, a.seed_high);
    });
}

// For a tile (keys, queries) of one head, whose keys begin at `first`.
DEVICE Kept kept_by_columns(const Arguments& a, int b, int head, int first, int start) {
    return deal<LANES, 1>(a, [&](int m, int n) {
        return philox((first + row(m)) / 4, start + score_column(n), head, b, a.seed_low, a.seed_high);
    });
}
