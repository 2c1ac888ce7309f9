// Tiles of an operand (batch, heads, rows, columns) brought to shared memory by TMA.
//
// A tile [ROWS][WIDTH] lies in panels of 64 columns, [WIDTH / 64][ROWS][64]: a row of a panel is 128 bytes, the span of
// the swizzle, by which the 16 bytes number n of row r lie at n ^ r % 8. Panels begin at multiples of 1024 bytes, where
// the pattern begins. What lies outside the operand arrives as 0.
#pragma once
#include "hopper/barriers.cuh"

constexpr int PANEL = 64;  // columns

// A CUtensorMap of an operand: dimensions column, row, head, batch.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

DEVICE void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Asks for ROWS rows from `row` on of one head; `full` completes with them.
template <int ROWS, int WIDTH>
DEVICE void load_tile(T* tile, const TensorMap& map, Barrier& full, int row, int head, int batch) {
    full.expect(ROWS * WIDTH * sizeof(T));
    UNROLL for (int column = 0; column < WIDTH; column += PANEL)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                     ::"r"(shared_address(tile + column * ROWS)), "l"(&map), "r"(shared_address(&full)), "r"(column),
                       "r"(row), "r"(head), "r"(batch) : "memory");
}

// Takes the rows from `first` on out of a tile, by a consumer that is to multiply it; another one may do the same.
template <int ROWS, int WIDTH> DEVICE void clear_rows(T* tile, int first) {
    constexpr int CHUNK = 16 / sizeof(T), ROW = PANEL / CHUNK;
    for (int column = 0; column < WIDTH; column += PANEL)
        for (int n = first * ROW + thread_index() % 128; n < ROWS * ROW; n += 128)
            *reinterpret_cast<uint4*>(tile + column * ROWS + n * CHUNK) = uint4{0, 0, 0, 0};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what threads wrote, products are to see
}
