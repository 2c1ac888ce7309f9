// Scores that fall with the distance from query to key (ALIBI; Press et al. 2022), by a slope of the head.
#pragma once
#include "portable/products.cuh"
#include "slopes.cuh"

// Takes slope times distance from the scores of a tile whose columns begin at `start`. `slope(m)` and `place(m)` are of
// a thread's row, the place being that column which its distance is 0 to.
template <class Slope, class Place>
DEVICE void slant(Real (&s)[ROWS][COLUMNS<BLOCK_N>], int start, Slope slope, Place place) {
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Real by = slope(m), at = Real(place(m) - start - score_column(0));
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const Real apart = at - Real(score_column(n) - score_column(0));  // less a constant
            s[m][n] -= by * larger(apart, -apart);
        }
    }
}
