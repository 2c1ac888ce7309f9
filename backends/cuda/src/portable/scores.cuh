// A tile of scores: softcap, mask, positions, and which of its weights dropout keeps.
//
// The same for a tile (queries, keys) and its transpose: rows are a thread's own, columns go by.
#pragma once
#include "philox.cuh"
#include "portable/products.cuh"
#include "positions.cuh"

enum { NO_MASK, BOOL_MASK, F16_MASK, BF16_MASK, F32_MASK, F64_MASK };

typedef Real Scores[ROWS][COLUMNS<BLOCK_N>];

// A float mask's element in Real. A finite number that Real cannot hold does not become an infinity.
DEVICE Real mask_element(const Arguments& a, i64 at) {
    if (MASK_KIND == F16_MASK) return widen(reinterpret_cast<const f16*>(a.mask.at)[at]);
    if (MASK_KIND == BF16_MASK) return widen(reinterpret_cast<const bf16*>(a.mask.at)[at]);
    if (MASK_KIND == F32_MASK) return reinterpret_cast<const float*>(a.mask.at)[at];
    const double element = reinterpret_cast<const double*>(a.mask.at)[at];
    if (element - element != 0) return Real(element);
    return Real(smaller<double>(larger<double>(element, -LOWEST), LOWEST));
}

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

// Scores plus a float mask, and -inf where a position is hidden, for the columns from `start`. `hides` says that the
// tile may hold positions that a row does not see. `sees(m)` is the interval that a thread's row sees, `mask(m)` where its
// row of the mask begins, and `step` the mask's stride along columns: made anew, not kept from tile to tile in registers.
template <class Sees, class Mask>
DEVICE void hide(Scores& s, const Arguments& a, int start, bool hides, Sees sees, Mask mask, i64 step) {
    if (MASK_KIND == NO_MASK && !hides) return;
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Span span = sees(m);
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const int at = start + score_column(n);
            bool seen = at >= span.from && at < span.to;
            if (MASK_KIND != NO_MASK && seen) {
                const i64 element = mask(m) + at * step;
                if (MASK_KIND == BOOL_MASK) {
                    seen = a.mask.at[element] != 0;
                } else {
                    const Real bias = mask_element(a, element);
                    seen = bias != -INFINITE;
                    s[m][n] += bias;
                }
            }
            if (!seen) s[m][n] = -INFINITE;
        }
    }
}

// Which weights of a tile stay, one bit a column for each of a thread's rows. `position(row, column)` is (i, j).
struct Kept {
    u64 rows[ROWS];
    DEVICE bool at(int m, int n) const { return rows[m] >> n & 1; }
};

// For a tile (queries, keys): neighbouring columns of a thread share what Philox makes at once.
template <class Head, class Query>
DEVICE Kept kept_by_rows(const Arguments& a, int b, Head head, Query query, int start) {
    static_assert(COLUMNS<BLOCK_N> <= 64, "a bit for each column");
    Kept kept;
    UNROLL for (int m = 0; m < ROWS; m++) {
        kept.rows[m] = 0;
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n += PAIR) {
            const int j = start + score_column(n);
            const Words words = philox(j / 4, query(m), head(m), b, a.seed_low, a.seed_high);
            UNROLL for (int v = 0; v < PAIR; v++)
                kept.rows[m] |= u64((j % 4 + v == 0   ? words.at[0]
                                     : j % 4 + v == 1 ? words.at[1]
                                     : j % 4 + v == 2 ? words.at[2]
                                                      : words.at[3]) >= a.threshold)
                                << (n + v);
        }
    }
    return kept;
}

// For a tile (keys, queries).
DEVICE Kept kept_by_columns(const Arguments& a, int b, int head, int first, int start) {
    Kept kept;
    UNROLL for (int m = 0; m < ROWS; m++) {
        const int j = first + row(m);
        kept.rows[m] = 0;
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const Words words = philox(j / 4, start + score_column(n), head, b, a.seed_low, a.seed_high);
            kept.rows[m] |= u64((j % 4 == 0   ? words.at[0]
                                 : j % 4 == 1 ? words.at[1]
                                 : j % 4 == 2 ? words.at[2]
                                              : words.at[3]) >= a.threshold)
                            << n;
        }
    }
    return kept;
}
