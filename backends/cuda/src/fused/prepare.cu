// What the backward needs of each row, and zeros where dQ is added up.
//
// delta = rowsum(dO O) - dlse, and base = lse in base 2, both (batch, heads, padded): base is +inf for rows that see
// nothing and for those past the last query, so that they weigh 0 without a test. A block takes BLOCK_M rows of a head,
// a few lanes a row, which move 16 bytes at once.
#include "gradient_rows.cuh"

constexpr int LANES = BLOCK_D <= 32 ? 8 : BLOCK_D <= 64 ? 16 : 32, AT_ONCE = 32 / LANES * WARPS;  // of a row; rows
static_assert(4 * LANES >= BLOCK_D && BLOCK_M % AT_ONCE == 0, "whole rows");

// The lane's columns of row i.
DEVICE Chunk<float> columns_of(const Operand& operand, i64 b, i64 h, i64 i, int column) {
    const i64 offset = b * operand.batch + h * operand.head + i * operand.row + column;
    return *reinterpret_cast<const Chunk<float>*>(reinterpret_cast<const float*>(operand.at) + offset);
}

KERNEL prepare(const Arguments a) {
    const i64 tiles = a.padded / BLOCK_M, head = block_index() / tiles, b = head / a.heads, h = head % a.heads;
    const int column = thread_index() % LANES * 4;
    UNROLL for (int n = 0; n < BLOCK_M; n += AT_ONCE) {
        const i64 i = block_index() % tiles * BLOCK_M + n + thread_index() / LANES;
        const bool there = i < a.queries;
        float delta = 0;
        if (there && column < a.dim_v) {
            const Chunk<float> out = columns_of(a.out, b, h, i, column), grad = columns_of(a.grad_out, b, h, i, column);
            UNROLL for (int k = 0; k < 4; k++) delta += out.at[k] * grad.at[k];
        }
        if (there && column < a.dim) {
            const i64 to = gradient_row(a, OF_QUERY, b, h, i, a.heads, a.queries) * a.dim + column;
            *reinterpret_cast<Chunk<float>*>(static_cast<float*>(a.grad_query) + to) = Chunk<float>{{0, 0, 0, 0}};
        }
        UNROLL for (int lanes = LANES / 2; lanes; lanes /= 2) delta += shuffle_xor(delta, lanes);
        if (column) continue;
        const i64 saved = head * a.queries + i;
        const float lse = there ? static_cast<const float*>(a.lse)[saved] : -INFINITE;
        if (there && a.grad_lse) delta -= static_cast<const float*>(a.grad_lse)[saved];
        static_cast<float*>(a.delta)[head * a.padded + i] = delta;
        static_cast<float*>(a.base)[head * a.padded + i] = lse == -INFINITE ? INFINITE : lse * UNIT;
    }
}
