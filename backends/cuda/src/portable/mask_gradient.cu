// The gradient of a float mask, contiguous in the shape of the mask: dS, summed over what the mask is broadcast over.
//
// A block takes one tile of the mask: BLOCK_M of its rows (or its only row) by BLOCK_N of its columns (or its only
// one), of one of its heads and batch entries (or the only one). It goes through every tile of scores that the mask's
// tile was added to, in one order, so that the bits repeat.
//
// Shared memory: query [BLOCK_M][BLOCK_D], grad_out [BLOCK_M][BLOCK_DV], key [BLOCK_N][BLOCK_D], value
// [BLOCK_N][BLOCK_DV]; at the end, of the same memory, the sums [BLOCK_M][BLOCK_N].
#include "portable/gradients.cuh"
#include "portable/mask.cuh"
#include "portable/tiles.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, GRAD_OUT = BLOCK_M * PITCH<BLOCK_DV>;
constexpr int KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
constexpr int OPERANDS = (QUERY + GRAD_OUT + KEY + VALUE) * sizeof(T), SUMS = BLOCK_M * BLOCK_N * sizeof(Real);
static_assert((OPERANDS > SUMS ? OPERANDS : SUMS) == SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void store_mask_gradient(const Arguments& a, i64 at, Real x) {
    if (MASK_KIND == F16_MASK) reinterpret_cast<f16*>(a.grad_mask)[at] = Narrow<f16>::of(x);
    if (MASK_KIND == BF16_MASK) reinterpret_cast<bf16*>(a.grad_mask)[at] = Narrow<bf16>::of(x);
    if (MASK_KIND == F32_MASK) reinterpret_cast<float*>(a.grad_mask)[at] = float(x);
    if (MASK_KIND == F64_MASK) reinterpret_cast<double*>(a.grad_mask)[at] = x;
}

KERNEL mask_gradient(const Arguments a) {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const grad_out = query + QUERY;
    T* const key = grad_out + GRAD_OUT;
    T* const value = key + KEY;

    const bool one_row = a.mask_rows == 1, one_column = a.mask_columns == 1;
    const int tiles_q = ceil_div(a.queries, BLOCK_M), tiles_k = ceil_div(a.keys, BLOCK_N);
    i64 at = block_index();
    const int tile_k = one_column ? 0 : at % tiles_k;
    if (!one_column) at /= tiles_k;
    const int tile_q = one_row ? 0 : at % tiles_q;
    if (!one_row) at /= tiles_q;
    const int mask_head = at % a.mask_heads, mask_batch = at / a.mask_heads;

    Scores sums;
    clear(sums);
    const int last_b = a.mask_batch == 1 ? a.batch : mask_batch + 1;
    const int last_h = a.mask_heads == 1 ? a.heads : mask_head + 1;
    const int last_q = one_row ? tiles_q : tile_q + 1, last_k = one_column ? tiles_k : tile_k + 1;
    for (int b = mask_batch; b < last_b; b++) {
        const Extent e = extent(a, b);
        for (int h = mask_head; h < last_h; h++)
            for (int tq = tile_q; tq < last_q; tq++) {
                const int first = tq * BLOCK_M, last = smaller(first + BLOCK_M, a.queries) - 1;
                const Reach reached = reach(keys_of(a, e, first), keys_of(a, e, last));
                bool loaded = false;
                for (int tk = tile_k; tk < last_k; tk++) {
                    const int start = tk * BLOCK_N;
                    if (start >= reached.any.to || start + BLOCK_N <= reached.any.from) continue;
                    barrier();  // the tiles before have been read
                    const T* const queries =
                        reinterpret_cast<const T*>(a.query.at) + b * a.query.batch + h * a.query.head;
                    const T* const upstream =
                        reinterpret_cast<const T*>(a.grad_out.at) + b * a.grad_out.batch + h * a.grad_out.head;
                    if (!loaded) {
                        load_rows<BLOCK_M, BLOCK_D>(query, lines(queries, a.query, first, a.queries), a.query.column,
                                                    a.dim, QUERY_BYTES);
                        load_rows<BLOCK_M, BLOCK_DV>(grad_out, lines(upstream, a.grad_out, first, a.queries),
                                                     a.grad_out.column, a.dim_v, GRAD_OUT_BYTES);
                        loaded = true;
                    }
                    const i64 head_kv = h / a.group;
                    const T* const keys = reinterpret_cast<const T*>(a.key.at) + b * a.key.batch + head_kv * a.key.head;
                    const T* const values =
                        reinterpret_cast<const T*>(a.value.at) + b * a.value.batch + head_kv * a.value.head;
                    load_rows<BLOCK_N, BLOCK_D>(key, lines(keys, a.key, start, e.end), a.key.column, a.dim, KEY_BYTES);
                    load_rows<BLOCK_N, BLOCK_DV>(value, lines(values, a.value, start, e.end), a.value.column, a.dim_v,
                                                 VALUE_BYTES);
                    copy_commit();

                    const auto mine = [&](int m) { return first + warp_row() + row(m); };
                    const auto sees = [&](int m) {
                        return mine(m) < a.queries ? keys_of(a, e, mine(m)) : Span{0, 0};
                    };
                    const auto mask = [&](int m) {
                        return b * a.mask.batch + h * a.mask.head + smaller(mine(m), a.queries - 1) * a.mask.row;
                    };
                    Real base[ROWS], delta[ROWS];
                    UNROLL for (int m = 0; m < ROWS; m++) {
                        const i64 line = (i64(b) * a.heads + h) * a.padded + mine(m);
                        base[m] = reinterpret_cast<const Real*>(a.base)[line];
                        delta[m] = reinterpret_cast<const Real*>(a.delta)[line];
                    }
                    copy_wait<0>();
                    barrier();
                    Scores s, dp, tangents, inner;
                    clear(s);
                    clear(dp);
                    product_nt<BLOCK_N, BLOCK_D>(s, query + warp_row() * PITCH<BLOCK_D>, key);
                    product_nt<BLOCK_N, BLOCK_DV>(dp, grad_out + warp_row() * PITCH<BLOCK_DV>, value);
                    scale_scores(s, tangents, a);
                    MaskTile<true> masks;
                    masks.fetch(a, start, true, mask, a.mask.column);
                    hide(s, masks, a, start, true, sees, mask, a.mask.column);
                    Kept kept;
                    if (DROPOUT) kept = kept_by_rows(a, b, [&](int) { return h; }, mine, start);
                    score_gradients(
                        s, dp, tangents, inner, a, [&](int m, int) { return base[m]; },
                        [&](int m, int) { return delta[m]; }, kept);
                    UNROLL for (int m = 0; m < ROWS; m++)
                        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) sums[m][n] += dp[m][n];
                }
            }
    }

    Real* const tile = reinterpret_cast<Real*>(shared_memory());
    barrier();
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
            store_shared(tile + (warp_row() + row(m)) * BLOCK_N + score_column(n), sums[m][n]);
    barrier();
    // Each thread adds up what is left of the mask's tile once its broadcast axes are gone.
    const int rows = one_row ? 1 : BLOCK_M, columns = one_column ? 1 : BLOCK_N;
    for (int element = thread_index(); element < rows * columns; element += 32 * WARPS) {
        const int r = element / columns, c = element % columns;
        Real sum = 0;
        for (int m = one_row ? 0 : r; m < (one_row ? BLOCK_M : r + 1); m++)
            for (int n = one_column ? 0 : c; n < (one_column ? BLOCK_N : c + 1); n++)
                sum += load_shared(tile + m * BLOCK_N + n);
        const int i = tile_q * BLOCK_M + r, j = tile_k * BLOCK_N + c;
        const i64 line = (i64(mask_batch) * a.mask_heads + mask_head) * a.mask_rows + i;
        if (i < a.mask_rows && j < a.mask_columns) store_mask_gradient(a, line * a.mask_columns + j, sum);
    }
}
