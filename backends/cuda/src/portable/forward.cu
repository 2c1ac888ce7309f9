// The forward: online softmax over tiles of keys (FlashAttention-2), for many queries or, split over the keys, for few.
//
// out (batch, heads, queries, dim_v) and lse (batch, heads, queries) of softmax(scores) value. A block takes BLOCK_M
// rows of one batch entry and one key head (packed.cuh), and visits the tiles of BLOCK_N keys that any of them sees.
// Where rows are few, each warp has all of them and every TEAMS-th tile of keys, and warps are put together at the end
// (together.cuh). Keys may be split among blocks as well (SPLIT).
//
//   each tile of keys    S = Q K^T | softcap, alibi, mask, tree | S becomes P, O is rescaled (softmax.cuh) | dropout | O += P V
//   at the end           O / total and lse, or parts of them (results.cuh)
//
// Shared memory: query [BLOCK_M][BLOCK_D], then for each team STAGES times key [BLOCK_N][BLOCK_D] and value
// [BLOCK_N][BLOCK_DV], then the scratch of the products. One barrier of a team for each tile of keys, in `pipeline`.
// With EIGHT a stage has both in 8 bits, and scales (stored.cuh); where many rows share a tile, a team has room for one
// in T, and one barrier more.
#include "portable/alibi.cuh"
#include "portable/hull.cuh"
#include "portable/pages.cuh"
#include "portable/results.cuh"
#include "portable/stored_products.cuh"
#include "portable/tree.cuh"

constexpr int QUERY = BLOCK_M * PITCH<BLOCK_D>, KEY = BLOCK_N * PITCH<BLOCK_D>, VALUE = BLOCK_N * PITCH<BLOCK_DV>;
constexpr int STORED_KEY = BLOCK_N * STEP_OF_ROWS<Stored, BLOCK_D>, STORED_VALUE = BLOCK_N * STEP_OF_ROWS<Stored, BLOCK_DV>;
constexpr int STAGE = (STORED_KEY + STORED_VALUE) * sizeof(Stored) + (EIGHT ? 2 * BLOCK_N * sizeof(Real) : 0);  // bytes
constexpr int MULTIPLIED_KEY = WIDENED ? KEY : STORED_KEY;
constexpr int STAGE_STEP = STAGE / int(sizeof(T)), RING = STAGES * STAGE_STEP + (WIDENED ? KEY + VALUE : 0);
constexpr int SHARES = SHARE * sizeof(Real) / sizeof(T), ROOM = RING > SHARES ? RING : SHARES;  // of a team
static_assert((QUERY + TEAMS * ROOM) * sizeof(T) + SCRATCH == SHARED_BYTES, "tiles.py counts the same shared memory");

struct Shared {
    T* const query = reinterpret_cast<T*>(shared_memory());
    T* const rings = query + QUERY;
    T* const ring = rings + team() * ROOM;  // of the thread's team
    T* const scratch = rings + TEAMS * ROOM;

    // Where a tile's keys begin as they are stored, and its values STORED_KEY later; and the scales of either.
    DEVICE Stored* stage(int slot) const { return reinterpret_cast<Stored*>(ring + slot * STAGE_STEP); }
    DEVICE Real* scales(int slot) const { return reinterpret_cast<Real*>(stage(slot) + STORED_KEY + STORED_VALUE); }
    // Where keys begin as products take them, and values MULTIPLIED_KEY later.
    DEVICE const Multiplied* multiplied(int slot) const {
        if constexpr (WIDENED) {
            T* const wide = ring + STAGES * STAGE_STEP;
            widen_rows<BLOCK_N, BLOCK_D>(wide, stage(slot));
            widen_rows<BLOCK_N, BLOCK_DV>(wide + KEY, stage(slot) + STORED_KEY);
            team_barrier();
            return reinterpret_cast<const Multiplied*>(wide);
        } else {
            return reinterpret_cast<const Multiplied*>(stage(slot));
        }
    }
    // The room of team n once it has no more tiles.
    DEVICE Real* share(int n) const { return reinterpret_cast<Real*>(rings + n * ROOM); }
};

// The tiles of keys that a team visits: every TEAMS-th of those that the block's rows see and its split has.
struct KeyTiles {
    Reach reached;
    int first, count;

    DEVICE KeyTiles(const Arguments& a, const PackedRows& rows, T* scratch) : reached(rows.reach()) {
        if (SPLIT && PAGED) {  // what the sequence sees, evenly: the same whatever lies beside it
            const Span first_sees = keys_of(a, rows.extent, 0);
            const Span last_sees = keys_of(a, rows.extent, queries_in(a, rows.extent) - 1);
            const Reach seen = ::reach(first_sees, last_sees);
            const int each = quotient(seen.tiles() + a.splits - 1, a.by_splits);
            const int from = seen.first_tile() + rows.split * each;
            reached.any.from = larger(reached.any.from, from * BLOCK_N);
            reached.any.to = smaller(reached.any.to, (from + each) * BLOCK_N);
        } else if (SPLIT) {
            reached.any.from = larger(reached.any.from, rows.split * a.chunk);
            reached.any.to = smaller(reached.any.to, (rows.split + 1) * a.chunk);
        }
        reached.any = hull(a, rows.batch, rows.first_head, a.pack, reached.any, reinterpret_cast<int*>(scratch));
        first = reached.first_tile() + team();
        count = ceil_div(larger(reached.tiles() - team(), 0), TEAMS);
    }
    // The first key of tile t.
    DEVICE int start(int t) const { return (first + t * TEAMS) * BLOCK_N; }
    DEVICE bool hides(int start) const { return reached.hides(start); }
};

DEVICE void drop(Scores& p, const Kept& kept) {
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
            if (!kept.at(m, n)) p[m][n] = 0;
}

KERNEL forward(const Arguments a) {
    const Shared shared;
    const PackedRows rows(a);
    if (VARLEN && rows.count <= 0) return clear_past(a, rows);
    const KeyTiles tiles(a, rows, shared.rings);
    const Extent e = rows.extent;

    Real sums[ROWS][COLUMNS<BLOCK_DV>];
    clear(sums);
    Softmax softmax;
    const Real factor = FOLD ? Real(a.factor) : UNIT;

    const Stored* const keys = reinterpret_cast<const Stored*>(a.key.at) +
                               (PAGED ? i64(0) : BEGIN_OF(a.key, rows.batch, first_key(e))) + rows.head_kv * a.key.head;
    const Stored* const values = reinterpret_cast<const Stored*>(a.value.at) +
                                 (PAGED ? i64(0) : BEGIN_OF(a.value, rows.batch, first_key(e))) +
                                 rows.head_kv * a.value.head;
    const T* const queries = reinterpret_cast<const T*>(a.query.at) + BEGIN_OF(a.query, rows.batch, first_query(e));
    Real* const parts = reinterpret_cast<Real*>(a.parts);
    const Others others{a, rows, parts};

    const auto load_queries = [&] {
        const auto line = [&](int r) {
            r += rows.first;
            return r < rows.all ? queries + rows.head(r) * a.query.head + rows.query(r) * a.query.row : nullptr;
        };
        load_rows<BLOCK_M, BLOCK_D, 32 * WARPS>(shared.query, line, a.query.column, a.dim, QUERY_BYTES);
        others.fetch();
    };
    const PageTable table{a, int(rows.batch)};
    u32 page = 0;  // of the next tile, asked for while the one before is loaded
    if (PAGED && tiles.count > 0) page = table.of_tile(tiles.start(0), e.end);
    Left left;
    Scales<EIGHT> scales(a, rows.head_kv, tiles.count > 0);
    const auto load = [&](int t, int slot) {
        const int start = tiles.start(t);
        Stored* const key = shared.stage(slot);
        const auto load_keys = [&](auto of_keys) {
            load_rows<BLOCK_N, BLOCK_D>(key, of_keys, a.key.column, a.dim, KEY_BYTES, ONCE);
        };
        const auto load_values = [&](auto of_values) {
            load_rows<BLOCK_N, BLOCK_DV>(key + STORED_KEY, of_values, a.value.column, a.dim_v, VALUE_BYTES, ONCE);
        };
        if (PAGED == WHOLE_PAGES) {
            const int first = table.row(start), end = first + e.end - start;
            load_keys(lines(keys + i64(page) * a.key.batch, a.key, first, end));
            load_values(lines(values + i64(page) * a.value.batch, a.value, first, end));
        } else if (PAGED == PAGES_OF_SECTIONS) {
            load_keys(SectionLines<Stored>{table, keys, a.key, start, e.end - start, page});
            load_values(SectionLines<Stored>{table, values, a.value, start, e.end - start, page});
        } else if (PAGED) {
            load_keys(PagedLines<Stored>{table, keys, a.key, start, e.end - start, page});
            load_values(PagedLines<Stored>{table, values, a.value, start, e.end - start, page});
        } else {
            load_keys(lines(keys, a.key, start, e.end));
            load_values(lines(values, a.value, start, e.end));
        }
        scales.load(shared.scales(slot), e.end - start,
                    [&](int n) { return page_of_key(table, page, start, e.end - start - 1, n); });
        if (PAGED && t + 1 < tiles.count) page = table.of_tile(tiles.start(t + 1), e.end);
    };
    Real slopes[ROWS];
    if (ALIBI) UNROLL for (int m = 0; m < ROWS; m++) slopes[m] = slope_of(a, rows.batch, rows.head(rows.mine(m)));
    const auto sees = [&](int m) { return rows.sees(m); };
    const auto mask = [&](int m) { return rows.mask(m); };
    pipeline(tiles.count, load, load_queries, [&](int t, int slot) {
        const int start = tiles.start(t);
        const Multiplied* const key = shared.multiplied(slot);
        Scores p, tangents;
        clear(p);
        MaskTile<true> masks;
        masks.fetch(a, start, tiles.hides(start), mask, a.mask.column);
        product_nt<BLOCK_N, BLOCK_D>(p, left.at(t, shared.query + warp_row() * PITCH<BLOCK_D>), key);
        scales.put_on(p, shared.scales(slot));
        scale_scores(p, tangents, a);
        if (ALIBI) slant(p, start, [&](int m) { return slopes[m]; }, [&](int m) { return rows.stands_at(m); });
        hide(p, masks, a, start, tiles.hides(start), sees, mask, a.mask.column);
        if (TREE) prune(p, a, rows, start);
        softmax.weigh(p, sums, factor, rows.count);
        if (DROPOUT) drop(p, rows.kept(start));
        scales.put_on_weights(p, sums, shared.scales(slot));
        product_nn<BLOCK_N, BLOCK_DV>(sums, p, key + MULTIPLIED_KEY, shared.scratch);
    });

    const Results results{a, rows, parts};
    softmax.finish();
    scales.put_on_sums(sums);
    if constexpr (TEAMS == 1)
        results.store_rows(sums, softmax, factor);
    else
        results.store_together(sums, softmax, factor, others, [&](int n) { return shared.share(n); });
}
