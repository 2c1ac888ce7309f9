// What the backward needs of each row: delta = rowsum(dO O) - dlse, and base = lse in the unit of the exponential.
//
// Both (batch, heads, padded), in whole tiles of rows: base is +inf for rows that see nothing and for those past the
// last query, so that they weigh 0 without a test. A warp takes one row. Of sequences that lie one after another they
// are (heads, saved_rows), as sequences.cuh says.
#include "sequences.cuh"
#include "portable/warps.cuh"

KERNEL prepare(const Arguments a) {
    const i64 line = i64(block_index()) * WARPS + thread_index() / 32;
    if (line >= (VARLEN ? a.heads * a.saved_rows : i64(a.batch) * a.heads * a.padded)) return;
    const int lane = thread_index() % 32;
    i64 i = line % a.padded, h = line / a.padded % a.heads, b = line / a.padded / a.heads;
    i64 first = 0, queries = a.queries;
    if (VARLEN) {
        h = line / a.saved_rows;
        b = sequence_of<SAVED>(a, line % a.saved_rows / SAVED, a.batch - 1);
        first = query_offset(a, b), queries = query_offset(a, b + 1) - first;
        i = line - saved_of(a, b, h, first);
    }
    Real delta = 0, base = INFINITE;
    if (i < queries) {
        const i64 saved = line_of(a, b, h, first, i);
        const T* const out =
            reinterpret_cast<const T*>(a.out.at) + BEGIN_OF(a.out, b, first) + h * a.out.head + i * a.out.row;
        const T* const grad_out = reinterpret_cast<const T*>(a.grad_out.at) + BEGIN_OF(a.grad_out, b, first) +
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
