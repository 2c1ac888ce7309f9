// The gradient of a float mask, contiguous in the shape of the mask: dS, summed over what the mask is broadcast over.
//
// A block takes one tile of the mask: BLOCK_M of its rows (or its only row) by BLOCK_N of its columns (or its only
// one), of one of its heads and batch entries (or the only one). It goes through every tile of scores that the mask's
// tile was added to, in one order, so that the bits repeat.
//
// Shared memory: query [BLOCK_M][BLOCK_D], grad_out [BLOCK_M][BLOCK_DV], key [BLOCK_N][BLOCK_D], value
// [BLOCK_N][BLOCK_DV]; at the end, of the same memory, the sums [BLOCK_M][BLOCK_N].
#include "portable/alibi.cuh"
#include "portable/gradients.cuh"
#include "portable/mask.cuh"
#include "portable/tiles.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, GRAD_OUT = BLOCK_M * PITCH<BLOCK_DV>;
constexpr int KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
constexpr int OPERANDS = (QUERY + GRAD_OUT + KEY + VALUE) * sizeof(T), SUMS = BLOCK_M * BLOCK_N * sizeof(Real);
static_assert((OPERANDS > SUMS ? OPERANDS : SUMS) == SHARED_BYTES, "tiles.py counts the same shared memory");

// What a block's tile of the mask was added to: an interval along each axis, of one place or, where the mask is
// broadcast, of all. Rows and columns are counted in tiles.
struct Target {
    Span batches, heads, rows, columns;
    bool one_row, one_column;  // which the mask has, for all

    DEVICE Target(const Arguments& a) {
        one_row = a.mask_rows == 1, one_column = a.mask_columns == 1;
        const int tiles_q = ceil_div(a.queries, BLOCK_M), tiles_k = ceil_div(a.keys, BLOCK_N);
        i64 at = block_index();
        columns.from = one_column ? 0 : at % tiles_k;
        if (!one_column) at /= tiles_k;
        rows.from = one_row ? 0 : at % tiles_q;
        if (!one_row) at /= tiles_q;
        heads.from = at % a.mask_heads, batches.from = at / a.mask_heads;
        batches.to = a.mask_batch == 1 ? a.batch : batches.from + 1;
        heads.to = a.mask_heads == 1 ? a.heads : heads.from + 1;
        rows.to = one_row ? tiles_q : rows.from + 1;
        columns.to = one_column ? tiles_k : columns.from + 1;
    }
};

// BLOCK_M queries of one head; row m of a thread: which one it is, what it sees, where it begins in the mask.
struct Queries {
    const Arguments& a;
    const Extent extent;
    const int batch, head, first;

    DEVICE int mine(int m) const { return first + warp_row() + row(m); }
    DEVICE Span sees(int m) const { return mine(m) < a.queries ? keys_of(a, extent, mine(m)) : Span{0, 0}; }
    DEVICE i64 mask(int m) const {
        return batch * a.mask.batch + head * a.mask.head + smaller(mine(m), a.queries - 1) * a.mask.row;
    }
    DEVICE Reach reach() const {
        const int last = smaller(first + BLOCK_M, a.queries) - 1;
        return ::reach(keys_of(a, extent, first), keys_of(a, extent, last));
    }
    // Which of the thread's weights dropout keeps, of the keys from `start` on.
    DEVICE Kept kept(int start) const {
        return kept_by_rows(
            a, batch, [&](int) { return head; }, [&](int m) { return mine(m); }, start);
    }
};

// Where a head of an operand begins.
DEVICE const T* head_of(const Operand& x, int batch, i64 head) {
    return reinterpret_cast<const T*>(x.at) + batch * x.batch + head * x.head;
}

// The operands of one tile of scores.
struct Shared {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const grad_out = query + QUERY;
    T* const key = grad_out + GRAD_OUT;
    T* const value = key + KEY;

    DEVICE void load_queries(const Arguments& a, const Queries& rows) const {
        const T* const queries = head_of(a.query, rows.batch, rows.head);
        const T* const upstream = head_of(a.grad_out, rows.batch, rows.head);
        load_rows<BLOCK_M, BLOCK_D>(query, lines(queries, a.query, rows.first, a.queries), a.query.column, a.dim,
                                    QUERY_BYTES);
        load_rows<BLOCK_M, BLOCK_DV>(grad_out, lines(upstream, a.grad_out, rows.first, a.queries), a.grad_out.column,
                                     a.dim_v, GRAD_OUT_BYTES);
    }
    DEVICE void load_keys(const Arguments& a, const Queries& rows, int start) const {
        const i64 head_kv = rows.head / a.group;
        const T* const keys = head_of(a.key, rows.batch, head_kv);
        const T* const values = head_of(a.value, rows.batch, head_kv);
        const int end = rows.extent.end;
        load_rows<BLOCK_N, BLOCK_D>(key, lines(keys, a.key, start, end), a.key.column, a.dim, KEY_BYTES);
        load_rows<BLOCK_N, BLOCK_DV>(value, lines(values, a.value, start, end), a.value.column, a.dim_v, VALUE_BYTES);
    }
};

// What prepare_added.cu has made of a thread's rows.
struct Prepared {
    Real base[ROWS], delta[ROWS], rest[ROWS];

    DEVICE Prepared(const Arguments& a, const Queries& rows) {
        UNROLL for (int m = 0; m < ROWS; m++) {
            const i64 line = (i64(rows.batch) * a.heads + rows.head) * a.padded + rows.mine(m);
            base[m] = reinterpret_cast<const Real*>(a.base)[line];
            delta[m] = reinterpret_cast<const Real*>(a.delta)[line];
            rest[m] = rest_of(a)[line];
        }
    }
};

DEVICE void add(Scores& sums, const Scores& terms) {
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) sums[m][n] += terms[m][n];
}

DEVICE void store_element(const Arguments& a, i64 at, Real x) {
    if (MASK_KIND == F16_MASK) reinterpret_cast<f16*>(a.grad_mask)[at] = Narrow<f16>::of(x);
    if (MASK_KIND == BF16_MASK) reinterpret_cast<bf16*>(a.grad_mask)[at] = Narrow<bf16>::of(x);
    if (MASK_KIND == F32_MASK) reinterpret_cast<float*>(a.grad_mask)[at] = float(x);
    if (MASK_KIND == F64_MASK) reinterpret_cast<double*>(a.grad_mask)[at] = x;
}

// The sums of all threads' tiles become the gradient of the mask's tile: where that has one row or one column, each of
// its elements is the sum of a column or row of them, or of all.
DEVICE void store_mask_gradient(const Arguments& a, const Target& target, const Scores& sums) {
    Real* const tile = reinterpret_cast<Real*>(shared_memory());
    barrier();
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
            store_shared(tile + (warp_row() + row(m)) * BLOCK_N + score_column(n), sums[m][n]);
    barrier();
    const int rows = target.one_row ? 1 : BLOCK_M, columns = target.one_column ? 1 : BLOCK_N;
    for (int element = thread_index(); element < rows * columns; element += 32 * WARPS) {
        const int r = element / columns, c = element % columns;
        Real sum = 0;
        for (int m = target.one_row ? 0 : r; m < (target.one_row ? BLOCK_M : r + 1); m++)
            for (int n = target.one_column ? 0 : c; n < (target.one_column ? BLOCK_N : c + 1); n++)
                sum += load_shared(tile + m * BLOCK_N + n);
        const int i = target.rows.from * BLOCK_M + r, j = target.columns.from * BLOCK_N + c;
        const i64 line = (i64(target.batches.from) * a.mask_heads + target.heads.from) * a.mask_rows + i;
        if (i < a.mask_rows && j < a.mask_columns) store_element(a, line * a.mask_columns + j, sum);
    }
}

// The step stands inside the loops: in a function of its own it takes more instructions.
KERNEL mask_gradient(const Arguments a) {
    const Target target(a);
    const Shared shared;
    Scores sums;
    clear(sums);
    for (int b = target.batches.from; b < target.batches.to; b++) {
        const Extent e = extent(a, b);
        for (int h = target.heads.from; h < target.heads.to; h++)
            for (int tq = target.rows.from; tq < target.rows.to; tq++) {
                const Queries rows{a, e, b, h, tq * BLOCK_M};
                const auto sees = [&](int m) { return rows.sees(m); };
                const auto mask = [&](int m) { return rows.mask(m); };
                const Reach reached = rows.reach();
                bool loaded = false;
                for (int tk = target.columns.from; tk < target.columns.to; tk++) {
                    const int start = tk * BLOCK_N;
                    if (start >= reached.any.to || start + BLOCK_N <= reached.any.from) continue;
                    barrier();  // the tiles before have been read
                    if (!loaded) {
                        shared.load_queries(a, rows);
                        loaded = true;
                    }
                    shared.load_keys(a, rows, start);
                    copy_commit();
                    const Prepared prepared(a, rows);
                    copy_wait<0>();
                    barrier();

                    Scores s, dp, tangents, inner;
                    clear(s);
                    clear(dp);
                    product_nt<BLOCK_N, BLOCK_D>(s, shared.query + warp_row() * PITCH<BLOCK_D>, shared.key);
                    product_nt<BLOCK_N, BLOCK_DV>(dp, shared.grad_out + warp_row() * PITCH<BLOCK_DV>, shared.value);
                    scale_scores(s, tangents, a);
                    if (ALIBI) {
                        const Real slope = slope_of(a, b, h);
                        slant(s, start, [&](int) { return slope; }, [&](int m) { return rows.mine(m) + e.offset; });
                    }
                    MaskTile<true> masks;
                    masks.fetch(a, start, true, mask, a.mask.column);
                    hide(s, masks, a, start, true, sees, mask, a.mask.column);
                    Kept kept;
                    if (DROPOUT) kept = rows.kept(start);
                    score_gradients(
                        s, dp, tangents, inner, a, [&](int m, int) { return prepared.base[m]; },
                        [&](int m, int) { return prepared.delta[m]; }, [&](int m, int) { return prepared.rest[m]; },
                        kept);
                    add(sums, dp);
                }
            }
    }
    store_mask_gradient(a, target, sums);
}
