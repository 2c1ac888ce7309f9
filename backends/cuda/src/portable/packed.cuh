// The rows of a block of the forward: queries of one head or, packed, of all query heads that share a key head.
//
// Row r is query r / pack of head r % pack of the pack, so that a few queries still fill a tile and their keys are
// loaded once. Consecutive rows are the same query of one head after another: what they see grows with r.
#pragma once
#include "portable/mask.cuh"
#include "order.cuh"
#include "schedule.cuh"

struct PackedRows {
    const Arguments& a;
    int all;                 // of the pack
    int batch, first_head;
    int first, count;        // of the block
    int split;
    i64 head_kv;
    Extent extent;

    DEVICE PackedRows(const Arguments& a) : a(a) {
        all = a.queries * a.pack;
        const Place at = TEAMS > 1 ? place_of_few(a) : place(a, a.packs, ceil_div(all, BLOCK_M), true);
        batch = TEAMS > 1 && (PAGED || LENGTHS || VARLEN) ? by_length(a, at.batch) : at.batch;
        first_head = at.head * a.pack, first = at.tile * BLOCK_M, split = at.split;
        head_kv = quotient(first_head, a.by_group);
        extent = VARLEN || LENGTHS ? extent_at(a, batch) : whole(a);
        if (VARLEN) all = queries_in(a, extent) * a.pack;
        count = smaller(BLOCK_M, all - first);
    }
    // Of the grid, for each batch entry and pack.
    DEVICE int tiles() const { return ceil_div(a.queries * a.pack, BLOCK_M); }
    // What any of them sees, and every one.
    DEVICE Reach reach() const {
        return ::reach(keys_of(a, extent, query(first)), keys_of(a, extent, query(first + count - 1)));
    }

    // Of row r.
    DEVICE int query(int r) const { return quotient(r, a.by_pack); }
    DEVICE int head(int r) const { return first_head + r - query(r) * a.pack; }

    // Row m of a thread: which one it is, at which key it stands, what it sees, where it begins in the mask; and which
    // weights dropout keeps of all of them, for the keys from `start` on.
    DEVICE int mine(int m) const { return first + warp_row() + row(m); }
    DEVICE int stands_at(int m) const { return query(mine(m)) + extent.offset; }
    DEVICE Span sees(int m) const { return mine(m) < all ? keys_of(a, extent, query(mine(m))) : Span{0, 0}; }
    DEVICE i64 mask(int m) const {
        const int r = smaller(mine(m), all - 1);
        return batch * a.mask.batch + head(r) * a.mask.head + query(r) * a.mask.row;
    }
    DEVICE Kept kept(int start) const {
        return kept_by_rows(
            a, batch, [&](int m) { return head(mine(m)); }, [&](int m) { return query(mine(m)); }, start);
    }
};
