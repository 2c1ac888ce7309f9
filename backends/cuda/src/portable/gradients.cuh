// From the products of one tile to the gradients of its scores, as every kernel of the backward needs them.
//
// With P = exp(S - lse) and delta = rowsum(dO O) - dlse: dS = P (dP - delta), where dP = dO V^T.
#pragma once
#include "gradient_rows.cuh"
#include "portable/rest.cuh"
#include "portable/scores.cuh"

// P of a score; `rest` is read where a float mask is ADDED. There a score is never above base: its last bit is 64 where
// the mask is -1e9, and another kernel may have rounded it the other way.
DEVICE Real weight_of(const Arguments& a, Real s, Real base, Real rest) {
    if (FOLD) return power(s * Real(a.factor) - base);
    return ADDED ? power((smaller(s, base) - base) * UNIT - rest) : power((s - base) * UNIT);
}

// Turns s, after `hide`, into the weights after dropout, dp into the gradients of the scores, and `inner` into those of
// scale * q . k, which softcap lies between (the same without it). `base`, `delta`, `rest` are of the element's query.
template <class Base, class Delta, class Rest>
DEVICE void score_gradients(Scores& s, Scores& dp, const Scores& tangents, Scores& inner, const Arguments& a, Base base,
                            Delta delta, Rest rest, const Kept& kept) {
    const Real keep_scale = Real(a.keep_scale);
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const bool hidden = s[m][n] == -INFINITE;
            const Real p = weight_of(a, s[m][n], base(m, n), rest(m, n));
            const Real kept_scale = !DROPOUT ? Real(1) : kept.at(m, n) ? keep_scale : Real(0);
            s[m][n] = DROPOUT && kept_scale == 0 ? Real(0) : p * kept_scale;
            const Real weight = DROPOUT && kept_scale == 0 ? Real(0) : dp[m][n] * kept_scale;
            // What is hidden may be NaN, which 0 times it is too.
            dp[m][n] = hidden ? Real(0) : p * (weight - delta(m, n));
            inner[m][n] = !SOFTCAP ? dp[m][n] : hidden ? Real(0) : dp[m][n] * (1 - tangents[m][n] * tangents[m][n]);
        }
}
