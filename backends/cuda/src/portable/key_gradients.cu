// The gradients of key and value, (batch, heads / group, keys, dim or dim_v): dK = scale dS^T Q and dV = P^T dO.
//
// A block takes BLOCK_M keys of one key head and visits, for each query head that shares it, the tiles of BLOCK_N
// queries that see any of them, or a share of these (shares.cuh): tiles are transposed, (keys, queries), so that S^T
// and dS^T are left operands where they are. It owns what it writes: nothing is added atomically, and the bits repeat.
// Where registers do not hold both gradients, two launches make one each (WITH_KEY, WITH_VALUE).
//
// Shared memory: key [BLOCK_M][BLOCK_D], value [BLOCK_M][BLOCK_DV], then STAGES times query [BLOCK_N][BLOCK_D],
// grad_out [BLOCK_N][BLOCK_DV], base [BLOCK_N] and delta [BLOCK_N], then the scratch of the products; rest lies between
// the rows of query. One barrier for each tile.
#include "portable/alibi.cuh"
#include "extents.cuh"
#include "portable/gradients.cuh"
#include "portable/hull.cuh"
#include "portable/shares.cuh"
#include "portable/tiles.cuh"
#include "schedule.cuh"

constexpr int KEY = BLOCK_M * PITCH<BLOCK_D>, VALUE = BLOCK_M * PITCH<BLOCK_DV>;
constexpr int QUERY = BLOCK_N * PITCH<BLOCK_D>, GRAD_OUT = BLOCK_N * PITCH<BLOCK_DV>;
constexpr int LINES = 2 * BLOCK_N * sizeof(Real) / sizeof(T);
constexpr int STAGE = QUERY + GRAD_OUT + LINES;
static_assert((KEY + VALUE + STAGES * STAGE) * sizeof(T) + SCRATCH == SHARED_BYTES,
              "tiles.py counts the same shared memory");

// Where the rest of a tile's query n is: in what keeps its row apart from the next.
DEVICE Real* rest_in(T* query, int n) { return reinterpret_cast<Real*>(query + n * PITCH<BLOCK_D> + BLOCK_D); }

// Which row of a gradient is row j of a batch entry or, with VARLEN, of all sequences.
DEVICE i64 row_of(const Arguments& a, Gradient which, i64 b, i64 h, i64 j, i64 heads) {
    return gradient_row(a, which, VARLEN ? 0 : b, h, j, heads, VARLEN ? a.key_rows : a.keys);
}

KERNEL key_gradients(const Arguments a) {
    T* const key = reinterpret_cast<T*>(shared_memory());
    T* const value = key + KEY;
    T* const stages = value + VALUE;
    T* const scratch = stages + STAGES * STAGE;

    const int heads = a.heads / a.group;
    const Place at = place(a, heads, ceil_div(a.keys, BLOCK_M), false);  // most queries see the first keys
    const int b = at.batch, first = at.tile * BLOCK_M;
    const i64 head_kv = at.head;
    const Extent e = extent_at(a, b);
    if (VARLEN && first >= e.end) {
        if (is_past(a, b))
            each_past(first_key(e), a.key_rows, at.tile, ceil_div(a.keys, BLOCK_M), [&](i64 row) {
                const i64 to_key = row_of(a, OF_KEY, 0, head_kv, row, heads) * a.dim;
                const i64 to_value = row_of(a, OF_VALUE, 0, head_kv, row, heads) * a.dim_v;
                if (WITH_KEY && a.grad_key) clear_row(reinterpret_cast<T*>(a.grad_key) + to_key, a.dim);
                if (WITH_VALUE && a.grad_value) clear_row(reinterpret_cast<T*>(a.grad_value) + to_value, a.dim_v);
            });
        return;
    }

    const T* const keys =
        reinterpret_cast<const T*>(a.key.at) + BEGIN_OF(a.key, b, first_key(e)) + head_kv * a.key.head;
    const T* const values =
        reinterpret_cast<const T*>(a.value.at) + BEGIN_OF(a.value, b, first_key(e)) + head_kv * a.value.head;
    load_rows<BLOCK_M, BLOCK_D>(key, lines(keys, a.key, first, e.end), a.key.column, a.dim, KEY_BYTES);
    load_rows<BLOCK_M, BLOCK_DV>(value, lines(values, a.value, first, e.end), a.value.column, a.dim_v, VALUE_BYTES);

    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    const int last = smaller(first + BLOCK_M, e.end) - 1;
    Reach reached = {{0, 0}, {0, 0}};
    if (first < e.end) reached = reach(queries_of(a, e, first), queries_of(a, e, last));
    if (last < smaller(first + BLOCK_M, a.keys) - 1) reached.every = Span{0, 0};  // some are past the sequence's end
    const Span left = hull(a, b, head_kv * a.group, a.group, Span{first, last + 1}, reinterpret_cast<int*>(stages));
    if (left.to <= left.from) reached.any = Span{0, 0};
    const int first_tile = reached.first_tile(), tiles = reached.tiles();

    Real key_sums[ROWS][COLUMNS<BLOCK_D>], value_sums[ROWS][COLUMNS<BLOCK_DV>];
    clear(key_sums);
    clear(value_sums);

    const Span share = share_of(a, tiles * a.group, at.split);
    const auto load = [&](int step, int slot) {
        const int t = share.from + step;
        const int h = head_kv * a.group + t / tiles, start = (first_tile + t % tiles) * BLOCK_N;
        const T* const queries =
            reinterpret_cast<const T*>(a.query.at) + BEGIN_OF(a.query, b, first_query(e)) + h * a.query.head;
        const T* const upstream =
            reinterpret_cast<const T*>(a.grad_out.at) + BEGIN_OF(a.grad_out, b, first_query(e)) + h * a.grad_out.head;
        T* const query = stages + slot * STAGE;
        load_rows<BLOCK_N, BLOCK_D>(query, lines(queries, a.query, start, queries_in(a, e)), a.query.column, a.dim,
                                    QUERY_BYTES);
        load_rows<BLOCK_N, BLOCK_DV>(query + QUERY, lines(upstream, a.grad_out, start, queries_in(a, e)),
                                     a.grad_out.column, a.dim_v, GRAD_OUT_BYTES);
        const i64 line = saved_of(a, b, h, first_query(e)) + start;
        Real* const of_rows = reinterpret_cast<Real*>(query + QUERY + GRAD_OUT);
        for (int n = thread_index() * Chunk<Real>::SIZE; n < 2 * BLOCK_N; n += 32 * WARPS * Chunk<Real>::SIZE)
            copy_async<16>(of_rows + n,
                           n < BLOCK_N ? reinterpret_cast<const Real*>(a.base) + line + n
                                       : reinterpret_cast<const Real*>(a.delta) + line + n - BLOCK_N,
                           16);
        if (ADDED)
            for (int n = thread_index(); n < BLOCK_N; n += 32 * WARPS)
                copy_async<sizeof(Real)>(rest_in(query, n), rest_of(a) + line + n, sizeof(Real));
    };
    pipeline(share.to - share.from, load, [&](int step, int slot) {
        const int t = share.from + step;
        const int h = head_kv * a.group + t / tiles, start = (first_tile + t % tiles) * BLOCK_N;
        const auto sees = [&](int m) { return queries_of(a, e, mine(m)); };
        const auto mask = [&](int m) {
            return b * a.mask.batch + h * a.mask.head + smaller(mine(m), a.keys - 1) * a.mask.column;
        };
        T* const query = stages + slot * STAGE;
        const T* const upstream = query + QUERY;
        const Real* const of_rows = reinterpret_cast<const Real*>(upstream + GRAD_OUT);
        Scores s, dp, tangents, inner;
        clear(s);
        clear(dp);
        MaskTile<false> masks;
        masks.fetch(a, start, reached.hides(start), mask, a.mask.row);
        product_nt<BLOCK_N, BLOCK_D>(s, key + warp_row() * PITCH<BLOCK_D>, query);
        if (WITH_KEY) product_nt<BLOCK_N, BLOCK_DV>(dp, value + warp_row() * PITCH<BLOCK_DV>, upstream);
        scale_scores(s, tangents, a);
        if (ALIBI) {
            const Real slope = slope_of(a, b, h);
            slant(s, start, [&](int) { return slope; }, [&](int m) { return mine(m) - e.offset; });
        }
        hide(s, masks, a, start, reached.hides(start), sees, mask, a.mask.row);
        Real base[COLUMNS<BLOCK_N>], delta[COLUMNS<BLOCK_N>], rest[COLUMNS<BLOCK_N>];
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            base[n] = load_shared(of_rows + score_column(n));
            delta[n] = load_shared(of_rows + BLOCK_N + score_column(n));
            rest[n] = 0;
            if (ADDED) rest[n] = load_shared(rest_in(query, score_column(n)));
        }
        Kept kept;
        if (DROPOUT) kept = kept_by_columns(a, b, h, first + warp_row(), start);
        score_gradients(
            s, dp, tangents, inner, a, [&](int, int n) { return base[n]; }, [&](int, int n) { return delta[n]; },
            [&](int, int n) { return rest[n]; }, kept);
        if (WITH_VALUE) product_nn<BLOCK_N, BLOCK_DV>(value_sums, s, upstream, scratch);
        if (WITH_KEY) product_nn<BLOCK_N, BLOCK_D>(key_sums, inner, query, scratch);
    });

    const i64 rows = VARLEN ? 0 : i64(a.batch) * heads * a.keys;
    Real* const key_parts = reinterpret_cast<Real*>(a.parts);
    Real* const value_parts = reinterpret_cast<Real*>(a.sums);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const int j = mine(m);
        if (j >= (VARLEN ? e.end : a.keys)) continue;
        if (j >= e.end) {  // a weight of 0 times NaN is NaN
            UNROLL for (Real& sum : key_sums[m]) sum = 0;
            UNROLL for (Real& sum : value_sums[m]) sum = 0;
        }
        if (WITH_KEY && a.grad_key) {
            const i64 to = row_of(a, OF_KEY, b, head_kv, first_key(e) + j, heads) * a.dim;
            store_share<BLOCK_D>(a.grad_key, key_parts, rows * a.dim, at.split, to, key_sums[m], a.dim, Real(a.scale));
        }
        if (WITH_VALUE && a.grad_value) {
            const i64 to = row_of(a, OF_VALUE, b, head_kv, first_key(e) + j, heads) * a.dim_v;
            store_share<BLOCK_DV>(a.grad_value, value_parts, rows * a.dim_v, at.split, to, value_sums[m], a.dim_v, 1);
        }
    }
}
