// Split keys put together: out (batch, heads, queries, dim_v) and lse from the numerators, maxima and sums of the
// splits.
//
// A warp takes one row: its lanes find the largest maximum and the total, then add up the columns, split after split.
// Parts are weighed by maximum and sum, never by lse: the logarithm of 64 is not exact, and the mean of 64 equal
// weights is. Maxima are in the unit of the exponential.
#include "portable/warps.cuh"

KERNEL merge(const Arguments a) {
    const i64 lines = i64(a.batch) * a.heads * a.queries;
    const i64 line = i64(block_index()) * WARPS + thread_index() / 32;
    if (line >= lines) return;
    const int lane = thread_index() % 32;
    const Real* const maxima = reinterpret_cast<const Real*>(a.sums) + line;
    const Real* const totals = maxima + a.splits * lines;

    Real top = -INFINITE, total = 0;
    for (int s = lane; s < a.splits; s += 32) top = larger(top, maxima[s * lines]);
    top = warp_max(top);
    const Real base = top == -INFINITE ? Real(0) : top;
    for (int s = lane; s < a.splits; s += 32) total += power(maxima[s * lines] - base) * totals[s * lines];
    total = warp_sum(total);

    const bool empty = total == 0;
    const i64 i = line % a.queries, h = line / a.queries % a.heads, b = line / a.queries / a.heads;
    T* const out = reinterpret_cast<T*>(a.out.at) + b * a.out.batch + h * a.out.head + i * a.out.row;
    const Real* const parts = reinterpret_cast<const Real*>(a.parts) + line * a.dim_v;
    for (int d = lane; d < a.dim_v; d += 32) {
        Real sum = 0;
        for (int s = 0; s < a.splits; s++) sum += parts[s * lines * a.dim_v + d] * power(maxima[s * lines] - base);
        out[d] = Narrow<T>::of(empty ? Real(0) : sum / total);
    }
    if (lane == 0) reinterpret_cast<Real*>(a.lse)[line] = empty ? -INFINITE : top / UNIT + logarithm(total);
}
