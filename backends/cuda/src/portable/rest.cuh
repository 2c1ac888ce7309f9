// What a backward with a float mask has of each row beside base: P = exp(S - base - rest).
//
// A mask may move all scores of a row so far from 0 (-1e9, as models hide padding) that lse has no digits left for the
// logarithm of their sum. In such rows base is the largest score, and rest the logarithm of the sum relative to it, in
// the unit of the exponential (prepare_added.cu). In all others rest is 0.
#pragma once
#include "portable/mask.cuh"

#define ADDED (MASK_KIND > BOOL_MASK)

// (batch, heads, padded), behind base.
DEVICE Real* rest_of(const Arguments& a) {
    return reinterpret_cast<Real*>(a.base) + i64(a.batch) * a.heads * a.padded;
}
