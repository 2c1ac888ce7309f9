// The dropout mask of a seed, as attnswitch.problem.philox defines it: word j % 4 of Philox4x32 at (j / 4, i, h, b) under the
// seed (Salmon, Moraes, Dror and Shaw 2011).
#pragma once
#include "primitives.cuh"

struct Words {
    u32 at[4];
};

DEVICE Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    UNROLL for (int round = 0; round < PHILOX_ROUNDS; round++) {
        const u32 high0 = multiply_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high2 = multiply_high(0xCD9E8D57u, c2), low2 = 0xCD9E8D57u * c2;
        c0 = high2 ^ c1 ^ k0;
        c1 = low2;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}
