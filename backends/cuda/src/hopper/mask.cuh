// What a bool mask leaves of every tile of KEYS keys, as survey.cu finds it and the others use it.
//
// `mask_sets` (mask_batch, mask_heads, groups, 2, words): a bit for each tile, of 64 rows of the mask, a group. SEEN
// says that some row sees some key of it, HIDDEN that some row does not see some key.
// `mask_bits` (mask_batch, mask_heads, tiles, rows, CHUNKS): what a row sees of a tile; rows in whole groups. Chunk j,
// 16 bits, has column 16 j + 8 c + 2 q + e at 4 q + 2 c + e: four bits for the lanes l of wgmma with l % 4 = q. Chunks
// past the tile's columns are not written.
//
// A mask with one row for all queries is one group of one row.
#pragma once
#include "numbers.cuh"

enum { SEEN, HIDDEN };
constexpr int GROUP = 64, CHUNKS = 8;

template <int KEYS> DEVICE int mask_tiles(const Arguments& a) { return ceil_div(a.keys, KEYS); }
template <int KEYS> DEVICE int mask_words(const Arguments& a) { return ceil_div(mask_tiles<KEYS>(a), 32); }
DEVICE int mask_groups(const Arguments& a) { return ceil_div(a.mask_rows, GROUP); }

// Which of the mask's planes (rows, columns) a head has.
DEVICE int mask_plane(const Arguments& a, int batch, int head) {
    return (a.mask_batch == 1 ? 0 : batch) * a.mask_heads + (a.mask_heads == 1 ? 0 : head);
}
// The words of a group.
template <int KEYS> DEVICE u32* mask_set(const Arguments& a, int plane, int group, int kind) {
    return a.mask_sets + (i64(plane * mask_groups(a) + group) * 2 + kind) * mask_words<KEYS>(a);
}
// The chunks of a row.
template <int KEYS> DEVICE u16* mask_row(const Arguments& a, int plane, int tile, int row) {
    const int rows = a.mask_rows == 1 ? 1 : mask_groups(a) * GROUP;
    return a.mask_bits + CHUNKS * (i64(plane * mask_tiles<KEYS>(a) + tile) * rows + (rows == 1 ? 0 : row));
}
