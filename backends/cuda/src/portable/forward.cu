// The forward: online softmax over tiles of keys (FlashAttention-2), for many queries or, split over the keys, for few.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value. A block takes BLOCK_M
// rows of one batch entry and one key head, and visits the tiles of BLOCK_N keys that any of them sees. A row is a
// query of one head, or, packed, of all query heads that share the key head: row r is query r / pack of head r % pack
// of the pack, so that a few queries still fill a tile and their keys are loaded once. Where rows are few, each warp
// has all of them and every TEAMS-th tile of keys, and warps are put together at the end (together.cuh).
//
// Keys may be split among blocks as well (SPLIT). A block then leaves maximum, sum and numerator of each row, which add
// up exactly where the parts do: to merge.cu in `sums` (2, splits, batch, heads, queries) and `parts` (splits, batch,
// heads, queries, dim_v), or, a few splits, to the block of the last split in `parts` (tiles of rows, splits - 1,
// BLOCK_M, LEFT). That block waits: those before it on the grid were begun before it, and wait for nobody.
//
// Shared memory: query [BLOCK_M][BLOCK_D], then for each team STAGES times key [BLOCK_N][BLOCK_D] and value
// [BLOCK_N][BLOCK_DV], then the scratch of the products. One barrier of a team for each tile of keys, in `pipeline`.
//
// Invariants: after each tile, `sums` and `total` are relative to the row's `top`; a thread's `total` is of its own
// columns until the end. Scores that need nothing but a positive factor (FOLD) are never multiplied: the factor is a
// part of the exponential, and `top` is the largest q . k. A row that has seen no key keeps top = -inf and weights of
// 0.
#include "portable/hull.cuh"
#include "portable/tiles.cuh"
#include "portable/together.cuh"
#include "schedule.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
constexpr int RING = STAGES * (KEY + VALUE);
constexpr int SHARES = SHARE * sizeof(Real) / sizeof(T), ROOM = RING > SHARES ? RING : SHARES;  // of a team
enum { WHOLE, PARTS, MERGED };  // of SPLIT
static_assert((QUERY + TEAMS * ROOM) * sizeof(T) + SCRATCH == SHARED_BYTES, "tiles.py counts the same shared memory");

KERNEL forward(const Arguments a) {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const rings = query + QUERY;
    T* const stages = rings + team() * ROOM;
    T* const scratch = rings + TEAMS * ROOM;

    const int rows = a.queries * a.pack;
    const Place at = TEAMS > 1 ? place_of_few(a) : place(a, a.packs, ceil_div(rows, BLOCK_M), true);
    const int b = at.batch, head = at.head * a.pack, first = at.tile * BLOCK_M;
    const i64 head_kv = quotient(head, a.by_group);
    const auto query_of = [&](int r) { return int(quotient(r, a.by_pack)); };
    const auto head_of = [&](int r) { return head + r - query_of(r) * a.pack; };

    const Extent e = LENGTHS ? extent(a, b) : whole(a);
    const auto mine = [&](int m) { return first + warp_row() + row(m); };
    const auto sees = [&](int m) { return mine(m) < rows ? keys_of(a, e, query_of(mine(m))) : Span{0, 0}; };
    const auto mask = [&](int m) {
        const int r = smaller(mine(m), rows - 1);
        return b * a.mask.batch + head_of(r) * a.mask.head + query_of(r) * a.mask.row;
    };
    const int count = smaller(BLOCK_M, rows - first);
    Reach reached = reach(keys_of(a, e, query_of(first)), keys_of(a, e, query_of(first + count - 1)));
    if (SPLIT) {
        reached.any.from = larger(reached.any.from, at.split * a.chunk);
        reached.any.to = smaller(reached.any.to, (at.split + 1) * a.chunk);
    }
    reached.any = hull(a, b, head, a.pack, reached.any, reinterpret_cast<int*>(rings));
    const int first_tile = reached.first_tile() + team();
    const int tiles = ceil_div(larger(reached.tiles() - team(), 0), TEAMS);

    Real sums[ROWS][COLUMNS<BLOCK_DV>], top[ROWS], total[ROWS];
    clear(sums);
    UNROLL for (int m = 0; m < ROWS; m++) top[m] = -INFINITE, total[m] = 0;
    const Real factor = FOLD ? Real(a.factor) : UNIT;

    const T* const keys = reinterpret_cast<const T*>(a.key.at) + b * a.key.batch + head_kv * a.key.head;
    const T* const values = reinterpret_cast<const T*>(a.value.at) + b * a.value.batch + head_kv * a.value.head;
    const T* const queries = reinterpret_cast<const T*>(a.query.at) + b * a.query.batch;
    Real* const parts = reinterpret_cast<Real*>(a.parts);
    const int others = a.splits - 1;
    Real* const left = parts + i64(quotient(block_index(), a.by_splits)) * others * LEFT_BY_BLOCK;
    const auto load_queries = [&] {
        const auto line = [&](int r) {
            r += first;
            return r < rows ? queries + head_of(r) * a.query.head + query_of(r) * a.query.row : nullptr;
        };
        load_rows<BLOCK_M, BLOCK_D, 32 * WARPS>(query, line, a.query.column, a.dim, QUERY_BYTES);
        if (TEAMS > 1 && SPLIT == MERGED && at.split == others) fetch_left(left, others, count);
    };
    const auto load = [&](int t, int slot) {
        const int start = (first_tile + t * TEAMS) * BLOCK_N;
        T* const key = stages + slot * (KEY + VALUE);
        load_rows<BLOCK_N, BLOCK_D>(key, lines(keys, a.key, start, e.end), a.key.column, a.dim, KEY_BYTES, ONCE);
        load_rows<BLOCK_N, BLOCK_DV>(key + KEY, lines(values, a.value, start, e.end), a.value.column, a.dim_v,
                                     VALUE_BYTES, ONCE);
    };
    pipeline(tiles, load, load_queries, [&](int t, int slot) {
        const int start = (first_tile + t * TEAMS) * BLOCK_N;
        const T* const key = stages + slot * (KEY + VALUE);
        Scores p, tangents;
        clear(p);
        MaskTile<true> masks;
        masks.fetch(a, start, reached.hides(start), mask, a.mask.column);
        product_nt<BLOCK_N, BLOCK_D>(p, query + warp_row() * PITCH<BLOCK_D>, key);
        scale_scores(p, tangents, a);
        hide(p, masks, a, start, reached.hides(start), sees, mask, a.mask.column);
        UNROLL for (int m = 0; m < ROWS; m++) {
            if (TEAMS > 1 && first_row(m) >= count) continue;  // no lane has a row: the products go by for nothing
            Real here = p[m][0];
            UNROLL for (int n = 1; n < COLUMNS<BLOCK_N>; n++) here = larger(here, p[m][n]);
            here = larger(top[m], row_max(here));
            const Real base = here == -INFINITE ? Real(0) : FOLD ? rounded(here, factor) : here;
            const Real rescale = FOLD ? power(rounded(top[m], factor) - base) : power((top[m] - base) * factor);
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

    const i64 lines = i64(a.batch) * a.heads * a.queries;
    Real* const lse = reinterpret_cast<Real*>(a.lse);
    Real* const maxima = reinterpret_cast<Real*>(a.sums);
    Real* const totals = maxima + a.splits * lines;
    const auto line_of = [&](int r) { return (i64(b) * a.heads + head_of(r)) * a.queries + query_of(r); };
    const auto out_of = [&](int r) {
        return reinterpret_cast<T*>(a.out.at) + b * a.out.batch + head_of(r) * a.out.head + query_of(r) * a.out.row;
    };
    // An exact quotient: the mean of a power of two of equal weights is exact too.
    const auto weight_of = [&](Real total) { return Real(a.keep_scale) / (total == 0 ? Real(1) : total); };
    UNROLL for (int m = 0; m < ROWS; m++) total[m] = row_sum(total[m]);

    if constexpr (TEAMS == 1) {
        UNROLL for (int m = 0; m < ROWS; m++) {
            const int r = mine(m);
            if (r >= rows) continue;
            const i64 line = line_of(r);
            if (SPLIT) {
                const i64 part = at.split * lines + line;
                if (score_column(0) == 0) maxima[part] = FOLD ? top[m] * factor : top[m], totals[part] = total[m];
                store_sums<Real, BLOCK_DV>(parts + part * a.dim_v, sums[m], a.dim_v);
            } else {
                const Real natural = FOLD ? top[m] * Real(a.scale) : top[m];
                if (lse && score_column(0) == 0) lse[line] = total[m] == 0 ? -INFINITE : natural + logarithm(total[m]);
                const Real weight = weight_of(total[m]);
                UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= weight;
                store_sums<T, BLOCK_DV>(out_of(r), sums[m], a.dim_v);
            }
        }
    } else {
        if (FOLD) UNROLL for (int m = 0; m < ROWS; m++) top[m] *= factor;
        const bool even = a.dim_v % 2 == 0;
        const auto share = [&](int n) { return reinterpret_cast<Real*>(rings + n * ROOM); };
        const auto finish = [&](int r, int d, Pair all) {
            const Real natural = FOLD ? all.top / UNIT : all.top;
            if (lse && d == 0) lse[line_of(r)] = all.total == 0 ? -INFINITE : natural + logarithm(all.total);
            const Real weight = weight_of(all.total);
            all.at[0] *= weight, all.at[1] *= weight;
            store_pair(out_of(r) + d, all.at, a.dim_v - d, even);
        };
        each_pair(sums, top, total, count, a.dim_v, share, [&](int r, int d, Pair all) {
            if (SPLIT == MERGED) {
                if (at.split < others) return leave(left + at.split * LEFT_BY_BLOCK + r * LEFT, d, all);
                all = of_splits(left + r * LEFT, others, d, all);
            }
            r += first;
            if (SPLIT != PARTS) return finish(r, d, all);
            const i64 part = at.split * lines + line_of(r);
            if (d == 0) maxima[part] = all.top, totals[part] = all.total;
            store_pair(parts + part * a.dim_v + d, all.at, a.dim_v - d, even);
        });
        if (SPLIT == MERGED && at.split == others) clear_left(left, others, count);
    }
}
