// Which tile of which head a block works on. The grid is one axis, so that no axis runs out; `at` is a place on it.
//
// Splits vary fastest, then the heads of a section (as many as share the L2), then the tiles of rows, then sections.
#pragma once
#include "numbers.cuh"

struct Place {
    int batch, head;  // of the heads that the grid counts
    int tile, split;
};

// `all` heads, of which each batch entry has `heads`.
DEVICE Place place(const Arguments& a, u32 at, u32 all, int heads, int tiles, bool last_first) {
    const int split = at % a.splits;
    at /= a.splits;
    const u32 whole = u32(a.section) * tiles;
    const u32 first = at / whole * a.section;
    const u32 here = smaller<u32>(a.section, all - first);
    const int tile = at % whole / here;
    const u32 head = first + at % whole % here;
    return Place{int(head / heads), int(head % heads), last_first ? tiles - 1 - tile : tile, split};
}
DEVICE Place place(const Arguments& a, int heads, int tiles, bool last_first) {
    return place(a, block_index(), u32(a.batch) * heads, heads, tiles, last_first);
}

// The same for few queries, which would wait for divisions: splits, tiles of rows, heads, batch entries.
DEVICE Place place_of_few(const Arguments& a) {
    const u32 at = block_index(), rows = quotient(at, a.by_splits), head = quotient(rows, a.by_tiles);
    const u32 batch = quotient(head, a.by_packs);
    return Place{int(batch), int(head - batch * a.packs), int(rows - head * a.tiles), int(at - rows * a.splits)};
}
