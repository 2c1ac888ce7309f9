// Queries that are a tree (TREE): each has bits that say which of the newest keys, those of the queries, it sees.
#pragma once
#include "portable/packed.cuh"
#ifndef TREE
#define TREE 0
#endif

// Where the bits of row m of a thread begin, or of the last row where it is past that.
DEVICE const u8* bits_of(const Arguments& a, const PackedRows& rows, int m) {
    const i64 query = rows.query(smaller(rows.mine(m), rows.all - 1));
    return a.tree + (VARLEN ? i64(0) : rows.batch * a.tree_batch) + (first_query(rows.extent) + query) * a.tree_row;
}

// -inf where the bits do not name a key, for the columns from `start`. Older keys have none, and are left as they are.
DEVICE void prune(Scores& s, const Arguments& a, const PackedRows& rows, int start) {
    const int first_own = rows.extent.offset;  // as the last query stands at the last key
    if (start + BLOCK_N <= first_own) return;
    const int end = smaller(rows.extent.end, first_own + a.queries);  // a sequence may have more than the caller said
    UNROLL for (int m = 0; m < ROWS; m++) {
        const u8* const bits = bits_of(a, rows, m);
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const int key = start + score_column(n), own = key - first_own;  // the query whose key it is
            if (own >= 0 && key < end && !(bits[own / 8] >> own % 8 & 1)) s[m][n] = -INFINITE;
        }
    }
}
