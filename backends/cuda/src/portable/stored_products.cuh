// Products of few rows and what is stored in 8 bits, which a warp widens in registers: every element is read from shared
// memory once, in half of the bytes, and nothing is written.
//
// load_matrices brings 8 rows of 16 bytes where it would bring 8 of 8 halves, so that a lane has four bytes: of keys,
// four neighbouring columns of its row; transposed, of values, two columns of two rows. Widened they are two pairs, of
// bytes 0 and 2 and of bytes 1 and 3, and each is an operand of a product with the columns, or sums, in that order:
//
//   S = Q K^T    terms 2 l, 2 l + 1, 2 l + 8, 2 l + 9 of 16 are columns 4 l, 4 l + 2, 4 l + 1, 4 l + 3, of Q too
//   O += P V     a product has the even columns of 16, the next one the odd ones: a lane has four sums side by side
#pragma once
#include "portable/stored.cuh"

#if !(EIGHT && TENSOR && TEAMS > 1)  // AS_STORED

// The left operand of the first product for tile t.
struct Left {
    DEVICE const T* at(int, const T* query) const { return query; }
};

#else

static_assert(ROWS == 2, "few rows: one tile of 16");

struct alignas(8) Pairs {
    u32 at[2];
};

// The left operand of the first product: all of Q, kept in registers where there is room.
struct Left {
    static constexpr bool KEPT = BLOCK_D <= 128;
    const T* query;
    u32 pairs[KEPT ? BLOCK_D / 16 : 1][4];

    // For tile t; it is there at the first.
    DEVICE const Left& at(int t, const T* from) {
        query = from;
        if constexpr (KEPT)
            if (t == 0) UNROLL for (int k = 0; k < BLOCK_D; k += 16) load(pairs[k / 16], k);
        return *this;
    }

    // Terms of 16 columns from k on.
    DEVICE void load(u32 (&to)[4], int k) const {
        UNROLL for (int half = 0; half < 2; half++) {
            const T* const at = query + (lane() / 4 + 8 * half) * PITCH<BLOCK_D> + k + 4 * (lane() % 4);
            const Pairs two = load_shared(reinterpret_cast<const Pairs*>(at));
            to[half] = bytes_of<0x5410>(two.at[0], two.at[1]), to[half + 2] = bytes_of<0x7632>(two.at[0], two.at[1]);
        }
    }
    DEVICE void get(u32 (&to)[4], int k) const {
        if constexpr (KEPT)
            UNROLL for (int n = 0; n < 4; n++) to[n] = pairs[k / 16][n];
        else
            load(to, k);
    }
};

// scores (rows, N) += query (rows, DEPTH) key (N, DEPTH)^T.
template <int N, int DEPTH> DEVICE void product_nt(Real (&scores)[ROWS][COLUMNS<N>], const Left& query, const u8* key) {
    constexpr int STEP = STEP_OF_ROWS<u8, DEPTH>;
    UNROLL for (int k = 0; k < DEPTH; k += 32) {
        const bool both = k + 16 < DEPTH;  // steps of 16 columns
        u32 left[2][4];
        query.get(left[0], k);
        if (both) query.get(left[1], k + 16);
        UNROLL for (int n = 0; n < N; n += 16) {
            u32 bytes[4];
            const int second = both ? 16 * (lane() / 8 % 2) : 0;
            load_matrices(bytes, key + (n + lane() % 8 + 8 * (lane() / 16)) * STEP + k + second);
            UNROLL for (int part = 0; part < 4; part++) {
                if (part % 2 && !both) continue;
                u32 right[2];
                widen_four<false>(right, bytes[part], T());
                const int c = n / 4 + 2 * (part / 2);
                multiply_accumulate<T>(scores[0][c], scores[0][c + 1], scores[1][c], scores[1][c + 1], left[part % 2],
                                       right[0], right[1]);
            }
        }
    }
}

// sums (rows, WIDTH) += p (rows, N), rounded to T, value (N, WIDTH).
template <int N, int WIDTH>
DEVICE void product_nn(Real (&sums)[ROWS][COLUMNS<WIDTH>], const Real (&p)[ROWS][COLUMNS<N>], const u8* value, T*) {
    constexpr int STEP = STEP_OF_ROWS<u8, WIDTH>;
    UNROLL for (int k = 0; k < N; k += 16) {
        u32 left[4];
        UNROLL for (int quarter = 0; quarter < 4; quarter++) {
            const Real(&from)[COLUMNS<N>] = p[quarter % 2];
            const int c = k / 4 + quarter / 2 * 2;
            left[quarter] = pack_pair<T>(from[c], from[c + 1]);
        }
        UNROLL for (int n = 0; n < WIDTH; n += 32) {
            const bool both = n + 16 < WIDTH;
            u32 bytes[4];
            load_matrices_transposed(bytes, value + (k + lane() % 16) * STEP + n + (both ? 16 * (lane() / 16) : 0));
            UNROLL for (int part = 0; part < 2; part++) {
                if (part && !both) continue;
                u32 upper[2], lower[2];  // of the first 8 keys, and of the next
                widen_four<false>(upper, bytes[2 * part], T());
                widen_four<false>(lower, bytes[2 * part + 1], T());
                const int c = n / 4 + 4 * part;
                UNROLL for (int odd = 0; odd < 2; odd++)
                    multiply_accumulate<T>(sums[0][c + odd], sums[0][c + 2 + odd], sums[1][c + odd],
                                           sums[1][c + 2 + odd], left, upper[odd], lower[odd]);
            }
        }
    }
}

#endif
