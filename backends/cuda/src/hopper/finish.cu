// Gradients from sums: of queries, and of the keys and values whose steps were split among blocks.
//
// A warpgroup takes 64 rows: first those of all heads' queries, then of all key heads' keys, then of their values. Parts
// of different splits are added in their order.
//
// A block waits for those blocks alone that add to its rows, all of the same key head, and so begins where the launch
// before leaves SMs without work. `awaited` is how many tiles of keys that launch has of a key head.
#include "gradient_rows.cuh"
#include "hopper/backward/sums.cuh"
#include "hopper/store.cuh"

static_assert(WARPS == 4, "a warpgroup");

// 64 rows of a gradient.
struct Rows {
    Gradient which;
    float* sums;
    i64 apart;  // numbers between the parts of splits
    int splits;
    int b, h;  // with VARLEN b is 0, and rows are those of all sequences
    int heads, first, length, dim;
    float weight;
    void* to;

    DEVICE Rows(const Arguments& a) {
        const i64 batch = VARLEN ? 1 : a.batch;
        const i64 of_queries = a.grad_query ? batch * a.heads * (VARLEN ? a.saved_rows / 64 : a.padded / 64) : 0;
        const int heads_kv = a.heads / a.group, tiles_kv = tiles_of_keys(a);
        const i64 of_keys = batch * heads_kv * tiles_kv;
        i64 tile = block_index(), tiles = VARLEN ? a.saved_rows / 64 : a.padded / 64;
        which = OF_QUERY, splits = 1, heads = a.heads, length = a.queries, dim = a.dim;
        to = a.grad_query, weight = a.scale, apart = 0;
        sums = sums_of(a.sums, tile);
        if (tile >= of_queries) {
            tile -= of_queries, tiles = tiles_kv;
            which = tile < of_keys ? OF_KEY : OF_VALUE;
            sums = sums_of(a.parts, tile);
            apart = 2 * of_keys * (64 * BLOCK_D);
            splits = a.splits, heads = heads_kv, length = a.keys, dim = which == OF_KEY ? a.dim : a.dim_v;
            to = which == OF_KEY ? a.grad_key : a.grad_value, weight = which == OF_KEY ? a.scale : a.keep_scale;
            if (which == OF_VALUE) tile -= of_keys;
        }
        b = int(tile / tiles / heads), h = int(tile / tiles % heads), first = tile % tiles * 64;
        if (VARLEN) find(a, tile % tiles);
    }
    // Of a head.
    DEVICE i64 all(const Arguments& a) const {
        return !VARLEN ? length : which == OF_QUERY ? a.query_rows : a.key_rows;
    }

private:
    // Of all sequences: those of one are from `first` to `length`.
    DEVICE void find(const Arguments& a, i64 tile) {
        const u8* const offsets = which == OF_QUERY ? a.query_offsets : a.key_offsets;
        const int bytes = which == OF_QUERY ? a.query_offset_bytes : a.key_offset_bytes;
        const int sequence = sequence_of<SAVED>(offsets, bytes, tile * 64 / SAVED, a.batch);
        const i64 begin = offset_at(offsets, bytes, sequence);
        const i64 end = is_past(a, sequence) ? all(a) : offset_at(offsets, bytes, sequence + 1);
        first = int(begin + tile * 64 - first_tile_of<SAVED>(sequence, begin) * SAVED), length = int(end);
    }
};

KERNEL finish(const Arguments a) {
    const Rows rows(a);
    if (thread_index() == 0) {
        await_number(done_of(a, (rows.b * rows.heads + rows.h) / (rows.which == OF_QUERY ? a.group : 1)), a.awaited);
        // What is launched next waits for this launch alone, and so this one for the launch before.
        if (!a.awaited || block_index() + 1 == blocks()) await_launch_before();
    }
    barrier();
    if (!rows.to) return;
    float sums[BLOCK_D / 2];
    UNROLL for (float& sum : sums) sum = 0;
    ROLLED for (int split = 0; split < rows.splits; split++)
        UNROLL for (int c = 0; c < BLOCK_D / 8; c++) {
            float* const quad = quad_of(rows.sums + split * rows.apart, c);
            const Chunk<float> part = *reinterpret_cast<const Chunk<float>*>(quad);
            UNROLL for (int k = 0; k < 4; k++) sums[4 * c + k] += part.at[k];
        }
    UNROLL for (int m = 0; m < 2; m++) {
        const int row = rows.first + row_of(m);
        const i64 line = gradient_row(a, rows.which, rows.b, rows.h, row, rows.heads, rows.all(a));
        T* const to = row < rows.length ? static_cast<T*>(rows.to) + line * rows.dim : nullptr;
        store_row<BLOCK_D>(to, sums, m, rows.weight, rows.dim);
    }
}
