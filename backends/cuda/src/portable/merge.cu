// Split keys put together: out (batch, heads, queries, dim_v) and lse from the numerators, maxima and sums of the
// splits.
//
// A warp has STRETCH columns of a row ALONE, where there are few splits and may be many rows; or a block has a row: each
// warp finds the largest maximum and the total, and adds up the numerators of every WARPS-th split, and warps are added
// up in shared memory [WARPS][dim_v]. Maxima are as in together.cuh.
#include "sequences.cuh"
#include "portable/warps.cuh"
#include "sinks.cuh"

// The head of a row of lse, and where its output is.
DEVICE i64 head_of(const Arguments& a, i64 line) { return line / (VARLEN ? a.query_rows : a.queries) % a.heads; }
DEVICE T* out_of(const Arguments& a, i64 line) {
    const i64 rows = VARLEN ? a.query_rows : a.queries;
    const i64 i = line % rows, h = line / rows % a.heads, b = line / rows / a.heads;
    return reinterpret_cast<T*>(a.out.at) + b * a.out.batch + h * a.out.head + i * a.out.row;
}

// Columns of a lane, and of a warp.
constexpr int EACH = Chunk<Real>::SIZE, STRETCH = 32 * EACH;

// What the numerators of a lane's columns come to, `of_split` (up to 32 of them) being the lane's split's weight.
DEVICE void add_parts(Real (&sums)[EACH], const Arguments& a, const Real* from, i64 lines, int there, Real of_split) {
    UNROLL for (Real& sum : sums) sum = 0;
    const bool whole = there >= EACH && a.dim_v % EACH == 0;
    UNROLL_EIGHT for (int s = 0; s < a.splits; s++) {
        const Real weight = of_lane(of_split, s);
        const Real* const at = from + s * lines * a.dim_v;
        Chunk<Real> part;
        if (whole)
            part = *reinterpret_cast<const Chunk<Real>*>(at);
        else
            UNROLL for (int e = 0; e < EACH; e++) part.at[e] = e < there ? at[e] : 0;
        UNROLL for (int e = 0; e < EACH; e++) sums[e] += part.at[e] * weight;
    }
}

KERNEL merge(const Arguments a) {
    await_launch_before();
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int team = ALONE ? 1 : WARPS, shares = ALONE ? ceil_div(a.dim_v, STRETCH) : WARPS;  // of a row
    const i64 lines = lines_of(a), place = i64(block_index()) * WARPS + warp, line = place / shares;
    const int first = int(place % shares);
    if (line >= lines) return;
    Real* const lse = reinterpret_cast<Real*>(a.lse) + line;
    if (VARLEN && line % a.query_rows >= query_offset(a, a.batch - 1)) {  // past the end nobody left anything
        if (first == 0) clear_row(out_of(a, line), a.dim_v);
        if (first == 0 && lane == 0) *lse = -INFINITE;
        return;
    }
    const Real* const maxima = reinterpret_cast<const Real*>(a.sums) + line;
    const Real* const totals = maxima + a.splits * lines;

    const Real step = FOLD ? Real(1) : UNIT;
    Real top = -INFINITE, total = 0;
    for (int s = lane; s < a.splits; s += 32) top = larger(top, maxima[s * lines]);
    top = warp_max(top);
    const Real base = top == -INFINITE ? Real(0) : top;
    for (int s = lane; s < a.splits; s += 32) total += power((maxima[s * lines] - base) * step) * totals[s * lines];
    total = warp_sum(total);

    Real natural = FOLD ? top / UNIT : top, rescale = 1;
    if (SINKS) rescale = join_sink(sink_of(a, head_of(a, line)), top, natural, total);
    const bool empty = total == 0;
    const Real weight = Real(a.keep_scale) / (empty ? Real(1) : total) * rescale;
    const Real* const parts = reinterpret_cast<const Real*>(a.parts) + line * a.dim_v;
    Real* const sums = reinterpret_cast<Real*>(shared_memory());
    T* const out = out_of(a, line);
    if (first == 0 && lane == 0) *lse = empty ? -INFINITE : natural + logarithm(total);
    if (ALONE) {
        const int d = first * STRETCH + lane * EACH, there = a.dim_v - d;
        Real own[EACH];
        add_parts(own, a, parts + d, lines, there,
                  lane < a.splits ? power((maxima[lane * lines] - base) * step) : 0);
        UNROLL for (int e = 0; e < EACH; e++)
            if (e < there) out[d + e] = Narrow<T>::of(own[e] * weight);
        return;
    }
    for (int d = lane; d < a.dim_v; d += 32) {
        Real sum = 0;
        UNROLL_LITTLE for (int s = first; s < a.splits; s += team)
            sum += parts[s * lines * a.dim_v + d] * power((maxima[s * lines] - base) * step);
        store_shared(sums + first * a.dim_v + d, sum);
    }
    barrier();
    for (int d = thread_index(); d < a.dim_v; d += 32 * WARPS) {
        Real sum = 0;
        UNROLL for (int n = 0; n < WARPS; n++) sum += load_shared(sums + n * a.dim_v + d);
        out[d] = Narrow<T>::of(sum * weight);
    }
}
