// Which keys a query sees, and which queries see a key, by position and length: each an interval.
//
// Query i stands at key i + offset and sees from i + offset - left to i + offset + right, before `end`. Both ends of
// the interval grow with i, so that the first and last row of a tile say what all of its rows see.
#pragma once
#include "numbers.cuh"

struct Span {
    int from, to;  // empty where to <= from
};

struct Extent {
    int end;     // keys of a batch entry
    int offset;  // of its diagonal
#if VARLEN
    int queries;
    i64 first_query, first_key;  // rows before it
#endif
};

// Queries of a batch entry, and rows before it where sequences lie one after another. What is the same for all entries
// is no member: ptxas would allot registers in another way, even where it is a constant.
#if VARLEN
DEVICE int queries_in(const Arguments&, Extent e) { return e.queries; }
DEVICE i64 first_query(Extent e) { return e.first_query; }
DEVICE i64 first_key(Extent e) { return e.first_key; }
#else
DEVICE int queries_in(const Arguments& a, Extent) { return a.queries; }
DEVICE i64 first_query(Extent) { return 0; }
DEVICE i64 first_key(Extent) { return 0; }
#endif

DEVICE Extent extent_of(const Arguments& a, int end) { return Extent{end, a.bottom_right ? end - a.queries : 0}; }

// Of batch entries that have all keys.
DEVICE Extent whole(const Arguments& a) { return extent_of(a, a.keys); }

DEVICE Extent extent(const Arguments& a, int b) {
    int end = a.keys;
    if (a.length_bytes) {
        const u8* at = a.lengths + b * a.length_stride;
        i64 length = 0;
        switch (a.length_bytes) {
            case -1: length = *reinterpret_cast<const signed char*>(at); break;
            case -2: length = *reinterpret_cast<const short*>(at); break;
            case -4: length = *reinterpret_cast<const int*>(at); break;
            case 1: length = *at; break;
            case 2: length = *reinterpret_cast<const u16*>(at); break;
            case 4: length = *reinterpret_cast<const u32*>(at); break;
            default: length = *reinterpret_cast<const i64*>(at);
        }
        end = int(smaller<i64>(larger<i64>(length, 0), a.keys));
    }
    return extent_of(a, end);
}

// Keys that query i sees.
DEVICE Span keys_of(const Arguments& a, Extent e, int i) {
    const int place = i + e.offset;
    return Span{larger(place - a.left, 0), smaller(place + a.right + 1, e.end)};
}

// Queries that see key j.
DEVICE Span queries_of(const Arguments& a, Extent e, int j) {
    const int place = j - e.offset;
    return Span{larger(place - a.right, 0), j < e.end ? smaller(place + a.left + 1, queries_in(a, e)) : 0};
}

// What a tile of rows needs: all that any of its rows sees, and what each of them sees.
struct Reach {
    Span any, every;
    DEVICE int first_tile() const { return any.from / BLOCK_N; }
    DEVICE int tiles() const { return any.to > any.from ? ceil_div(any.to, BLOCK_N) - first_tile() : 0; }
    // Whether the tile of columns at `start` holds a position that some row does not see.
    DEVICE bool hides(int start) const { return start < every.from || start + BLOCK_N > every.to; }
};

DEVICE Reach reach(Span first, Span last) { return Reach{{first.from, last.to}, {last.from, first.to}}; }
