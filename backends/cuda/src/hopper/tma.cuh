// Tiles of an operand (batch, heads, rows, columns) brought to shared memory by TMA.
//
// A tile [ROWS][WIDTH] lies in panels of 64 columns, [PANELS][ROWS][64]: a row of a panel is 128 bytes, the span of
// the swizzle, by which the 16 bytes number n of row r lie at n ^ r % 8. Panels begin at multiples of 1024 bytes, where
// the pattern begins. What lies outside the operand arrives as 0; so does what of the last panel lies outside the tile,
// which no product reads.
#pragma once
#include "hopper/barriers.cuh"

// Elements of a tile, its last panel included.
template <int ROWS, int WIDTH> constexpr int SIZE_OF = ROWS * ((WIDTH + PANEL - 1) / PANEL * PANEL);

// Asks for ROWS rows from `row` on of one head, from column `first` on, which `full` expects.
template <int ROWS, int WIDTH>
DEVICE void copy_tile(T* tile, const TensorMap& map, Barrier& full, int row, int head, int batch, int first = 0) {
    UNROLL for (int column = 0; column < WIDTH; column += PANEL)
        copy_box(tile + column * ROWS, map, &full.state, first + column, row, head, batch);
}
// The same, and nothing else: `full` completes with them.
template <int ROWS, int WIDTH>
DEVICE void load_tile(T* tile, const TensorMap& map, Barrier& full, int row, int head, int batch) {
    full.expect(SIZE_OF<ROWS, WIDTH> * sizeof(T));
    copy_tile<ROWS, WIDTH>(tile, map, full, row, head, batch);
}

// Takes the rows from `first` on out of a tile, by a consumer that is to multiply it; another one may do the same.
template <int ROWS, int WIDTH> DEVICE void clear_rows(T* tile, int first) {
    constexpr int CHUNK = 16 / sizeof(T), ROW = PANEL / CHUNK;
    for (int column = 0; column < WIDTH; column += PANEL)
        for (int n = first * ROW + thread_index() % 128; n < ROWS * ROW; n += 128)
            store_shared(reinterpret_cast<Chunk<T>*>(tile + column * ROWS + n * CHUNK), Chunk<T>{});
    show_writes();
}
