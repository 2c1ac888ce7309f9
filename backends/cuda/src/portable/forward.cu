// The forward: online softmax over tiles of keys (FlashAttention-2), for many queries or, split over the keys, for few.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value. A block takes BLOCK_M
// rows of one batch entry and one key head, and visits the tiles of BLOCK_N keys that any of them sees. A row is a
// query of one head, or, packed, of all query heads that share the key head: row r is query r / pack of head r % pack
// of the pack, so that a few queries still fill a tile and their keys are loaded once.
//
// Shared memory: query [BLOCK_M][BLOCK_D], then STAGES times key [BLOCK_N][BLOCK_D] and value [BLOCK_N][BLOCK_DV], then
// the scratch of the products. One barrier for each tile of keys, in `pipeline`.
//
// Invariants: after each tile, `sums` and `total` are relative to the row's `top`; a thread's `total` is of its own
// columns until the end. Scores that need nothing but a positive factor (FOLD) are never multiplied: the factor is a
// part of the exponential, and `top` is the largest q . k. A row that has seen no key keeps top = -inf and weights of
// 0.
#include "portable/hull.cuh"
#include "portable/tiles.cuh"
#include "schedule.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
static_assert((QUERY + STAGES * (KEY + VALUE)) * sizeof(T) + SCRATCH == SHARED_BYTES,
              "config.py counts the same shared memory");

KERNEL forward(const Arguments a) {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const stages = query + QUERY;
    T* const scratch = stages + STAGES * (KEY + VALUE);

    const int rows = a.queries * a.pack, heads = a.heads / a.pack;
    const Place at = place(a, heads, ceil_div(rows, BLOCK_M), true);
    const int b = at.batch, head = at.head * a.pack, first = at.tile * BLOCK_M;
    const i64 head_kv = head / a.group;
    const auto head_of = [&](int r) { return a.pack == 1 ? head : head + r % a.pack; };
    const auto query_of = [&](int r) { return a.pack == 1 ? r : r / a.pack; };

    const T* const queries = reinterpret_cast<const T*>(a.query.at) + b * a.query.batch;
    load_rows<BLOCK_M, BLOCK_D>(
        query,
        [&](int r) {
            r += first;
            return r < rows ? queries + head_of(r) * a.query.head + query_of(r) * a.query.row : nullptr;
        },
        a.query.column, a.dim, QUERY_BYTES);

    const Extent e = extent(a, b);
    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    const auto sees = [&](int m) { return mine(m) < rows ? keys_of(a, e, query_of(mine(m))) : Span{0, 0}; };
    const auto mask = [&](int m) {
        return b * a.mask.batch + head_of(mine(m)) * a.mask.head + query_of(mine(m)) * a.mask.row;
    };
    const int last = smaller(first + BLOCK_M, rows) - 1;
    Reach reached = reach(keys_of(a, e, query_of(first)), keys_of(a, e, query_of(last)));
    if (SPLIT) {
        reached.any.from = larger(reached.any.from, at.split * a.chunk);
        reached.any.to = smaller(reached.any.to, (at.split + 1) * a.chunk);
    }
    reached.any = hull(a, b, head, a.pack, reached.any, reinterpret_cast<int*>(stages));
    const int first_tile = reached.first_tile();

    Real sums[ROWS][COLUMNS<BLOCK_DV>], top[ROWS], total[ROWS];
    clear(sums);
    UNROLL for (int m = 0; m < ROWS; m++) top[m] = -INFINITE, total[m] = 0;
    const Real factor = FOLD ? Real(a.factor) : UNIT;

    const T* const keys = reinterpret_cast<const T*>(a.key.at) + b * a.key.batch + head_kv * a.key.head;
    const T* const values = reinterpret_cast<const T*>(a.value.at) + b * a.value.batch + head_kv * a.value.head;
    const auto load = [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        T* const key = stages + slot * (KEY + VALUE);
        load_rows<BLOCK_N, BLOCK_D>(key, lines(keys, a.key, start, e.end), a.key.column, a.dim, KEY_BYTES);
        load_rows<BLOCK_N, BLOCK_DV>(key + KEY, lines(values, a.value, start, e.end), a.value.column, a.dim_v,
                                     VALUE_BYTES);
    };
    pipeline(reached.tiles(), load, [&](int t, int slot) {
        const int start = (first_tile + t) * BLOCK_N;
        const T* const key = stages + slot * (KEY + VALUE);
        Scores p, tangents;
        clear(p);
        product_nt<BLOCK_N, BLOCK_D>(p, query + warp_row() * PITCH<BLOCK_D>, key);
        scale_scores(p, tangents, a);
        hide(p, a, start, reached.hides(start), sees, mask, a.mask.column);
        UNROLL for (int m = 0; m < ROWS; m++) {
            Real here = p[m][0];
            UNROLL for (int n = 1; n < COLUMNS<BLOCK_N>; n++) here = larger(here, p[m][n]);
            here = larger(top[m], row_max(here));
            const Real base = here == -INFINITE ? Real(0) : FOLD ? here * factor : here;
            const Real rescale = FOLD ? power(top[m] * factor - base) : power((top[m] - base) * factor);
            top[m] = here;
            total[m] *= rescale;
            UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= rescale;
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
                p[m][n] = FOLD ? power(p[m][n] * factor - base) : power((p[m][n] - base) * factor);
                total[m] += p[m][n];
            }
        }
        if (DROPOUT) {
            const Kept kept = kept_by_rows(
                a, b, [&](int m) { return head_of(mine(m)); }, [&](int m) { return query_of(mine(m)); }, start);
            UNROLL for (int m = 0; m < ROWS; m++)
                UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
                    if (!kept.at(m, n)) p[m][n] = 0;
        }
        product_nn<BLOCK_N, BLOCK_DV>(sums, p, key + KEY, scratch);
    });

    UNROLL for (int m = 0; m < ROWS; m++) {
        const int r = mine(m), h = head_of(r), i = query_of(r);
        total[m] = row_sum(total[m]);
        if (r >= rows) continue;
        const bool empty = total[m] == 0;  // it saw nothing
        const i64 line = (i64(at.split * a.batch + b) * a.heads + h) * a.queries + i;
        if (SPLIT) {  // maximum, sum and numerator, which add up exactly where the parts do
            Real* const maxima = reinterpret_cast<Real*>(a.sums) + line;
            if (score_column(0) == 0) {
                maxima[0] = top[m] * factor;
                maxima[i64(a.splits) * a.batch * a.heads * a.queries] = total[m];
            }
            UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= Real(a.keep_scale);
            store_sums<Real, BLOCK_DV>(reinterpret_cast<Real*>(a.parts) + line * a.dim_v, sums[m], a.dim_v);
        } else {
            const Real natural = FOLD ? top[m] * Real(a.scale) : top[m];
            if (a.lse && score_column(0) == 0)
                reinterpret_cast<Real*>(a.lse)[line] = empty ? -INFINITE : natural + logarithm(total[m]);
            // An exact quotient: the mean of a power of two of equal weights is exact too.
            const Real weight = Real(a.keep_scale) / (empty ? Real(1) : total[m]);
            UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= weight;
            T* const out = reinterpret_cast<T*>(a.out.at) + b * a.out.batch + h * a.out.head + i * a.out.row;
            store_sums<T, BLOCK_DV>(out, sums[m], a.dim_v);
        }
    }
}
