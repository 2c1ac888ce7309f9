// One more key for every row (SINKS): its score is a number of the head's, as it is, and its value is 0.
//
// It joins a row when all keys have been put together, so that it is counted once, however these are split.
#pragma once
#include "numbers.cuh"

DEVICE Real sink_of(const Arguments& a, i64 head) {
    return reinterpret_cast<const Real*>(a.sinks)[head * a.sink_step];
}

// Counts a sink in a row's largest score and the sum of its weights, relative to that. Returns what the sums of values
// are to be multiplied by, which is 1 where the sink is -inf. `top` is in the unit of scores (FOLD: of the exponential);
// `natural` is the same in natural units.
DEVICE Real join_sink(Real sink, Real top, Real& natural, Real& total) {
    const Real own = FOLD ? rounded(sink, UNIT) : sink, step = FOLD ? Real(1) : UNIT;
    const Real most = larger(top, own);
    const Real base = most == -INFINITE ? Real(0) : most;
    const Real rescale = power((top - base) * step);
    total = multiply_add(total, rescale, power((own - base) * step));
    if (own > top) natural = sink;
    return rescale;
}
