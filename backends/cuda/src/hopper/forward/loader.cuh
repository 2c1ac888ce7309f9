// Shared memory of the forward, and who brings the tiles there.
#pragma once
#include "hopper/forward/bias.cuh"
#include "hopper/forward/scheduler.cuh"

// The next rows' queries are there while those before are still multiplied, if there is room.
constexpr int QUERY_STAGES = BLOCK_D <= (BIAS ? 64 : 128) ? 2 : 1;
static_assert(QUERY_STAGES == 2 || !CONTINUED, "queries of two tiles of rows");

constexpr int QUERY = SIZE_OF<64, BLOCK_D>, KEY = SIZE_OF<BLOCK_N, BLOCK_D>, VALUE = SIZE_OF<BLOCK_N, BLOCK_DV>;

struct Shared {
    alignas(1024) T query[QUERY_STAGES][CONSUMERS][QUERY];
    alignas(1024) T key[STAGES][KEY];
    alignas(1024) T value[STAGES][VALUE];
#if BIAS
    alignas(1024) T bias[STAGES][BIASES][BIAS_SIZE];  // comes and goes with the keys
#endif
    Barrier query_full[QUERY_STAGES][CONSUMERS], query_free[QUERY_STAGES][CONSUMERS];
    u32 told[STAGES];  // MASKED: of the keys of a stage, the number of the tile and a bit for each consumer (`Left::next`)
    Barrier key_full[STAGES], key_free[STAGES], value_full[STAGES], value_free[STAGES];
    Ticket ticket;

    // Where its tiles begin, in units of 16 bytes from its own beginning.
    static DEVICE u32 query_place(int stage, int consumer) { return (stage * CONSUMERS + consumer) * QUERY_PLACES; }
    static DEVICE u32 key_place(int stage) { return QUERY_STAGES * CONSUMERS * QUERY_PLACES + stage * KEY_PLACES; }
    static DEVICE u32 value_place(int stage) { return key_place(STAGES) + stage * VALUE_PLACES; }
    static constexpr u32 QUERY_PLACES = QUERY * sizeof(T) / 16;
    static constexpr u32 KEY_PLACES = KEY * sizeof(T) / 16;
    static constexpr u32 VALUE_PLACES = VALUE * sizeof(T) / 16;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "tiles.py counts the same shared memory");

DEVICE void init_barriers(Shared& shared) {
    UNROLL for (int s = 0; s < QUERY_STAGES; s++)
        UNROLL for (int c = 0; c < CONSUMERS; c++) shared.query_full[s][c].init(1), shared.query_free[s][c].init(4);
    UNROLL for (int s = 0; s < STAGES; s++) {
        shared.key_full[s].init(1), shared.key_free[s].init(4 * CONSUMERS);
        shared.value_full[s].init(1), shared.value_free[s].init(4 * CONSUMERS);
    }
    shared.ticket.full.init(1), shared.ticket.free.init(1 + 4 * CONSUMERS);
    if (!TOLD) shared.ticket.full.arrive();  // the first tile, which all know
    publish_barriers();
}

// Tiles of keys that are still to be loaded when the next rows are asked for.
constexpr int AHEAD = 2;

// Loads keys and values, in the order of use: the values of a tile after the keys of the next one, whatever its rows.
struct Loader {
    const Arguments& a;
    Shared& shared;
    const TensorMap &keys, &values, &biases;
    Position<STAGES> key_at, value_at;
    int start = -1, head_kv = 0, plane = 0;  // values that are still to be loaded

    DEVICE void run() {
        Schedule schedule{a, shared.ticket};
        Left left;
        if (TOLD) schedule.follow();
        for (; schedule.more(); schedule.follow()) {
            const Work& work = schedule.work;
            if (MASKED) left.begin(work);
            for (int i = 0; i < work.count; i++) {
                if (i == larger(work.count - AHEAD, 0)) schedule.want();
                const u32 told = MASKED ? left.next(a, work) : 0;
                const int tile = MASKED ? int(told >> CONSUMERS) : work.end_tile - 1 - i;
                key(work, tile, told);
                value();
                start = work.key_row(tile), head_kv = work.head_kv, plane = work.plane();
            }
            if (work.count == 0) {  // the next keys may be long in coming
                value();
                schedule.want();
            }
        }
        value();
    }
    DEVICE void key(const Work& work, int tile, u32 told) {
        const int s = key_at.stage;
        shared.key_free[s].wait(key_at.parity ^ 1);
        if (MASKED) shared.told[s] = told;
        shared.key_full[s].expect(KEY * sizeof(T) + BIAS_BYTES);
        copy_tile<BLOCK_N, BLOCK_D>(shared.key[s], keys, shared.key_full[s], work.key_row(tile), work.head_kv,
                                    work.plane());
        bias(work, tile);
        key_at.next();
    }
    // Of the mask, for the keys of this stage.
    DEVICE void bias(const Work& work, int tile) {
#if BIAS
        const int s = key_at.stage, head = a.mask.head ? work.head : 0, batch = a.mask.batch ? work.batch : 0;
        UNROLL for (int n = 0; n < BIASES; n++)
            copy_tile<BIAS_ROOM, BLOCK_N>(shared.bias[s][n], biases, shared.key_full[s],
                                          BIAS == BIAS_OF_ALL ? 0 : work.first + 64 * n, head, batch, tile * BLOCK_N);
#endif
    }
    DEVICE void value() {
        if (start < 0) return;
        const int s = value_at.stage;
        shared.value_free[s].wait(value_at.parity ^ 1);
        load_tile<BLOCK_N, BLOCK_DV>(shared.value[s], values, shared.value_full[s], start, head_kv, plane);
        value_at.next();
        start = -1;
    }
};

// Deals tiles of rows, and loads their queries: a thread of its own, so that no keys wait for it.
struct Dealer {
    const Arguments& a;
    Shared& shared;
    const TensorMap& queries;
    Position<QUERY_STAGES> query_at;

    DEVICE void run() {
        Schedule schedule{a, shared.ticket};
        if (MASKED) await_launch_before();
        if (TOLD) schedule.tell();
        for (; schedule.more(); schedule.deal())
            if (schedule.work.count) query(schedule.work);
    }
    DEVICE void query(const Work& work) {
        const int s = query_at.stage;
        UNROLL for (int c = 0; c < CONSUMERS; c++) {
            shared.query_free[s][c].wait(query_at.parity ^ 1);
            load_tile<64, BLOCK_D>(shared.query[s][c], queries, shared.query_full[s][c], work.query_row() + 64 * c,
                                   work.head, work.plane());
        }
        query_at.next();
    }
};
