// What prepare.cu makes of each row, where a float mask is added; and rest (rest.cuh).
//
// All (batch, heads, padded); base is +inf for rows that see nothing and for those past the last query. A block takes
// BLOCK_M queries of one head. If lse is far from 0 in any of them, it visits the tiles of BLOCK_N keys that they see,
// as the forward does, for the largest score and the sum of these rows. lse comes from any kernel, and no other
// statistic with it. Where it says that the sum is of more than these keys, it is taken as it is.
//
// Shared memory: query [BLOCK_M][BLOCK_D], then STAGES times key [BLOCK_N][BLOCK_D].
#include "portable/alibi.cuh"
#include "portable/rest.cuh"
#include "portable/softmax.cuh"
#include "portable/tiles.cuh"
#include "portable/warps.cuh"
#include "sinks.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, KEY = BLOCK_N * PITCH<BLOCK_D>;
static_assert((QUERY + STAGES * KEY) * sizeof(T) == SHARED_BYTES, "tiles.py counts the same shared memory");

// From here on the rounding of lse is one of weights by 2^-11 in float, which 16-bit results hardly show.
constexpr Real FAR = 8192;
// How far apart roundings of one lse may be, relative to it.
constexpr Real ROUNDING = sizeof(Real) == 4 ? 4.8e-7 : 9e-16;

DEVICE bool is_far(Real lse) { return (lse >= FAR && lse <= LOWEST) || (lse <= -FAR && lse >= -LOWEST); }

// Lanes that have a row of the output and of its gradient, 16 bytes of both each; and rows that a warp has at once.
constexpr int CHUNKS = BLOCK_DV / Chunk<T>::SIZE;
constexpr int OF_ROW = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4, AT_ONCE = 32 / OF_ROW;

// rowsum(dO O) - dlse of query i, by OF_ROW lanes; 0 past the last one.
DEVICE Real delta_of(const Arguments& a, i64 b, i64 h, i64 i) {
    const bool inside = i < a.queries, whole = !GENERIC && GRAD_OUT_BYTES == 16;
    const T* const out = reinterpret_cast<const T*>(a.out.at) + b * a.out.batch + h * a.out.head + i * a.out.row;
    const T* const grad_out =
        reinterpret_cast<const T*>(a.grad_out.at) + b * a.grad_out.batch + h * a.grad_out.head + i * a.grad_out.row;
    Real delta = 0;
    if (inside && whole)
        UNROLL for (int n = 0; n < CHUNKS; n += OF_ROW) {
            const int d = (n + lane() % OF_ROW) * Chunk<T>::SIZE;
            if (d >= a.dim_v) continue;
            const Chunk<T> o = *reinterpret_cast<const Chunk<T>*>(out + d);
            const Chunk<T> up = *reinterpret_cast<const Chunk<T>*>(grad_out + d);
            UNROLL for (int k = 0; k < Chunk<T>::SIZE; k++) delta += widen(o.at[k]) * widen(up.at[k]);
        }
    else if (inside)
        for (int d = lane() % OF_ROW; d < a.dim_v; d += OF_ROW)
            delta += widen(out[d * a.out.column]) * widen(grad_out[d * a.grad_out.column]);
    UNROLL for (int lanes = OF_ROW / 2; lanes; lanes /= 2) delta += shuffle_xor(delta, lanes);
    if (inside && a.grad_lse) delta -= reinterpret_cast<const Real*>(a.grad_lse)[(b * a.heads + h) * a.queries + i];
    return delta;
}

// Whether `it` holds for any thread of the block. `scratch` is shared memory for WARPS integers, free again afterwards.
DEVICE bool any_of_block(bool it, int* scratch) {
    const bool none = all_of_warp(!it);
    if (lane() == 0) store_shared(scratch + thread_index() / 32, int(none));
    barrier();
    bool any = false;
    UNROLL for (int n = 0; n < WARPS; n++) any |= !load_shared(scratch + n);
    barrier();
    return any;
}

// The largest score, and the sum relative to it, of all rows of the block.
DEVICE Softmax normaliser(const Arguments& a, int b, int h, int first) {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const stages = query + QUERY;
    const i64 head_kv = h / a.group;
    const T* const queries = reinterpret_cast<const T*>(a.query.at) + b * a.query.batch + h * a.query.head;
    const T* const keys = reinterpret_cast<const T*>(a.key.at) + b * a.key.batch + head_kv * a.key.head;
    load_rows<BLOCK_M, BLOCK_D>(query, lines(queries, a.query, first, a.queries), a.query.column, a.dim, QUERY_BYTES);

    const Extent e = extent(a, b);
    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    const auto sees = [&](int m) { return mine(m) < a.queries ? keys_of(a, e, mine(m)) : Span{0, 0}; };
    const auto mask = [&](int m) {
        return b * a.mask.batch + h * a.mask.head + smaller(mine(m), a.queries - 1) * a.mask.row;
    };
    const int last = smaller(first + BLOCK_M, a.queries) - 1;
    const Reach reached = reach(keys_of(a, e, first), keys_of(a, e, last));
    const int first_tile = reached.first_tile();

    const Real slope = ALIBI ? slope_of(a, b, h) : Real(0);
    Softmax softmax;
    Real no_sums[ROWS][COLUMNS<BLOCK_DV>];
    clear(no_sums);
    const auto load = [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        load_rows<BLOCK_N, BLOCK_D>(stages + slot * KEY, lines(keys, a.key, start, e.end), a.key.column, a.dim,
                                    KEY_BYTES);
    };
    pipeline(reached.tiles(), load, [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        Scores s, tangents;
        clear(s);
        MaskTile<true> masks;
        masks.fetch(a, start, reached.hides(start), mask, a.mask.column);
        product_nt<BLOCK_N, BLOCK_D>(s, query + warp_row() * PITCH<BLOCK_D>, stages + slot * KEY);
        scale_scores(s, tangents, a);
        if (ALIBI) slant(s, start, [&](int) { return slope; }, [&](int m) { return mine(m) + e.offset; });
        hide(s, masks, a, start, reached.hides(start), sees, mask, a.mask.column);
        softmax.weigh(s, no_sums, UNIT, BLOCK_M);
    });
    softmax.finish();
    if (SINKS)
        UNROLL for (int m = 0; m < ROWS; m++)
            join_sink(sink_of(a, h), softmax.top[m], softmax.top[m], softmax.total[m]);
    return softmax;
}

KERNEL prepare_added(const Arguments a) {
    const i64 tiles = ceil_div(a.padded, BLOCK_M), head = block_index() / tiles;
    const int first = block_index() % tiles * BLOCK_M, h = head % a.heads, b = head / a.heads;
    const i64 line = head * a.padded;

    UNROLL_LITTLE for (int m = 0; m < WARP_ROWS; m += AT_ONCE) {
        const int row = m + lane() / OF_ROW, i = first + warp_row() + row;
        const Real delta = delta_of(a, b, h, i);
        if (lane() % OF_ROW == 0 && row < WARP_ROWS && i < a.padded) reinterpret_cast<Real*>(a.delta)[line + i] = delta;
    }

    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    Real lse[ROWS];
    bool far = false;
    UNROLL for (int m = 0; m < ROWS; m++) {
        lse[m] = -INFINITE;
        if (mine(m) < a.queries) lse[m] = reinterpret_cast<const Real*>(a.lse)[head * a.queries + mine(m)];
        far |= is_far(lse[m]);
    }
    Softmax softmax;
    if (any_of_block(far, reinterpret_cast<int*>(shared_memory()))) softmax = normaliser(a, b, h, first);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Real size = lse[m] < 0 ? -lse[m] : lse[m], own = logarithm(softmax.total[m]);
        const bool renewed = is_far(lse[m]) && !(lse[m] - softmax.top[m] > own + size * ROUNDING);
        if (score_column(0) != 0 || mine(m) >= a.padded) continue;
        reinterpret_cast<Real*>(a.base)[line + mine(m)] =
            renewed ? softmax.top[m] : lse[m] == -INFINITE ? INFINITE : lse[m];
        rest_of(a)[line + mine(m)] = renewed ? own * UNIT : Real(0);
    }
}
