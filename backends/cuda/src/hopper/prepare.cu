// What the backward needs of each row, and where dQ is added up.
//
// delta = rowsum(dO O) - dlse, and base = lse in base 2, both (batch, heads, padded): base is +inf for rows that see
// nothing and for those past the last query, so that they weigh 0 without a test. A block takes 64 rows of a head, a few
// lanes a row, which read 16 bytes at once, and fills the sums of these rows with 0. ADDED: another kernel has made base
// and delta, of a float mask.
//
// No block of the launches behind this one begins before every block here has let it: so what counts their blocks is 0
// by then, though they need not wait for the end of this launch. (PTX promises that of waits alone; here the 0 is in the
// L2, by a fence, where they look for it.)
#include "hopper/backward/sums.cuh"
#include "hopper/extent.cuh"

constexpr int EACH = 16 / sizeof(T), LANES = BLOCK_DV / EACH, AT_ONCE = 32 / LANES;  // columns and lanes; rows of a warp
constexpr int ROUNDS = 64 / (WARPS * AT_ONCE);
static_assert(WARPS == 4, "a warpgroup, as sums lie");

// The lane's columns of row i.
DEVICE Chunk<T> columns_of(const Operand& operand, i64 b, i64 first, i64 h, i64 i, int column) {
    const i64 offset = BEGIN_OF(operand, b, first) + h * operand.head + i * operand.row + column;
    return *reinterpret_cast<const Chunk<T>*>(reinterpret_cast<const T*>(operand.at) + offset);
}

KERNEL prepare(const Arguments a) {
    const i64 tile = block_index(), tiles = VARLEN ? a.saved_rows / 64 : a.padded / 64;
    const i64 plane = tile / tiles / a.heads, h = tile / tiles % a.heads;
    if (thread_index() == 0) {
        if (tile % tiles == 0 && h % a.group == 0) clear_number(done_of(a, (plane * a.heads + h) / a.group));
        let_next_begin();
    }
    i64 b = plane, before = tile % tiles * 64, first = 0;  // rows before it in the batch entry; and before that
    int queries = a.queries;
    if (VARLEN) {
        b = sequence_of<SAVED>(a, tile % tiles * 64 / SAVED, a.batch);
        const Extent extent = extent_in(a, int(b));
        first = first_query(extent), queries = queries_in(a, extent);
        before -= first_tile_of<SAVED>(b, first) * SAVED;
    }
    const int lane = thread_index() % 32, row = thread_index() / 32 * AT_ONCE + lane / LANES;
    const int column = lane % LANES * EACH;
    _Pragma("unroll 2") for (int n = 0; n < (ADDED ? 0 : ROUNDS); n++) {
        const i64 i = before + n * WARPS * AT_ONCE + row;
        const bool there = i < queries;
        float delta = 0;
        if (there && column < a.dim_v) {
            const Chunk<T> out = columns_of(a.out, b, first, h, i, column);
            const Chunk<T> grad = columns_of(a.grad_out, b, first, h, i, column);
            UNROLL for (int k = 0; k < EACH; k++) delta += widen(out.at[k]) * widen(grad.at[k]);
        }
        UNROLL for (int lanes = LANES / 2; lanes; lanes /= 2) delta += shuffle_xor(delta, lanes);
        if (lane % LANES) continue;
        const i64 saved = line_of(a, b, h, first, i);
        const float lse = there ? static_cast<const float*>(a.lse)[saved] : -INFINITE;
        if (there && a.grad_lse) delta -= static_cast<const float*>(a.grad_lse)[saved];
        static_cast<float*>(a.delta)[tile * 64 + i % 64] = delta;
        static_cast<float*>(a.base)[tile * 64 + i % 64] = lse == -INFINITE ? INFINITE : lse * UNIT;
    }
    if (!a.grad_query) return;
    if (ORDERED && thread_index() == 0) *turns_of(a, tile) = 0;
    float* const sums = sums_of(a.sums, tile);
    UNROLL for (int c = 0; c < BLOCK_D / 8; c++)
        *reinterpret_cast<Chunk<float>*>(quad_of(sums, c)) = Chunk<float>{{0, 0, 0, 0}};
}
