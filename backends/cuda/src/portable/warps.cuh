// For kernels whose warps take one row each: sums and maxima over a warp.
#pragma once
#include "numbers.cuh"

DEVICE Real warp_sum(Real x) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

DEVICE Real warp_max(Real x) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) x = larger(x, shuffle_xor(x, lanes));
    return x;
}
