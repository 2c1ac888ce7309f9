// What a launch passes to a kernel: one structure for all of them, by value. arguments.py has the same fields.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// What a counter is before the first launch and after each: every bit is 1, as workspace.py has it.
constexpr u32 BLANK = ~0u;

// An array (batch, heads, rows, columns) and its strides in elements; 0 along an axis that is broadcast.
struct Operand {
    u8* at;
    i64 batch, head, row, column;
};

// A number that others are divided by, without the time that a division takes: `quotient`.
struct Divisor {
    u32 multiplier, shift;
};

struct Arguments {
    Operand query;     // (batch, heads, queries, dim)
    Operand key;       // (batch, heads / group, keys, dim)
    Operand value;     // (batch, heads / group, keys, dim_v)
    Operand out;       // (batch, heads, queries, dim_v), written by the forward
    Operand grad_out;  // (batch, heads, queries, dim_v)
    Operand mask;      // broadcast to (batch, heads, queries, keys)
    const u8* lengths; // (batch,) integers of |length_bytes| bytes, signed where that is negative
    i64 length_stride; // in bytes
    void* lse;         // (batch, heads, queries), natural logarithm; null where one launch is all and nobody asks
    void* grad_lse;    // the same, or null for zero
    // Of split keys: numerators (splits, batch, heads, queries, dim_v); and their maxima, then their sums (2, splits, batch,
    // heads, queries). hopper/latent/even.cuh has places of BLOCK_M rows instead, and behind the sums where each row's
    // parts are (batch, heads, queries, 2). Or what blocks leave to others.
    void* parts;
    void* sums;
    void* base;        // (batch, heads, padded): lse in the unit of the exponential, +inf where a row weighs nothing
    void* delta;       // (batch, heads, padded): rowsum(dO O) - dlse
    void* grad_query;  // like its operand, dense; `turned` says in which order
    void* grad_key;
    void* grad_value;
    void* grad_mask;
    u32* counter;      // of tiles that were taken, from BLANK on; null where nothing is counted
    u32* mask_sets;    // which tiles a bool mask hides, and
    u16* mask_bits;    // what it hides of them: hopper/mask.cuh
    double scale;      // on q . k
    double factor;     // on q . k, before tanh or within the exponential
    double cap;        // of softcap
    double keep_scale; // 1 / (1 - dropout)
    int batch, heads, group;  // with VARLEN there is one more than sequences (sequences.cuh)
    int pack;          // query heads that share a tile of rows: row r is query r / pack of head r % pack
    int packs, tiles;  // of all heads; of all rows
    int queries, padded, keys, dim, dim_v;  // with VARLEN the most queries and keys of any sequence
    int left, right;   // keys that a query sees before and after its own
    int bottom_right;  // whether the diagonal ends at the last key
    int section;       // heads that run side by side
    int splits, chunk; // parts of the keys, or places for them, and keys of each
    Divisor by_splits, by_tiles, by_packs, by_pack, by_group;
    int length_bytes;  // 0 without lengths
    int turned;        // bits of the gradients (query, key, value) whose heads lie inside their rows
    int mask_batch, mask_heads, mask_rows, mask_columns;  // its shape
    u32 seed_low, seed_high;
    u32 threshold;     // a weight is dropped where its random word is below
    int mask_kind;     // MASK_KIND, for generic kernels
    int query_offset_bytes, key_offset_bytes;  // VARLEN, and all below: 4 or 8
    const u8* query_offsets;  // (batch,) integers: where each sequence begins, and the last one ends
    const u8* key_offsets;
    i64 query_rows, key_rows; // of all sequences, and past the last one
    i64 saved_rows;           // of a head in base and delta
    const u8* sinks;          // (heads,) Reals: SINKS
    const u8* slopes;         // (batch, heads) Reals, or of one batch entry for all: ALIBI
    const u8* table;          // (batch, keys / page) integers of |table_bytes|: PAGED
    i64 sink_step;            // from one to the next in elements, as all below
    i64 slope_batch, slope_head;
    i64 table_batch, table_step;
    int table_bytes, page;    // 4 or 8; rows of a page
    Divisor by_page;
    const u8* tree;           // (batch, queries, bytes), a bit for each of the newest keys: TREE
    i64 tree_batch, tree_row;
    int values_within;        // whether values are the first columns of the keys, in the same memory: hopper/latent.cu
    int awaited;              // tiles of keys of a key head, once for each split, of the launch before: hopper/finish.cu
    int key_tiles;            // the same of all key heads: CONTINUED
    const u8* key_scales;     // (pages, heads / group) Reals, by which elements of 8 bits are multiplied: EIGHT
    const u8* value_scales;
    i64 key_scale_page, key_scale_head;  // from one to the next in elements; 0 where all pages, or heads, have the same
    i64 value_scale_page, value_scale_head;
};
