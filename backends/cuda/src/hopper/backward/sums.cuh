// Sums in global memory: tiles of 64 rows in float32 as the registers of a warpgroup hold them, so that a warp has its
// part in one piece. Four numbers of a thread lie side by side, a quad: of 8 columns its two, in both its rows.
#pragma once
#include "hopper/wgmma.cuh"
#include "sequences.cuh"

constexpr int QUADS = 4 * 32;  // of a warp, of the same 8 columns

// The tile number `line` of `sums`.
DEVICE float* sums_of(void* sums, i64 line) { return static_cast<float*>(sums) + line * (64 * BLOCK_D); }

// How many tiles of keys are done of each key head: numbers that end where delta begins.
DEVICE u32* done_of(const Arguments& a, i64 head) {
    return static_cast<u32*>(a.delta) - i64(VARLEN ? 1 : a.batch) * (a.heads / a.group) + head;
}
// Where blocks add in turn: how many blocks are done with each tile of dQ, behind delta.
DEVICE u32* turns_of(const Arguments& a, i64 line) {
    const i64 rows = VARLEN ? a.heads * a.saved_rows : i64(a.batch) * a.heads * a.padded;
    return reinterpret_cast<u32*>(static_cast<float*>(a.delta) + rows) + line;
}

// Where the warp's quads of columns 8 c to 8 c + 7 begin, and the thread's; those of the next 8 columns follow.
DEVICE float* quads_of(float* tile, int c) { return tile + (thread_index() % 128 / 32 * (BLOCK_D / 8) + c) * QUADS; }
DEVICE float* quad_of(float* tile, int c) { return quads_of(tile, c) + 4 * (thread_index() % 32); }

// The thread's quads, to a warp's place in shared memory, and from there; and added to where quads of dQ begin.
template <int COUNT> DEVICE void leave_quads(float* to, const float (&sums)[COUNT]) {
    UNROLL for (int c = 0; c < COUNT / 4; c++) {
        const float* const x = sums + 4 * c;
        store_shared(reinterpret_cast<Chunk<float>*>(to + c * QUADS + 4 * (thread_index() % 32)),
                     Chunk<float>{{x[0], x[1], x[2], x[3]}});
    }
}
template <int COUNT> DEVICE void take_quads(float (&to)[COUNT], const float* from) {
    UNROLL for (int c = 0; c < COUNT / 4; c++) {
        const float* const quad = from + c * QUADS + 4 * (thread_index() % 32);
        const Chunk<float> x = load_shared(reinterpret_cast<const Chunk<float>*>(quad));
        UNROLL for (int k = 0; k < 4; k++) to[4 * c + k] = x.at[k];
    }
}
template <int COUNT> DEVICE void add_quads(float* to, const float (&sums)[COUNT]) {
    UNROLL for (int c = 0; c < COUNT / 4; c++) add_quad(to + c * QUADS + 4 * (thread_index() % 32), sums + 4 * c);
}

// Tiles of the keys of a head, where dK and dV are summed: blocks may have two at once. With VARLEN, of all sequences, as
// those of queries lie; and where a sequence's begin.
DEVICE int tiles_of_keys(const Arguments& a) {
    return (VARLEN ? int(a.key_rows / SAVED) + a.batch : ceil_div(a.keys, 128)) * 2;
}
DEVICE i64 first_of_keys(i64 b, i64 first) { return VARLEN ? 2 * first_tile_of<SAVED>(b, first) : 0; }
