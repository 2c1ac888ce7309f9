// The products of tiles, for the type of the arrays; and sums along rows of scores.
#pragma once
#include "numbers.cuh"

// Whether keys and values are stored in 8 bits (stored.cuh), and what they are stored in.
#ifndef EIGHT
#define EIGHT 0
#endif
template <bool EIGHT_BITS> struct StoredAs { typedef T type; };
template <> struct StoredAs<true> { typedef u8 type; };
typedef StoredAs<EIGHT>::type Stored;

#if TENSOR
#include "portable/mma.cuh"
#else
#include "portable/simt.cuh"
#endif

template <class Value> DEVICE Value row_sum(Value x) {
    UNROLL for (int lanes = 1; lanes < LANES; lanes *= 2) x += shuffle_xor(x, lanes);
    return x;
}

DEVICE Real row_max(Real x) {
    UNROLL for (int lanes = 1; lanes < LANES; lanes *= 2) x = larger(x, shuffle_xor(x, lanes));
    return x;
}

template <int N> DEVICE void clear(Real (&sums)[ROWS][N]) {
    UNROLL for (int a = 0; a < ROWS; a++) UNROLL for (int c = 0; c < N; c++) sums[a][c] = 0;
}

// A thread's sums of one row (WIDTH columns, of which `dim` are there) to `to`, whose columns are neighbours.
template <class V, int WIDTH> DEVICE void store_sums(V* to, const Real (&sums)[COLUMNS<WIDTH>], int dim) {
    struct alignas(VECTOR * sizeof(V)) Vector {
        V at[VECTOR];
    };
    // Rows start where vectors do if their length is a whole number of them; allocations are aligned.
    const bool whole = dim % VECTOR == 0;
    UNROLL for (int c = 0; c < COLUMNS<WIDTH>; c += VECTOR) {
        const int d = sum_column(c);
        Vector vector;
        UNROLL for (int v = 0; v < VECTOR; v++) vector.at[v] = Narrow<V>::of(sums[c + v]);
        if (whole && d < dim)
            *reinterpret_cast<Vector*>(to + d) = vector;
        else
            UNROLL for (int v = 0; v < VECTOR; v++)
                if (d + v < dim) to[d + v] = vector.at[v];
    }
}
