// The online softmax of a thread's rows: tile after tile, scores become weights relative to the largest so far.
//
//   here = max(top, max_n s[n])    rescale = e^(top - here)    p[n] = e^(s[n] - here)
//   total = total rescale + sum_n p[n]                         O = O rescale + p V, of which the product is not here
//
// Invariants: after each tile, `total` and the sums of values are relative to the row's `top`; `total` is of the
// thread's own columns until `finish`. Scores that need nothing but a positive factor (FOLD) are never multiplied: the
// factor is a part of the exponential, and `top` is the largest q . k. A row that has seen no key keeps top = -inf and
// weights of 0.
#pragma once
#include "portable/scores.cuh"

struct Softmax {
    Real total[ROWS], top[ROWS];

    DEVICE Softmax() {
        UNROLL for (int m = 0; m < ROWS; m++) top[m] = -INFINITE, total[m] = 0;
    }
    // Turns the scores of a tile into weights, and rescales the sums of values. `count` rows are there.
    DEVICE void weigh(Scores& p, Real (&sums)[ROWS][COLUMNS<BLOCK_DV>], Real factor, int count) {
        UNROLL for (int m = 0; m < ROWS; m++) {
            if (TEAMS > 1 && first_row(m) >= count) continue;  // no lane has a row: the products go by for nothing
            const Real base = raise(m, p[m], sums[m], factor);
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
                p[m][n] = FOLD ? power(p[m][n] * factor - base) : power((p[m][n] - base) * factor);
                total[m] += p[m][n];
            }
        }
    }
    DEVICE void finish() {
        UNROLL for (int m = 0; m < ROWS; m++) total[m] = row_sum(total[m]);
    }

private:
    // Makes the largest score so far the row's `top`. Returns what is to be taken from scores before the exponential,
    // in which -inf minus -inf is 0.
    DEVICE Real raise(int m, const Real (&scores)[COLUMNS<BLOCK_N>], Real (&sums)[COLUMNS<BLOCK_DV>], Real factor) {
        Real here = scores[0];
        UNROLL for (int n = 1; n < COLUMNS<BLOCK_N>; n++) here = larger(here, scores[n]);
        here = larger(top[m], row_max(here));
        const Real base = here == -INFINITE ? Real(0) : FOLD ? rounded(here, factor) : here;
        const Real rescale = FOLD ? power(rounded(top[m], factor) - base) : power((top[m] - base) * factor);
        top[m] = here;
        total[m] *= rescale;
        UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[c] *= rescale;
        return base;
    }
};
