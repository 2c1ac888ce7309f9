// What the backward needs of each row: delta = rowsum(dO O) - dlse, and base = lse in the unit of the exponential.
//
// Both (batch, heads, padded), in whole tiles of rows: base is +inf for rows that see nothing and for those past the
// last query, so that they weigh 0 without a test. A warp takes one row.
#include "portable/warps.cuh"

KERNEL prepare(const Arguments a) {
    const i64 line = i64(block_index()) * WARPS + thread_index() / 32;
    if (line >= i64(a.batch) * a.heads * a.padded) return;
    const int lane = thread_index() % 32;
    const i64 i = line % a.padded, h = line / a.padded % a.heads, b = line / a.padded / a.heads;
    Real delta = 0, base = INFINITE;
    if (i < a.queries) {
        const i64 saved = (b * a.heads + h) * a.queries + i;
        const T* const out = reinterpret_cast<const T*>(a.out.at) + b * a.out.batch + h * a.out.head + i * a.out.row;
        const T* const grad_out = reinterpret_cast<const T*>(a.grad_out.at) + b * a.grad_out.batch +
                                  h * a.grad_out.head + i * a.grad_out.row;
        for (int d = lane; d < a.dim_v; d += 32)
            delta += widen(out[d * a.out.column]) * widen(grad_out[d * a.grad_out.column]);
        delta = warp_sum(delta);
        if (a.grad_lse) delta -= reinterpret_cast<const Real*>(a.grad_lse)[saved];
        const Real lse = reinterpret_cast<const Real*>(a.lse)[saved];
        if (lse != -INFINITE) base = FOLD ? lse * UNIT : lse;
    }
    if (lane == 0) {
        reinterpret_cast<Real*>(a.delta)[line] = delta;
        reinterpret_cast<Real*>(a.base)[line] = base;
    }
}
