// Shared memory of the kernel of latent heads, and who brings the tiles there: a warp.
//
// Tiles come in panels of 64 columns, each with barriers of its own: the products of a step begin with those that come
// first, and each is free as soon as it is multiplied. Left and right halves of the values take turns, since one
// consumer has either. Where rows are few (BLOCK_M), a third tile has room (STAGES), and comes while two are multiplied.
//
// Where the values are the first columns of the keys, in the same memory (`values_within`), they are there already.
// Else they come in the keys' place, once the scores are there.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/latent/even.cuh"
#include "hopper/tma.cuh"

constexpr int KEY_PANELS = BLOCK_D / PANEL, VALUE_PANELS = BLOCK_DV / PANEL, HALF = VALUE_PANELS / 2;
// The panel that no values are in: the weights of a tile come there, once its scores are taken.
constexpr int WEIGHTS = VALUE_PANELS;
static_assert(VALUE_PANELS <= KEY_PANELS && KEY_PANELS <= VALUE_PANELS + 1, "values no wider than keys, nor much less so");

// The n-th panel that comes.
DEVICE constexpr int in_turn(int n) { return n < VALUE_PANELS ? n % 2 * HALF + n / 2 : n; }

typedef T Panel[64 * PANEL];

// Warps that multiply the weights of a tile from shared memory: those of the other consumer, or of both.
constexpr int READERS_OF_WEIGHTS = BLOCK_M == 16 ? 8 : 4;

struct Shared {
    alignas(1024) T query[KEY_PANELS][BLOCK_M * PANEL];
    alignas(1024) Panel values[STAGES][VALUE_PANELS], rest[2];
    float beside[2][64];  // what consumers tell one another of their rows
    Barrier query_full, query_free, full[STAGES][VALUE_PANELS], free[STAGES][VALUE_PANELS], rest_full[2], rest_free[2];
    Begin begin;  // EVEN

    static constexpr u32 QUERY_PLACES = sizeof query[0] / 16, PLACES = sizeof(Panel) / 16;
    // Where panels begin, in units of 16 bytes from its own beginning.
    static DEVICE u32 query_place(int panel) { return panel * QUERY_PLACES; }
    static DEVICE u32 value_place(int stage, int panel) {
        return KEY_PANELS * QUERY_PLACES + (stage * VALUE_PANELS + panel) * PLACES;
    }
    static DEVICE u32 rest_place(int t) { return value_place(STAGES, t); }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    shared.query_full.init(1), shared.query_free.init(8);
    UNROLL for (int s = 0; s < STAGES; s++)
        UNROLL for (int n = 0; n < VALUE_PANELS; n++) shared.full[s][n].init(1), shared.free[s][n].init(4);
    UNROLL for (int t = 0; t < 2; t++) shared.rest_full[t].init(1), shared.rest_free[t].init(READERS_OF_WEIGHTS);
    publish_barriers();
}

// Steps that a block has taken for other rows, and how often queries came for them.
struct Past {
    u32 steps = 0, queries = 0;
    DEVICE void add(const Rows& rows) {
        if (const int more = rows.steps()) steps += more, queries++;
    }
};

// One of the two tiles of a step, of all that a block takes, and where its panels lie.
struct Tile {
    int t, stage;
    u32 step, before;  // `before`: tiles whose values lay there

    DEVICE Tile(u32 step, int t) : t(t), step(step) {
        const u32 n = 2 * step + t;
        stage = STAGES == 2 ? t : n % STAGES, before = STAGES == 2 ? step : n / STAGES;
    }
    // How many times values have come there before: with values of their own, twice a tile.
    DEVICE u32 uses_before(const Arguments& a) const { return a.values_within ? before : 2 * before; }
    DEVICE u32 place(int panel) const {
        return panel < VALUE_PANELS ? Shared::value_place(stage, panel) : Shared::rest_place(t);
    }
};

// The panels of both tiles in the order in which they come. Of more than two tiles the first of a step comes whole: the
// other one may have to wait for room.
template <class Each> DEVICE void each_panel(int count, Each each) {
    if (STAGES == 2) {
        UNROLL for (int n = 0; n < count; n++)
            UNROLL for (int t = 0; t < 2; t++) each(t, in_turn(n));
    } else {
        UNROLL for (int t = 0; t < 2; t++)
            UNROLL for (int n = 0; n < VALUE_PANELS; n++) each(t, in_turn(n));
        UNROLL for (int n = VALUE_PANELS; n < count; n++)
            UNROLL for (int t = 0; t < 2; t++) each(t, n);
    }
}

// Rows that a load brings, and loads for a tile: of pages as long as a tile, or longer, one.
constexpr int LOADED = PAGE_ROWS, LOADS = BLOCK_N / LOADED;

// Where the rows of a tile are, a load of them to a lane.
struct Lookup {
    int plane, row, count;  // of loads that the tile has

    DEVICE Lookup(const Rows& rows, int step, int t) {
        const Arguments& a = rows.a;
        const int lane = thread_index() % 32, start = rows.start(step, t), key = start + LOADED * lane;
        count = larger(smaller(ceil_div(rows.extent.end - start, LOADED), LOADS), 0);
        plane = rows.plane(), row = int(first_key(rows.extent)) + key;
        if (!PAGED || lane >= count) return;
        const int number = quotient(key, a.by_page);
        const i64 at = rows.batch * a.table_batch + number * a.table_step;
        row = key - number * a.page;
        plane = a.table_bytes == 4 ? reinterpret_cast<const int*>(a.table)[at]
                                   : int(reinterpret_cast<const i64*>(a.table)[at]);
    }
};

// The same of all its loads, in registers of the warp, where TMA's instructions read them.
struct Places {
    int plane[LOADS], row[LOADS], count;

    DEVICE Places(const Lookup& own) : count(broadcast(own.count)) {
        UNROLL for (int n = 0; n < LOADS; n++) plane[n] = of_lane(own.plane, n), row[n] = of_lane(own.row, n);
    }
};

// With no room but for what is multiplied, loads that are asked for at once get in the way of products: TRIED.md.
#if STAGES > 2
typedef Places Found;
#else
typedef Lookup Found;
#endif

struct Loader {
    const Arguments& a;
    Shared& shared;
    const Rows& rows;
    const Past past;
    const TensorMap &queries, &keys, &values;
    const int head_kv = broadcast(rows.head_kv);

    DEVICE void run() {
        const int steps = rows.steps();
        if (!steps) return;
        const bool at_once = STAGES == 2 || !past.queries;
        if (at_once) load_queries();
        Lookup next[2] = {{rows, 0, 0}, {rows, 0, 1}};
        ROLLED for (int step = 0; step < steps; step++) {
            const Found places[2] = {next[0], next[1]};
            UNROLL for (int t = 0; t < 2; t++) next[t] = {rows, step + 1, t};  // looked up while these are loaded
            const Tile tiles[2] = {{past.steps + step, 0}, {past.steps + step, 1}};
            each_panel(KEY_PANELS, [&](int t, int n) {
                // After keys that have room already, where queries wait for others.
                if (STAGES > 2 && step == 0 && t == 1 && n == 0 && !at_once) load_queries();
                load(keys, places[t], tiles[t], n, 0);
            });
            if (!a.values_within) each_panel(VALUE_PANELS, [&](int t, int n) { load(values, places[t], tiles[t], n, 1); });
        }
    }
    DEVICE void load_queries() {
        if (SPLIT == EVEN) shared.query_free.wait(~past.queries & 1);
        if (!is_elected()) return;
        shared.query_full.expect(sizeof shared.query);
        UNROLL for (int n = 0; n < KEY_PANELS; n++)
            copy_box(shared.query[n], queries, &shared.query_full.state, n * PANEL,
                     int(first_query(rows.extent)) + rows.first, rows.head, rows.plane());
    }
    // A panel of a tile, `more` times after its keys. Of a tile past the end nothing comes.
    DEVICE void load(const TensorMap& operand, const Found& places, const Tile& tile, int panel, u32 more) {
        if (panel < VALUE_PANELS)
            shared.free[tile.stage][panel].wait(~(tile.uses_before(a) + more) & 1);
        else
            shared.rest_free[tile.t].wait(~tile.step & 1);
        ask(operand, places, tile, panel);
    }
    DEVICE Barrier& full(const Tile& tile, int panel) {
        return panel < VALUE_PANELS ? shared.full[tile.stage][panel] : shared.rest_full[tile.t];
    }
    DEVICE T* place(const Tile& tile, int panel) {
        return panel < VALUE_PANELS ? shared.values[tile.stage][panel] : shared.rest[tile.t];
    }
    // One lane asks for all loads at once.
    DEVICE void ask(const TensorMap& operand, const Places& places, const Tile& tile, int panel) {
        if (!is_elected()) return;
        full(tile, panel).expect(places.count * BYTES);
        UNROLL for (int n = 0; n < LOADS; n++)
            if (n < places.count)
                copy_box(place(tile, panel) + n * LOADED * PANEL, operand, &full(tile, panel).state, panel * PANEL,
                         places.row[n], head_kv, places.plane[n]);
    }
    // Each lane asks for its own, one after another, in a loop that the assembler makes of it.
    DEVICE void ask(const TensorMap& operand, const Lookup& own, const Tile& tile, int panel) {
        const int lane = thread_index() % 32;
        if (lane == 0) full(tile, panel).expect(own.count * BYTES);
        if (lane < own.count)
            copy_box(place(tile, panel) + lane * LOADED * PANEL, operand, &full(tile, panel).state, panel * PANEL, own.row,
                     head_kv, own.plane);
    }
    static constexpr int BYTES = LOADED * PANEL * sizeof(T);
};
