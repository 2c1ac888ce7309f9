// Sequences that lie one after another (VARLEN): where their rows are, in arrays whose batch is 1.
//
// Sequence b is rows offsets[b] to offsets[b + 1]. One batch entry more has no sequence: who works on it clears the
// results of the rows past the last one.
//
// Rows are counted in whole tiles as those of batch entries are: sequence b has those from tile offsets[b] / SIZE + b
// of its head on, which leaves room for its own rounded up and needs no sums over others. What the backward keeps of
// rows lies so, in tiles of SAVED.
#pragma once
#include "numbers.cuh"

constexpr int SAVED = 128;  // rows of the largest tile

DEVICE i64 offset_at(const u8* offsets, int bytes, int b) {
    return bytes == 4 ? reinterpret_cast<const int*>(offsets)[b] : reinterpret_cast<const i64*>(offsets)[b];
}
DEVICE i64 query_offset(const Arguments& a, int b) { return offset_at(a.query_offsets, a.query_offset_bytes, b); }
DEVICE i64 key_offset(const Arguments& a, int b) { return offset_at(a.key_offsets, a.key_offset_bytes, b); }

// Whether batch entry b is the one of the rows past the last sequence.
DEVICE bool is_past(const Arguments& a, int b) { return VARLEN && b == a.batch - 1; }

// Where batch entry b begins in an operand, in elements; with VARLEN, the sequence whose first row is `first`. By a
// function of the same, ptxas makes other kernels of what has no VARLEN, in float.
#define BEGIN_OF(x, b, first) (VARLEN ? (first) * (x).row : (b) * (x).batch)

// Rows of lse: of all heads, and which of them query i of a batch entry is, or of a sequence.
DEVICE i64 lines_of(const Arguments& a) {
    return VARLEN ? a.heads * a.query_rows : i64(a.batch) * a.heads * a.queries;
}
DEVICE i64 line_of(const Arguments& a, i64 b, i64 h, i64 first, i64 i) {
    return VARLEN ? h * a.query_rows + first + i : (b * a.heads + h) * a.queries + i;
}

// The first tile of sequence b in its head, which begins at row `first`.
template <int SIZE> DEVICE i64 first_tile_of(i64 b, i64 first) { return first / SIZE + b; }
// The sequence that a tile of a head belongs to, of the first `high` batch entries, which begin where `offsets` say. Each
// round asks for WAYS - 1 of these at a time and waits once: so no load has a condition, and of offsets of either type,
// which are less than 2^32, the low word is read.
constexpr int WAYS = 8;
template <int SIZE> DEVICE int sequence_of(const u8* offsets, int bytes, i64 tile, int high) {
    const u32* const words = reinterpret_cast<const u32*>(offsets);
    int low = 0;
    ROLLED while (high - low > 1) {
        const int step = ceil_div(high - low, WAYS);
        int found = low, at[WAYS];
        i64 first[WAYS];
        UNROLL for (int n = 1; n < WAYS; n++) {
            at[n] = smaller(low + n * step, high - 1);
            first[n] = first_tile_of<SIZE>(at[n], words[at[n] * (bytes / 4)]);
        }
        UNROLL for (int n = 1; n < WAYS; n++) found = first[n] <= tile ? at[n] : found;
        if (found + step < high) high = found + step;
        low = found;
    }
    return low;
}
template <int SIZE> DEVICE int sequence_of(const Arguments& a, i64 tile, int high) {
    return sequence_of<SIZE>(a.query_offsets, a.query_offset_bytes, tile, high);
}
// The same of a tile of keys, among all batch entries.
template <int SIZE> DEVICE int sequence_of_keys(const Arguments& a, i64 tile) {
    return sequence_of<SIZE>(a.key_offsets, a.key_offset_bytes, tile, a.batch);
}
// Where base and delta of query 0 of head h are.
DEVICE i64 saved_of(const Arguments& a, i64 b, i64 h, i64 first) {
    return VARLEN ? h * a.saved_rows + first_tile_of<SAVED>(b, first) * SAVED : (b * a.heads + h) * a.padded;
}

// Calls use(row) for the rows `from` to `to`, a warp each; this is block `part` of `parts` that share them.
template <class Use> DEVICE void each_past(i64 from, i64 to, int part, int parts, Use use) {
    const int warp = part * WARPS + thread_index() / 32;
    ROLLED for (i64 row = from + warp; row < to; row += i64(parts) * WARPS) use(row);
}
// A row of `dim` neighbouring columns, by a warp.
template <class V> DEVICE void clear_row(V* row, int dim) {
    ROLLED for (int d = thread_index() % 32; d < dim; d += 32) row[d] = V();
}
