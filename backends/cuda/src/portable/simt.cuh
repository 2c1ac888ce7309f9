// Tile products of float and double on the ordinary units, in IEEE arithmetic: one fused multiply-add a term.
//
// A warp owns WARP_ROWS rows of a tile of scores; its lanes stand in 4 rows of 8. A thread's row a is lane / 8 + 4 a,
// its column c of scores lane % 8 + 8 c: it multiplies ROWS by COLUMNS out of registers, so that 16 bytes read from
// shared memory feed many terms. Of sums it holds chunks of 16 bytes, 8 chunks apart, which are read and written whole.
//
// In shared memory rows lie PITCH elements apart, an odd number of 16 bytes: eight rows that are read at once lie in
// different banks. Scores that become the left operand of a product pass through SCRATCH, where a warp has rows of its
// own.
#pragma once
#include "portable/teams.cuh"

constexpr int VECTOR = Chunk<T>::SIZE;  // neighbouring columns of sums that a thread holds
constexpr int PAIR = 1;                 // and of scores
constexpr int WARP_ROWS = BLOCK_M / TEAM;
static_assert(WARP_ROWS % 4 == 0, "a warp owns whole groups of 4 rows");
static_assert(BLOCK_N % 8 == 0, "8 lanes share the columns of a row");
static_assert(BLOCK_D % (8 * VECTOR) == 0 && BLOCK_DV % (8 * VECTOR) == 0, "and 8 chunks of a sum");
constexpr int ROWS = WARP_ROWS / 4;                         // of a thread
constexpr int LANES = 8;                                    // that share a row
template <int N> constexpr int COLUMNS = N / 8;             // of a thread, of N
template <int WIDTH> constexpr int PITCH = WIDTH + VECTOR;  // elements
constexpr int SCRATCH = TEAMS * BLOCK_M * PITCH<BLOCK_N> * sizeof(T);

constexpr bool AS_STORED = false;  // of 8 bits numbers are widened before they are multiplied

DEVICE int lane() { return thread_index() % 32; }
DEVICE int warp_row() { return TEAM == 1 ? 0 : thread_index() / 32 * WARP_ROWS; }
constexpr int first_row(int a) { return 4 * a; }  // of those that lanes have for a
DEVICE int row(int a) { return first_row(a) + lane() / 8; }
DEVICE int score_column(int c) { return lane() % 8 + 8 * c; }
DEVICE int sum_column(int c) { return (lane() % 8 + 8 * (c / VECTOR)) * VECTOR + c % VECTOR; }

DEVICE Chunk<T> load_chunk(const T* at) { return load_shared(reinterpret_cast<const Chunk<T>*>(at)); }

// sums (rows, N) += a (rows, DEPTH) b (N, DEPTH)^T, both in shared memory.
template <int N, int DEPTH> DEVICE void product_nt(Real (&sums)[ROWS][COLUMNS<N>], const T* a, const T* b) {
    UNROLL_LITTLE for (int k = 0; k < DEPTH; k += VECTOR) {
        Chunk<T> left[ROWS];
        UNROLL for (int m = 0; m < ROWS; m++)
            left[m] = load_chunk(a + row(m) * PITCH<DEPTH> + k);
        UNROLL for (int n = 0; n < COLUMNS<N>; n++) {
            const Chunk<T> right = load_chunk(b + score_column(n) * PITCH<DEPTH> + k);
            UNROLL for (int v = 0; v < VECTOR; v++)
                UNROLL for (int m = 0; m < ROWS; m++)
                    sums[m][n] = multiply_add(left[m].at[v], right.at[v], sums[m][n]);
        }
    }
}

// sums (rows, WIDTH) += p (rows, N), in registers, times b (N, WIDTH) in shared memory.
//
// In float the terms of a tile are added up by themselves first, as one chain over all keys would round a quarter more:
// a part of the columns at a time, for want of registers.
template <int N, int WIDTH>
DEVICE void product_nn(Real (&sums)[ROWS][COLUMNS<WIDTH>], const Real (&p)[ROWS][COLUMNS<N>], const T* b, T* scratch) {
    constexpr bool APART = sizeof(Real) == 4;
    constexpr int PART = COLUMNS<(!APART ? WIDTH : WIDTH > 64 && WIDTH % 64 == 0 ? 64 : 32)>;
    static_assert(PART % VECTOR == 0 && COLUMNS<WIDTH> % PART == 0, "parts of whole chunks");
    T* const mine = scratch + thread_index() / 32 * WARP_ROWS * PITCH<N>;
    warp_barrier();  // what was there before has been read
    UNROLL for (int m = 0; m < ROWS; m++)
        UNROLL for (int n = 0; n < COLUMNS<N>; n++) store_shared(mine + row(m) * PITCH<N> + score_column(n), p[m][n]);
    warp_barrier();
    UNROLL for (int first = 0; first < COLUMNS<WIDTH>; first += PART) {
        Real tile[ROWS][PART];
        UNROLL for (int m = 0; m < ROWS; m++)
            UNROLL for (int c = 0; c < PART; c++) tile[m][c] = APART ? Real(0) : sums[m][first + c];
        UNROLL_LITTLE for (int k = 0; k < N; k += VECTOR) {
            Chunk<T> left[ROWS];
            UNROLL for (int m = 0; m < ROWS; m++)
                left[m] = load_chunk(mine + row(m) * PITCH<N> + k);
            UNROLL for (int v = 0; v < VECTOR; v++)
                UNROLL for (int c = 0; c < PART; c += VECTOR) {
                    const Chunk<T> right = load_chunk(b + (k + v) * PITCH<WIDTH> + sum_column(first + c));
                    UNROLL for (int w = 0; w < VECTOR; w++)
                        UNROLL for (int m = 0; m < ROWS; m++)
                            tile[m][c + w] = multiply_add(left[m].at[v], right.at[w], tile[m][c + w]);
                }
        }
        UNROLL for (int m = 0; m < ROWS; m++)
            UNROLL for (int c = 0; c < PART; c++)
                sums[m][first + c] = APART ? sums[m][first + c] + tile[m][c] : tile[m][c];
    }
}
