// Shared memory of the kernel of latent heads, and who brings the tiles there: a warp.
//
// Tiles come in panels of 64 columns, each with barriers of its own: the products of a step begin with those that come
// first, and each is free as soon as it is multiplied. Left and right halves of the values take turns, since one
// consumer has either.
//
// Where the values are the first columns of the keys, in the same memory (`values_within`), they are there already.
// Else they come in the keys' place, once the scores are there.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/latent/rows.cuh"
#include "hopper/tma.cuh"

constexpr int KEY_PANELS = BLOCK_D / PANEL, VALUE_PANELS = BLOCK_DV / PANEL, HALF = VALUE_PANELS / 2;
// The first panel that no values are in: the weights of a tile come there, once its scores are taken.
constexpr int WEIGHTS = VALUE_PANELS, PANELS = KEY_PANELS > WEIGHTS ? KEY_PANELS : WEIGHTS + 1;
static_assert(VALUE_PANELS <= KEY_PANELS && KEY_PANELS <= VALUE_PANELS + 1, "values no wider than keys, nor much less so");

// The n-th panel that comes.
DEVICE constexpr int in_turn(int n) { return n < VALUE_PANELS ? n % 2 * HALF + n / 2 : n; }

typedef T Panel[64 * PANEL];

struct Shared {
    alignas(1024) Panel query[KEY_PANELS];
    alignas(1024) Panel tile[2][PANELS];
    float beside[2][64];  // what consumers tell one another of their rows
    Barrier query_full, full[2][PANELS], free[2][PANELS];

    static constexpr u32 PLACES = sizeof(Panel) / 16;
    // Where panels begin, in units of 16 bytes from its own beginning.
    static DEVICE u32 query_place(int panel) { return panel * PLACES; }
    static DEVICE u32 tile_place(int t, int panel) { return (KEY_PANELS + t * PANELS + panel) * PLACES; }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    shared.query_full.init(1);
    UNROLL for (int t = 0; t < 2; t++)
        UNROLL for (int n = 0; n < PANELS; n++) shared.full[t][n].init(1), shared.free[t][n].init(4);
    publish_barriers();
}

// How many times a panel has come before those of a step: with values of their own, twice a step.
DEVICE u32 uses_before(const Arguments& a, int step, int panel) {
    return panel < VALUE_PANELS && !a.values_within ? 2 * step : step;
}

// Rows that a load brings, and loads for a tile, each by a lane: of pages as long as a tile, or longer, one.
constexpr int LOADED = PAGE_ROWS, LOADS = BLOCK_N / LOADED;

// Where the rows are that a lane loads of a tile, and how many loads that has.
struct Places {
    int plane, row, count;

    DEVICE void find(const Rows& rows, int step, int t) {
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

struct Loader {
    const Arguments& a;
    Shared& shared;
    const Rows& rows;
    const TensorMap &queries, &keys, &values;

    DEVICE void run() {
        const int steps = rows.steps();
        if (!steps) return;
        const int lane = thread_index() % 32;
        if (lane == 0) shared.query_full.expect(sizeof shared.query);
        if (lane == 0) UNROLL for (int n = 0; n < KEY_PANELS; n++)
            copy_box(shared.query[n], queries, &shared.query_full.state, n * PANEL,
                     int(first_query(rows.extent)) + rows.first, rows.head, rows.plane());
        Places places[2];
        UNROLL for (int t = 0; t < 2; t++) places[t].find(rows, 0, t);
        ROLLED for (int step = 0; step < steps; step++) {
            Places next[2];  // looked up while these are loaded
            UNROLL for (int t = 0; t < 2; t++) next[t].find(rows, step + 1, t);
            UNROLL for (int n = 0; n < KEY_PANELS; n++)
                UNROLL for (int t = 0; t < 2; t++)
                    panel(keys, places[t], t, in_turn(n), uses_before(a, step, in_turn(n)));
            if (!a.values_within)
                UNROLL for (int n = 0; n < VALUE_PANELS; n++)
                    UNROLL for (int t = 0; t < 2; t++)
                        panel(values, places[t], t, in_turn(n), uses_before(a, step, in_turn(n)) + 1);
            UNROLL for (int t = 0; t < 2; t++) places[t] = next[t];
        }
    }
    // One of a tile, the `use`-th time. Of a tile past the end nothing comes.
    DEVICE void panel(const TensorMap& operand, const Places& places, int t, int panel, u32 use) {
        const int lane = thread_index() % 32;
        Barrier& full = shared.full[t][panel];
        shared.free[t][panel].wait(~use & 1);
        if (lane == 0) full.expect(places.count * LOADED * PANEL * int(sizeof(T)));
        if (lane < places.count)
            copy_box(shared.tile[t][panel] + lane * LOADED * PANEL, operand, &full.state, panel * PANEL, places.row,
                     rows.head_kv, places.plane);
    }
};
