// Products of a warpgroup on Hopper's tensor cores: asynchronous, with operands in shared memory as TMA leaves them.
//
// A warpgroup multiplies 64 rows. Sums lie in registers like those of mma: the thread of lane l of warp w holds rows
// 16 w + l / 4 (m = 0) and 8 further (m = 1); of column 8 c + 2 (l % 4) + e it is sums[4 c + 2 m + e]. Packed in pairs,
// that is the left operand of the next product.
//
// Invariants: registers of a product under way are neither read nor written before `wait`; `hold` keeps the compiler
// from moving such accesses across it. Left operands in registers are rewritten only when no product at all is under
// way: ptxas before 13.3 does not keep them apart otherwise.
#pragma once
#include "hopper/tma.cuh"

// Where a matrix lies in shared memory, in units of 16 bytes. It is worked out of what the compiler knows to be the same
// in all lanes (stages, and the number of the warpgroup by `broadcast`), so that it adds in uniform registers, and need
// not move every sum there.
struct Matrix {
    u32 place;
    DEVICE explicit Matrix(u32 place) : place(place) {}
    // The descriptor of the same some bytes on. The low word holds the address and `panel`, the bytes between panels
    // where rows are what is summed over (elsewhere it is not read), the high one the bytes between groups of 8 rows and
    // the kind of swizzle.
    DEVICE u64 advanced(int bytes, int panel = 0) const {
        return u64(HIGH) << 32 | (place + (u32(bytes >> 4) + (u32(panel >> 4) << 16)));
    }
    static constexpr u32 HIGH = 8 * PANEL * sizeof(T) >> 4 | 1u << 30;
};

// -- products of tiles ------------------------------------------------------------------------------------------------

constexpr int ROW_BYTES = PANEL * sizeof(T);

// Operands in shared memory are whole tiles, or some rows of a tile of ROWS.

// sums (+)= left (64 x DEPTH) right (COLUMNS x DEPTH)^T, both in shared memory.
template <int COLUMNS, int DEPTH, int ROWS = COLUMNS, bool KEEP = false>
DEVICE void product_nt(float (&sums)[COLUMNS / 2], Matrix left, Matrix right) {
    UNROLL for (int k = 0; k < DEPTH; k += 16) {
        const int panel = k / PANEL, within = k % PANEL * int(sizeof(T));
        const u64 a_k = left.advanced(panel * 64 * ROW_BYTES + within);
        const u64 b_k = right.advanced(panel * ROWS * ROW_BYTES + within);
        if (k == 0 && !KEEP)
            Instruction<COLUMNS>::template nt<0>(sums, a_k, b_k);
        else
            Instruction<COLUMNS>::template nt<1>(sums, a_k, b_k);
    }
}

// sums += left (64 x DEPTH, packed) right (DEPTH x COLUMNS in shared memory).
template <int COLUMNS, int DEPTH, int ROWS = DEPTH>
DEVICE void product_nn(float (&sums)[COLUMNS / 2], const u32 (&left)[DEPTH / 16][4], Matrix right) {
    UNROLL for (int k = 0; k < DEPTH / 16; k++)
        Instruction<COLUMNS>::nn(sums, left[k], right.advanced(k * 16 * ROW_BYTES, ROWS * ROW_BYTES));
}

// The same of left (64 x DEPTH, one panel) in shared memory.
template <int COLUMNS, int DEPTH, int ROWS = DEPTH>
DEVICE void product_nn(float (&sums)[COLUMNS / 2], Matrix left, Matrix right) {
    static_assert(DEPTH <= PANEL, "one panel");
    UNROLL for (int k = 0; k < DEPTH; k += 16)
        Instruction<COLUMNS>::template nn<1>(sums, left.advanced(k * sizeof(T)),
                                             right.advanced(k * ROW_BYTES, ROWS * ROW_BYTES));
}

// sums (+)= left^T right, of left (DEPTH x 64) and right (DEPTH x COLUMNS), one panel each, both in shared memory.
template <int COLUMNS, int DEPTH, bool KEEP>
DEVICE void product_tn(float (&sums)[COLUMNS / 2], Matrix left, Matrix right) {
    static_assert(COLUMNS <= PANEL, "one panel");
    UNROLL for (int k = 0; k < DEPTH; k += 16) {
        if (k == 0 && !KEEP)
            Instruction<COLUMNS>::template tn<0>(sums, left.advanced(k * ROW_BYTES), right.advanced(k * ROW_BYTES));
        else
            Instruction<COLUMNS>::template tn<1>(sums, left.advanced(k * ROW_BYTES), right.advanced(k * ROW_BYTES));
    }
}

// Packed numbers of the warpgroup's 64 rows to shared memory, swizzled as TMA would have brought them: from column
// `from` on, in panels of 64 rows.
template <int COUNT> DEVICE void store_packed(T* to, const u32 (&packed)[COUNT][4], int from = 0) {
    const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane % 16;
    UNROLL for (int k = 0; k < COUNT; k++) {
        const int column = from + 16 * k, chunk = column % PANEL / 8 + lane / 16;
        store_matrices(to + column / PANEL * 64 * PANEL + row * PANEL + (chunk ^ row % 8) * 8, packed[k]);
    }
}
