// Split keys put together: out (batch, heads, queries, dim_v) and lse from the numerators, maxima and sums of the
// splits.
//
// A warp has STRETCH columns of a row ALONE, where there are few splits and may be many rows; or a block has a row: each
// warp finds the largest maximum and the total, and adds up the numerators of every WARPS-th split, and warps are added
// up in shared memory [WARPS][dim_v]. Maxima are as in together.cuh.
//
// TOLD: parts are of tiles of so many rows, and a table behind the sums says where a row's begin, and how many there
// are: none where the row is done.
#include "sequences.cuh"
#include "portable/warps.cuh"
#include "sinks.cuh"

// A row of lse: its query, head and batch entry, and where its output is.
struct Line {
    i64 query, head, batch;

    DEVICE Line(const Arguments& a, i64 line) {
        const i64 rows = VARLEN ? a.query_rows : a.queries, above = divided(line, rows);
        batch = divided(above, a.heads), query = line - above * rows, head = above - batch * a.heads;
    }
    DEVICE T* out(const Arguments& a) const {
        return reinterpret_cast<T*>(a.out.at) + batch * a.out.batch + head * a.out.head + query * a.out.row;
    }
};

// Columns of a lane, and of a warp.
constexpr int EACH = Chunk<Real>::SIZE, STRETCH = 32 * EACH;

// The parts of a row: which is the first of all, how far apart they are, how many, and the parts of all rows.
struct Parts {
    i64 first, step, all;
    int count;

    DEVICE Parts(const Arguments& a, i64 line) : first(line), step(lines_of(a)), count(a.splits) {
        if (TOLD) step = TOLD;
        all = a.splits * step;
        if (!TOLD) return;
        const int* const told = reinterpret_cast<const int*>(reinterpret_cast<const Real*>(a.sums) + 2 * all) + 2 * line;
        first = told[0], count = told[1];
        // Rows that no sequence has are not in the table: offsets on a GPU may leave out any.
        if (count < 0 || first < 0 || first + i64(count - 1) * step >= all) count = 0;
    }
};

// Numerators of a lane's columns of some splits.
struct Numerators {
    static constexpr int MOST = 4;
    Chunk<Real> of[MOST];

    // Of splits from..count, `there` of whose columns there are.
    DEVICE void load(const Arguments& a, const Real* parts, i64 step, int from, int count, int there) {
        const bool whole = there >= EACH && a.dim_v % EACH == 0;
        UNROLL for (int n = 0; n < MOST; n++) {
            const Real* const at = parts + (from + n) * step * a.dim_v;
            of[n] = {};
            if (from + n >= count) continue;
            if (whole)
                of[n] = *reinterpret_cast<const Chunk<Real>*>(at);
            else
                UNROLL for (int e = 0; e < EACH; e++) of[n].at[e] = e < there ? at[e] : 0;
        }
    }
    // `of_split` is the weight of the split with the lane's number, counted from `at` on.
    DEVICE void add_to(Real (&sums)[EACH], int at, Real of_split) const {
        UNROLL for (int n = 0; n < MOST; n++) {
            const Real weight = of_lane(of_split, at + n);
            UNROLL for (int e = 0; e < EACH; e++) sums[e] += of[n].at[e] * weight;
        }
    }
};

KERNEL merge(const Arguments a) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int team = ALONE ? 1 : WARPS, shares = ALONE ? ceil_div(a.dim_v, STRETCH) : WARPS;  // of a row
    const i64 place = i64(block_index()) * WARPS + warp, line = divided(place, shares);
    const int first = int(place - line * shares);
    if (line >= lines_of(a)) return;
    const Line at(a, line);
    T* const out = at.out(a);
    await_launch_before();
    Real* const lse = reinterpret_cast<Real*>(a.lse) + line;
    if (VARLEN && at.query >= query_offset(a, a.batch - 1)) {  // past the end nobody left anything
        if (first == 0) clear_row(out, a.dim_v);
        if (first == 0 && lane == 0) *lse = -INFINITE;
        return;
    }
    const Parts row(a, line);
    if (TOLD && row.count == 0) return;
    const Real* const maxima = reinterpret_cast<const Real*>(a.sums) + row.first;
    const Real* const totals = maxima + row.all;
    const Real* const parts = reinterpret_cast<const Real*>(a.parts) + row.first * a.dim_v;
    const int d = first * STRETCH + lane * EACH, there = a.dim_v - d;  // ALONE
    Numerators numerators;
    if (ALONE) numerators.load(a, parts + d, row.step, 0, row.count, there);  // while weights are worked out

    const Real step = FOLD ? Real(1) : UNIT;
    Real top = -INFINITE, total = 0;
    for (int s = lane; s < row.count; s += 32) top = larger(top, maxima[s * row.step]);
    top = warp_max(top);
    const Real base = top == -INFINITE ? Real(0) : top;
    for (int s = lane; s < row.count; s += 32)
        total += power((maxima[s * row.step] - base) * step) * totals[s * row.step];
    total = warp_sum(total);

    Real natural = FOLD ? top / UNIT : top, rescale = 1;
    if (SINKS) rescale = join_sink(sink_of(a, at.head), top, natural, total);
    const bool empty = total == 0;
    const Real weight = Real(a.keep_scale) / (empty ? Real(1) : total) * rescale;
    if (first == 0 && lane == 0) *lse = empty ? -INFINITE : natural + logarithm(total);
    if (ALONE) {
        Real own[EACH] = {}, of_split = 0;
        for (int s = 0; s < row.count; s += Numerators::MOST) {
            if (s % 32 == 0) of_split = s + lane < row.count ? power((maxima[(s + lane) * row.step] - base) * step) : 0;
            const Numerators now = numerators;
            numerators.load(a, parts + d, row.step, s + Numerators::MOST, row.count, there);
            now.add_to(own, s % 32, of_split);
        }
        UNROLL for (int e = 0; e < EACH; e++)
            if (e < there) out[d + e] = Narrow<T>::of(own[e] * weight);
        return;
    }
    Real* const sums = reinterpret_cast<Real*>(shared_memory());
    for (int d = lane; d < a.dim_v; d += 32) {
        Real sum = 0;
        UNROLL_LITTLE for (int s = first; s < row.count; s += team)
            sum += parts[s * row.step * a.dim_v + d] * power((maxima[s * row.step] - base) * step);
        store_shared(sums + first * a.dim_v + d, sum);
    }
    barrier();
    for (int d = thread_index(); d < a.dim_v; d += 32 * WARPS) {
        Real sum = 0;
        UNROLL for (int n = 0; n < WARPS; n++) sum += load_shared(sums + n * a.dim_v + d);
        out[d] = Narrow<T>::of(sum * weight);
    }
}
