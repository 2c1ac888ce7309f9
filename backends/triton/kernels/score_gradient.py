"""Gradients of one tile of scores, by recomputation (FlashAttention-2): P = exp(S - lse) again, dS = P (dP - D).

dP = dO V^T, and D is that of ``prepare``. dQ = scale dS K (``query_gradient``), dK = scale dS^T Q and dV = P^T dO
(``key_gradients``). Each program owns what it writes, so that nothing is added atomically and the bits repeat.
"""

import triton
import triton.language as tl

from .tile import EVERY_EDGE, SOME_EDGES, hide, sloped, tanh, visible, weights


@triton.jit
def score_gradient(
    s, dp, base, delta, rest, i, n, start, hides, span, mask, slope, scores, keep, keep_scale,
    MASK_KIND: tl.constexpr, EDGE: tl.constexpr, STRETCH: tl.constexpr, ENDS: tl.constexpr, BOUND: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """From the products q . k and dO . v of one tile, either way round: the weights after dropout, dS, and dS q . k.

    The last is the gradient of scale * q . k: dS itself but for softcap, which lies between it and the float mask.
    EDGE and STRETCH as in the forward; with some edges, ``hides`` says whether this tile has one.
    """
    factor = scores.factor
    if not how.fold:
        s = s * factor
    if how.softcap:
        t = tanh(s)
        s = t * scores.cap
    if how.generic:
        t = tl.zeros_like(s)
        if scores.cap > 0.0:
            t = tanh(s)
            s = t * scores.cap
    if how.alibi:
        s = sloped(s, i, n, start, span[1], slope)
    if EDGE == EVERY_EDGE:
        s, seen = hide(s, i, n, start, span, mask, MASK_KIND, ENDS, BOUND, how)
    if EDGE == SOME_EDGES and hides:
        if STRETCH:
            seen = (start + n >= span[2]) & (start + n < span[0])
        else:
            seen = visible(i, start + n, span, True, how)
        s = tl.where(seen, s, float("-inf"))
    p = weights(s, base, rest, factor, how)
    dropped = p
    if how.dropout:
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if EDGE == EVERY_EDGE:  # hidden keys may hold NaN, which 0 times it is too
        ds = tl.where(seen, ds, 0.0)
    dqk = ds
    if how.softcap or how.generic:
        dqk = ds * (1.0 - t * t)
        if EDGE == EVERY_EDGE:
            dqk = tl.where(seen, dqk, 0.0)
    return dropped, ds, dqk
