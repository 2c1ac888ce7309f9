// How far the thread's two rows of a tile of scores lie from columns (ALIBI), in whole numbers: the nearest lose no digits to
// those far away. The second row is 8 from the first, and columns come by eights, so that its distances are those that the
// first row had to the columns before.
#pragma once
#include "hopper/scores.cuh"

struct Distances {
    const float first;  // from the first row to the thread's first column
    float here[2], before[2];

    // Of a tile's columns; `apart` is from the first of the thread's to its first row.
    DEVICE explicit Distances(int apart) : first(-float(apart)) {
        UNROLL for (int e = 0; e < 2; e++) here[e] = to(-1, e);
    }
    // On to columns 8 c and 8 c + 1, c by c.
    DEVICE void go_to(int c) {
        UNROLL for (int e = 0; e < 2; e++) before[e] = here[e], here[e] = to(c, e);
    }
    DEVICE float of(int m, int e) const { return m == 0 ? here[e] : before[e]; }

private:
    DEVICE float to(int c, int e) const { return fabsf(first + float(8 * c + e)); }
};
