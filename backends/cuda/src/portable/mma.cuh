// Tile products of 16-bit types on tensor cores: mma.sync m16n8k16, sums in float.
//
// A warp owns WARP_ROWS rows of a tile of scores. A thread holds of them 2 in each 16: its row a is
// 16 (a / 2) + lane / 4 + 8 (a % 2), its column c is 8 (c / 2) + 2 (lane % 4) + c % 2. Sums lie the same way as scores,
// so that scores become the left operand of the next product where they are.
//
// In shared memory rows lie PITCH elements apart: 16 bytes more than they hold, an odd number of 16 bytes, so that
// eight rows that are read at once lie in different banks.
#pragma once
#include "portable/teams.cuh"

constexpr int WARP_ROWS = BLOCK_M / TEAM;
static_assert(WARP_ROWS % 16 == 0, "a warp owns whole tiles of 16 rows");
static_assert(BLOCK_N % 16 == 0 && BLOCK_D % 16 == 0 && BLOCK_DV % 16 == 0, "columns come in steps of 16");
constexpr int ROWS = WARP_ROWS / 8;                    // of a thread
constexpr int LANES = 4;                               // that share a row
constexpr int VECTOR = 2;                              // neighbouring columns of sums that a thread holds
constexpr int PAIR = 2;                                // and of scores
constexpr int SCRATCH = 0;                             // bytes of shared memory for the scores of a block
template <int N> constexpr int COLUMNS = N / 4;        // of a thread, of N
template <int WIDTH> constexpr int PITCH = WIDTH + 8;  // elements

DEVICE int lane() { return thread_index() % 32; }
DEVICE int warp_row() { return TEAM == 1 ? 0 : thread_index() / 32 * WARP_ROWS; }
constexpr int first_row(int a) { return 16 * (a / 2) + 8 * (a % 2); }  // of those that lanes have for a
DEVICE int row(int a) { return first_row(a) + lane() / 4; }
DEVICE int column(int c) { return 8 * (c / 2) + 2 * (lane() % 4) + c % 2; }
DEVICE int score_column(int c) { return column(c); }
// Of values that are multiplied as they are stored, a lane has four neighbouring sums (stored_products.cuh).
constexpr bool AS_STORED = EIGHT && TEAMS > 1;
DEVICE int sum_column(int c) { return AS_STORED ? 16 * (c / 4) + 4 * (lane() % 4) + c % 4 : column(c); }

// sums (rows, N) += a (rows, DEPTH) b (N, DEPTH)^T, both in shared memory.
template <int N, int DEPTH> DEVICE void product_nt(Real (&sums)[ROWS][COLUMNS<N>], const T* a, const T* b) {
    UNROLL for (int k = 0; k < DEPTH; k += 16) {
        u32 left[ROWS / 2][4];
        UNROLL for (int m = 0; m < ROWS / 2; m++)
            load_matrices(left[m], a + (16 * m + lane() % 16) * PITCH<DEPTH> + k + 8 * (lane() / 16));
        UNROLL for (int n = 0; n < N; n += 16) {
            u32 right[4];
            load_matrices(right, b + (n + lane() % 8 + 8 * (lane() / 16)) * PITCH<DEPTH> + k + 8 * (lane() / 8 % 2));
            UNROLL for (int m = 0; m < ROWS / 2; m++) {
                Real(&upper)[COLUMNS<N>] = sums[2 * m], (&lower)[COLUMNS<N>] = sums[2 * m + 1];
                const int c = n / 4;
                multiply_accumulate<T>(upper[c], upper[c + 1], lower[c], lower[c + 1], left[m], right[0], right[1]);
                multiply_accumulate<T>(upper[c + 2], upper[c + 3], lower[c + 2], lower[c + 3], left[m], right[2],
                                       right[3]);
            }
        }
    }
}

// sums (rows, WIDTH) += p (rows, N), in registers and rounded to T, times b (N, WIDTH) in shared memory.
template <int N, int WIDTH>
DEVICE void product_nn(Real (&sums)[ROWS][COLUMNS<WIDTH>], const Real (&p)[ROWS][COLUMNS<N>], const T* b, T*) {
    UNROLL for (int k = 0; k < N; k += 16) {
        u32 left[ROWS / 2][4];
        UNROLL for (int m = 0; m < ROWS / 2; m++)
            UNROLL for (int quarter = 0; quarter < 4; quarter++) {
                const Real(&from)[COLUMNS<N>] = p[2 * m + quarter % 2];
                const int c = k / 4 + quarter / 2 * 2;
                left[m][quarter] = pack_pair<T>(from[c], from[c + 1]);
            }
        UNROLL for (int n = 0; n < WIDTH; n += 16) {
            u32 right[4];
            load_matrices_transposed(right, b + (k + lane() % 16) * PITCH<WIDTH> + n + 8 * (lane() / 16));
            UNROLL for (int m = 0; m < ROWS / 2; m++) {
                Real(&upper)[COLUMNS<WIDTH>] = sums[2 * m], (&lower)[COLUMNS<WIDTH>] = sums[2 * m + 1];
                const int c = n / 4;
                multiply_accumulate<T>(upper[c], upper[c + 1], lower[c], lower[c + 1], left[m], right[0], right[1]);
                multiply_accumulate<T>(upper[c + 2], upper[c + 3], lower[c + 2], lower[c + 3], left[m], right[2],
                                       right[3]);
            }
        }
    }
}
