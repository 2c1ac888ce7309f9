// How far a batch entry goes, or a sequence of those that lie one after another (VARLEN), where keys are in no pages.
#pragma once
#include "positions.cuh"
#include "sequences.cuh"

#if VARLEN
// The rows past the last sequence are one that has no keys.
DEVICE Extent extent_in(const Arguments& a, int b) {
    const bool past = is_past(a, b);
    const int next = past ? b : b + 1;
    const i64 first_query = query_offset(a, b), first_key = key_offset(a, b);
    const int queries = int((past ? a.query_rows : query_offset(a, next)) - first_query);
    const int keys = int(key_offset(a, next) - first_key);
    return Extent{keys, a.bottom_right ? keys - queries : 0, queries, first_query, first_key};
}
#else
DEVICE Extent extent_in(const Arguments& a, int b) { return extent(a, b); }
#endif
