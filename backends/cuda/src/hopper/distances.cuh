// How far the thread's two rows of a tile of scores lie from columns (ALIBI). Both are whole numbers, so that the nearest
// lose no digits to those far away. The second row is 8 from the first, and columns come by eights: its distances are those
// that the first row had to the columns before.
#pragma once
#include "hopper/scores.cuh"

struct Distances {
    const float first;  // from the first row to the first column
    float here[2], before[2];

    // To the thread's two columns of the eight that come before a tile's; `apart` is from its first column to the first row.
    DEVICE explicit Distances(int apart) : first(-float(apart)) { go_to(-1); }
    // On to columns 8 c and the one after it.
    DEVICE void go_to(int c) {
        UNROLL for (int e = 0; e < 2; e++) before[e] = here[e], here[e] = fabsf(first + float(8 * c + e));
    }
    DEVICE float of(int m, int e) const { return m == 0 ? here[e] : before[e]; }
};
