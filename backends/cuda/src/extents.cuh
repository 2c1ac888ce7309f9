// How far a batch entry goes, or a sequence of those that lie one after another (VARLEN). The grid is that of as many
// batch entries of `queries` and `keys`, the most that any sequence has, and a block whose tile lies past its sequence's
// end returns at once.
#pragma once
#include "sequences.cuh"
#include "positions.cuh"

#if VARLEN
// Of sequence b; of the rows past the last one there are none, but where they begin. Keys in pages (PAGED) have lengths.
DEVICE Extent extent_at(const Arguments& a, int b) {
    const int next = is_past(a, b) ? b : b + 1;
    const i64 first_query = query_offset(a, b), first_key = PAGED ? 0 : key_offset(a, b);
    const int queries = int(query_offset(a, next) - first_query);
    const int keys = !PAGED ? int(key_offset(a, next) - first_key) : is_past(a, b) ? 0 : extent(a, b).end;
    return Extent{keys, a.bottom_right ? keys - queries : 0, queries, first_query, first_key};
}
#else
DEVICE Extent extent_at(const Arguments& a, int b) { return extent(a, b); }
#endif
