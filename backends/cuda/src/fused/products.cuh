// Products of tiles in float32 on the ordinary units: one fused multiply-add a term, 8 x 8 numbers a thread where it
// can be, so that 16 bytes read from shared memory feed 16 instructions.
//
// Shared memory serves the 16 lanes of half a warp at once where every two neighbours read the same 16 bytes, or every
// two that stand 2 apart, and else 8 lanes. So of a lane's number the last bit is of its row, the next three are of its
// column: operands of rows are then of the second kind, those of columns of the first.
#pragma once
#include "numbers.cuh"

constexpr int VECTOR = 4;
constexpr int EACH = 8;  // rows of a thread

// How the lanes of a warp share a tile: DOWN rows of lanes, ACROSS lanes a row.
template <int ROWS_OF_LANES> struct Lanes {
    static constexpr int DOWN = ROWS_OF_LANES, ACROSS = 32 / DOWN;
    static_assert(DOWN == 2 || DOWN == 4, "one bit of a row before those of a column");
    static DEVICE int row() { return (thread_index() & 1) + (DOWN == 4 ? thread_index() >> 3 & 2 : 0); }
    static DEVICE int column() { return thread_index() >> 1 & (ACROSS - 1); }
};

DEVICE Chunk<float> load_chunk(const float* at) { return load_shared(reinterpret_cast<const Chunk<float>*>(at)); }

template <int N> DEVICE void clear(float (&sums)[EACH][N]) {
    UNROLL for (int m = 0; m < EACH; m++) UNROLL for (int n = 0; n < N; n++) sums[m][n] = 0;
}

// sums += a b^T over DEPTH columns of both: the thread's rows of `a` begin APART_A elements from one another, those of
// `b` APART_B.
template <int DEPTH, int APART_A, int APART_B, int N>
DEVICE void product_nt(float (&sums)[EACH][N], const float* a, const float* b) {
    UNROLL_TWICE for (int k = 0; k < DEPTH; k += VECTOR) {
        Chunk<float> left[EACH];
        UNROLL for (int m = 0; m < EACH; m++) left[m] = load_chunk(a + m * APART_A + k);
        UNROLL for (int n = 0; n < N; n++) {
            const Chunk<float> right = load_chunk(b + n * APART_B + k);
            UNROLL for (int v = 0; v < VECTOR; v++)
                UNROLL for (int m = 0; m < EACH; m++)
                    sums[m][n] = multiply_add(left[m].at[v], right.at[v], sums[m][n]);
        }
    }
}

// sums += a b over DEPTH columns of `a` and rows of `b`, PITCH_B elements apart, of which the thread has chunks of four
// columns, APART_B apart.
template <int DEPTH, int APART_A, int PITCH_B, int APART_B, int N>
DEVICE void product_nn(float (&sums)[EACH][N], const float* a, const float* b) {
    UNROLL_TWICE for (int k = 0; k < DEPTH; k += VECTOR) {
        Chunk<float> left[EACH];
        UNROLL for (int m = 0; m < EACH; m++) left[m] = load_chunk(a + m * APART_A + k);
        UNROLL for (int v = 0; v < VECTOR; v++)
            UNROLL for (int n = 0; n < N; n += VECTOR) {
                const Chunk<float> right = load_chunk(b + (k + v) * PITCH_B + n / VECTOR * APART_B);
                UNROLL for (int w = 0; w < VECTOR; w++)
                    UNROLL for (int m = 0; m < EACH; m++)
                        sums[m][n + w] = multiply_add(left[m].at[v], right.at[w], sums[m][n + w]);
            }
    }
}

// sums += a^T b over DEPTH rows of both: of each row the thread has two chunks of four columns of `a`, APART_A apart,
// and chunks of `b` as above.
template <int DEPTH, int PITCH_A, int APART_A, int PITCH_B, int APART_B, int N>
DEVICE void product_tn(float (&sums)[EACH][N], const float* a, const float* b) {
    UNROLL_EIGHT for (int k = 0; k < DEPTH; k++) {
        Chunk<float> left[EACH / VECTOR];
        UNROLL for (int m = 0; m < EACH / VECTOR; m++) left[m] = load_chunk(a + k * PITCH_A + m * APART_A);
        UNROLL for (int n = 0; n < N; n += VECTOR) {
            const Chunk<float> right = load_chunk(b + k * PITCH_B + n / VECTOR * APART_B);
            UNROLL for (int w = 0; w < VECTOR; w++)
                UNROLL for (int m = 0; m < EACH; m++)
                    sums[m][n + w] = multiply_add(left[m / VECTOR].at[m % VECTOR], right.at[w], sums[m][n + w]);
        }
    }
}
