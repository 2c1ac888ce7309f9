// Who brings the tiles of the backward to shared memory, and where they are there.
#pragma once
#include "hopper/backward/own_tiles.cuh"
#include "hopper/bias.cuh"
#include "hopper/wgmma.cuh"

constexpr int UPSTREAM_STAGES = BLOCK_DV > 128 ? 1 : STAGES;  // of dO, as there is room
constexpr int COMPUTING = WARPS - 4;                          // warps that compute, each of which reads every tile

// Where tiles begin, in units of 16 bytes from the beginning of shared memory, which has them in this order.
struct Places {
    static DEVICE constexpr u32 place(int elements) { return elements * sizeof(T) / 16; }
    static DEVICE u32 key_place(int stage, int consumer) { return place((stage * CONSUMERS + consumer) * 64 * BLOCK_D); }
    static DEVICE u32 value_place(int stage, int consumer) {
        return place(KEY_STAGES * BLOCK_M * BLOCK_D + (stage * CONSUMERS + consumer) * 64 * BLOCK_DV);
    }
    static DEVICE u32 query_place(int stage) {
        return place(KEY_STAGES * BLOCK_M * (BLOCK_D + BLOCK_DV) + stage * BLOCK_N * BLOCK_D);
    }
    static DEVICE u32 grad_out_place(int stage) { return query_place(STAGES) + place(stage * BLOCK_N * BLOCK_DV); }
    static DEVICE u32 gradient_place(int tile, int consumer) {
        return grad_out_place(UPSTREAM_STAGES) + place((tile * CONSUMERS + consumer) * 64 * BLOCK_N);
    }
};

// Barriers of what is loaded, and of both tiles of dS.
template <class Shared> DEVICE void init_loaded(Shared& shared) {
    UNROLL for (int s = 0; s < KEY_STAGES; s++) {
        shared.key_full[s].init(1), shared.value_full[s].init(1);
        shared.keys_free[s].init(COMPUTING + 1);  // and who counts
    }
    UNROLL for (int s = 0; s < STAGES; s++) shared.query_full[s].init(1), shared.query_free[s].init(COMPUTING);
    UNROLL for (int s = 0; s < UPSTREAM_STAGES; s++)
        shared.grad_out_full[s].init(1), shared.grad_out_free[s].init(COMPUTING);
    UNROLL for (Barrier& written : shared.written) written.init(4 * CONSUMERS);
}

// Of the operands, and of a float mask that has rows for queries; without one it is not read.
struct Maps {
    const TensorMap &queries, &keys, &values, &upstream, &biases;
};

// Bytes that a float mask brings beside a tile of queries: its tile, and rest.
constexpr int BIAS_TILE = BIAS == BIAS_OF_ROWS ? BLOCK_N * BLOCK_M * int(sizeof(T)) : 0;
constexpr int BIAS_BYTES = BIAS_TILE + (BIAS ? BLOCK_N * int(sizeof(float)) : 0);

template <class Shared, class Step> struct Loader {
    const Arguments& a;
    Shared& shared;
    const Maps& maps;
    Position<STAGES> at;
    Position<UPSTREAM_STAGES> upstream_at;
    Position<KEY_STAGES> keys_at;
    static constexpr bool ALIKE = UPSTREAM_STAGES == STAGES;  // so that one position, in few registers, is both

    DEVICE void run() {
        for_own_tiles(a, keys_at, [&](u32 number) { load(Keys(a, number)); });
    }
    DEVICE void load(const Keys& block) {
        Step step(a, block);
        if (CONTINUED) shared.keys_free[keys_at.stage].wait(keys_at.parity ^ 1);
        Barrier &key_full = shared.key_full[keys_at.stage], &value_full = shared.value_full[keys_at.stage];
        if (step.more()) {
            rows<BLOCK_D>(shared.key[keys_at.stage], maps.keys, key_full, block);
            rows<BLOCK_DV>(shared.value[keys_at.stage], maps.values, value_full, block);
        } else if (CONTINUED)
            key_full.arrive(), value_full.arrive();
        await_launch_before();  // base and delta
        for (; step.more(); step.next()) {
            const int s = at.stage, u = ALIKE ? s : upstream_at.stage;
            const i64 line = VARLEN ? i64(step.tile(a, block)) * 64
                                    : (i64(block.batch) * a.heads + step.head) * a.padded + step.start;
            shared.query_free[s].wait(at.parity ^ 1);
            tile<BLOCK_D, BIAS_BYTES>(shared.query[s], maps.queries, shared.base[s],
                                      static_cast<float*>(a.base) + line, shared.query_full[s], step, block);
            if constexpr (BIAS != NO_BIAS) bias(s, step, block, line);
            shared.grad_out_free[u].wait((ALIKE ? at.parity : upstream_at.parity) ^ 1);
            tile<BLOCK_DV>(shared.grad_out[u], maps.upstream, shared.delta[u], static_cast<float*>(a.delta) + line,
                           shared.grad_out_full[u], step, block);
            at.next(), upstream_at.next();
        }
    }
    // The block's own rows of keys, or of values.
    template <int WIDTH>
    DEVICE void rows(T (&to)[CONSUMERS][64 * WIDTH], const TensorMap& map, Barrier& full, const Keys& block) {
        full.expect(BLOCK_M * WIDTH * sizeof(T));
        UNROLL for (int c = 0; c < CONSUMERS; c++)
            copy_tile<64, WIDTH>(to[c], map, full, block.key_row() + 64 * c, block.head_kv, block.plane());
    }
    // Rows of queries, or of their upstream gradients, with a number for each; MORE bytes are to follow.
    template <int WIDTH, int MORE = 0>
    DEVICE void tile(T* to, const TensorMap& map, float* numbers, const float* from, Barrier& full, const Queries& step,
                     const Keys& block) {
        full.expect(BLOCK_N * (WIDTH * sizeof(T) + sizeof(float)) + MORE);
        const int row = int(first_query(block.extent)) + step.start;
        copy_tile<BLOCK_N, WIDTH>(to, map, full, row, step.head, block.plane());
        copy_bytes(numbers, from, BLOCK_N * sizeof(float), &full.state);
    }
    // A float mask's tile of these queries and the block's keys, and rest, which lies behind base.
    DEVICE void bias(int s, const Queries& step, const Keys& block, i64 line) {
        const int head = a.mask.head ? step.head : 0, batch = a.mask.batch ? block.batch : 0;
        if constexpr (BIAS == BIAS_OF_ROWS)
            UNROLL for (int c = 0; c < CONSUMERS; c++)
                copy_tile<BLOCK_N, 64>(shared.bias_of(s, c), maps.biases, shared.query_full[s], step.start, head, batch,
                                       block.first + 64 * c);
        const float* const rest = static_cast<float*>(a.base) + i64(a.batch) * a.heads * a.padded + line;
        copy_bytes(shared.rest_of(s), rest, BLOCK_N * sizeof(float), &shared.query_full[s].state);
    }
};
