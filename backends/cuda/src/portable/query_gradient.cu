// The gradient of query, (batch, heads, queries, dim): dQ = scale dS K.
//
// A block takes BLOCK_M queries of one head and visits the tiles of BLOCK_N keys that any of them sees, as the forward,
// or a share of these (shares.cuh). S and dP are computed again for each.
//
// Shared memory: query [BLOCK_M][BLOCK_D], grad_out [BLOCK_M][BLOCK_DV], then STAGES times key [BLOCK_N][BLOCK_D] and
// value [BLOCK_N][BLOCK_DV], then the scratch of the products. One barrier for each tile of keys.
#include "portable/alibi.cuh"
#include "extents.cuh"
#include "portable/gradients.cuh"
#include "portable/hull.cuh"
#include "portable/shares.cuh"
#include "portable/tiles.cuh"
#include "schedule.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, GRAD_OUT = BLOCK_M * PITCH<BLOCK_DV>;
constexpr int KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
static_assert((QUERY + GRAD_OUT + STAGES * (KEY + VALUE)) * sizeof(T) + SCRATCH == SHARED_BYTES,
              "tiles.py counts the same shared memory");

// Which row of the gradient is row i of a batch entry or, with VARLEN, of all sequences.
DEVICE i64 row_of(const Arguments& a, i64 b, i64 h, i64 i) {
    return gradient_row(a, OF_QUERY, VARLEN ? 0 : b, h, i, a.heads, VARLEN ? a.query_rows : a.queries);
}

KERNEL query_gradient(const Arguments a) {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const grad_out = query + QUERY;
    T* const stages = grad_out + GRAD_OUT;
    T* const scratch = stages + STAGES * (KEY + VALUE);

    const Place at = place(a, a.heads, ceil_div(a.queries, BLOCK_M), true);
    const int b = at.batch, h = at.head, first = at.tile * BLOCK_M;
    const i64 head_kv = h / a.group;
#if VARLEN
    const Extent e = extent_at(a, b);
    const int all = queries_in(a, e);
    const i64 begin = first_query(e);
    if (first >= all) {
        if (is_past(a, b))
            each_past(begin, a.query_rows, at.tile, ceil_div(a.queries, BLOCK_M), [&](i64 row) {
                clear_row(reinterpret_cast<T*>(a.grad_query) + row_of(a, 0, h, row) * a.dim, a.dim);
            });
        return;
    }
#else
    const int all = a.queries;
    constexpr i64 begin = 0;
#endif

    const T* const queries = reinterpret_cast<const T*>(a.query.at) + BEGIN_OF(a.query, b, begin) + h * a.query.head;
    const T* const upstream =
        reinterpret_cast<const T*>(a.grad_out.at) + BEGIN_OF(a.grad_out, b, begin) + h * a.grad_out.head;
    load_rows<BLOCK_M, BLOCK_D>(query, lines(queries, a.query, first, all), a.query.column, a.dim, QUERY_BYTES);
    load_rows<BLOCK_M, BLOCK_DV>(grad_out, lines(upstream, a.grad_out, first, all), a.grad_out.column, a.dim_v,
                                 GRAD_OUT_BYTES);

#if !VARLEN
    const Extent e = extent(a, b);  // while those loads are under way
#endif
    const i64 line = saved_of(a, b, h, begin);
    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    const auto sees = [&](int m) { return mine(m) < queries_in(a, e) ? keys_of(a, e, mine(m)) : Span{0, 0}; };
    const auto mask = [&](int m) {
        return b * a.mask.batch + h * a.mask.head + smaller(mine(m), a.queries - 1) * a.mask.row;
    };
    Real base[ROWS], delta[ROWS], rest[ROWS];
    UNROLL for (int m = 0; m < ROWS; m++) {
        base[m] = reinterpret_cast<const Real*>(a.base)[line + mine(m)];
        delta[m] = reinterpret_cast<const Real*>(a.delta)[line + mine(m)];
        rest[m] = ADDED ? rest_of(a)[line + mine(m)] : Real(0);
    }
    const Real slope = ALIBI ? slope_of(a, b, h) : Real(0);
    const int last = smaller(first + BLOCK_M, queries_in(a, e)) - 1;
    Reach reached = reach(keys_of(a, e, first), keys_of(a, e, last));
    reached.any = hull(a, b, h, 1, reached.any, reinterpret_cast<int*>(stages));
    const Span share = share_of(a, reached.tiles(), at.split);
    const int first_tile = reached.first_tile() + share.from;

    Real sums[ROWS][COLUMNS<BLOCK_D>];
    clear(sums);

    const T* const keys =
        reinterpret_cast<const T*>(a.key.at) + BEGIN_OF(a.key, b, first_key(e)) + head_kv * a.key.head;
    const T* const values =
        reinterpret_cast<const T*>(a.value.at) + BEGIN_OF(a.value, b, first_key(e)) + head_kv * a.value.head;
    const auto load = [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        T* const key = stages + slot * (KEY + VALUE);
        load_rows<BLOCK_N, BLOCK_D>(key, lines(keys, a.key, start, e.end), a.key.column, a.dim, KEY_BYTES);
        load_rows<BLOCK_N, BLOCK_DV>(key + KEY, lines(values, a.value, start, e.end), a.value.column, a.dim_v,
                                     VALUE_BYTES);
    };
    pipeline(share.to - share.from, load, [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        const T* const key = stages + slot * (KEY + VALUE);
        Scores s, dp, tangents, inner;
        clear(s);
        clear(dp);
        MaskTile<true> masks;
        masks.fetch(a, start, reached.hides(start), mask, a.mask.column);
        product_nt<BLOCK_N, BLOCK_D>(s, query + warp_row() * PITCH<BLOCK_D>, key);
        product_nt<BLOCK_N, BLOCK_DV>(dp, grad_out + warp_row() * PITCH<BLOCK_DV>, key + KEY);
        scale_scores(s, tangents, a);
        if (ALIBI) slant(s, start, [&](int) { return slope; }, [&](int m) { return mine(m) + e.offset; });
        hide(s, masks, a, start, reached.hides(start), sees, mask, a.mask.column);
        Kept kept;
        if (DROPOUT) kept = kept_by_rows(a, b, [&](int) { return h; }, mine, start);
        score_gradients(
            s, dp, tangents, inner, a, [&](int m, int) { return base[m]; }, [&](int m, int) { return delta[m]; },
            [&](int m, int) { return rest[m]; }, kept);
        product_nn<BLOCK_N, BLOCK_D>(sums, inner, key, scratch);
    });

    UNROLL for (int m = 0; m < ROWS; m++) {
        const int i = mine(m);
        if (i >= queries_in(a, e)) continue;
        const i64 to = row_of(a, b, h, first_query(e) + i) * a.dim;
        const i64 count = VARLEN ? 0 : i64(a.batch) * a.heads * a.queries * a.dim;
        store_share<BLOCK_D>(a.grad_query, reinterpret_cast<Real*>(a.parts), count, at.split, to, sums[m], a.dim,
                             Real(a.scale));
    }
}
