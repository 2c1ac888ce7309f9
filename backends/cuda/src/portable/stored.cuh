// Keys and values in 8 bits (EIGHT, of the type CACHE): they come to shared memory as they are stored, and half of the
// bytes is read. An element stands for itself times a scale of its page and head.
//
//   e4m3, e5m2, int8    every number is one of f16 and of bf16, so that nothing is rounded
//   scales of keys      on scores, before all else; scales of values on the weights, or at the end on the sums
//
// Few rows (AS_STORED) are multiplied by what a warp widens in registers, once (stored_products.cuh). Of many a team
// widens its tile in shared memory, as its warps would do the same several times.
#pragma once
#include "portable/pages.cuh"
#ifndef CACHE
#define CACHE 0
#endif

enum { E4M3 = 1, E5M2, INT8 };  // of CACHE

constexpr bool WIDENED = EIGHT && !AS_STORED;
typedef StoredAs<AS_STORED>::type Multiplied;  // what products take

// -- four numbers of 8 bits -------------------------------------------------------------------------------------------

// As f16: bytes 0 and 2, and bytes 1 and 3; or, BESIDE, pairs of neighbours.
template <bool BESIDE> DEVICE void widen_four(u32 (&pairs)[2], u32 bytes, f16) {
    if (CACHE == E4M3) {
        widen_e4m3(pairs[0], pairs[1], BESIDE ? bytes : bytes_of<0x3120>(bytes, 0));
    } else if (CACHE == E5M2) {  // the upper half of an f16
        pairs[0] = bytes_of<(BESIDE ? 0x1404 : 0x2404)>(bytes, 0);
        pairs[1] = BESIDE ? bytes_of<0x3424>(bytes, 0) : bytes & 0xff00ff00;
    } else {  // 1024 + x + 128, less 1152
        bytes ^= 0x80808080;
        pairs[0] = add_pairs<f16>(bytes_of<(BESIDE ? 0x4140 : 0x4240)>(bytes, 0x64), 0xe480e480);
        pairs[1] = add_pairs<f16>(bytes_of<(BESIDE ? 0x4342 : 0x4341)>(bytes, 0x64), 0xe480e480);
    }
}
// The same as bf16: the upper halves of floats, whose lower ones are 0; of int8 128 + the lower 7 bits, less 128 or 256.
template <bool BESIDE> DEVICE void widen_four(u32 (&pairs)[2], u32 bytes, bf16) {
    if (CACHE == INT8) {
        pairs[0] = bytes_of<(BESIDE ? 0x4140 : 0x4240)>(bytes, 0x43);
        pairs[1] = bytes_of<(BESIDE ? 0x4342 : 0x4341)>(bytes, 0x43);
        UNROLL for (u32& pair : pairs)
            pair = add_pairs<bf16>(pair & 0xff7fff7f, (pair & 0x00800080) | 0xc300c300);
        return;
    }
    u32 halves[2], wide[4];
    widen_four<true>(halves, bytes, f16());
    UNROLL for (int n = 0; n < 4; n++) wide[n] = float_bits(widen(f16{u16(halves[n / 2] >> 16 * (n % 2))}));
    pairs[0] = bytes_of<0x7632>(wide[0], wide[BESIDE ? 1 : 2]);
    pairs[1] = bytes_of<0x7632>(wide[BESIDE ? 2 : 1], wide[3]);
}

// -- whole tiles ------------------------------------------------------------------------------------------------------

struct alignas(16) Bytes {
    u32 at[4];
};
// 16 elements, as neighbours in shared memory.
template <class V> DEVICE void store_wide(V* to, const Bytes& bytes, V) {
    UNROLL for (int n = 0; n < 16; n += Chunk<V>::SIZE) {
        Chunk<V> chunk;
        UNROLL for (int k = 0; k < Chunk<V>::SIZE; k++) {
            u32 pairs[2];
            widen_four<true>(pairs, bytes.at[(n + k) / 4], f16());
            chunk.at[k] = widen(f16{u16(pairs[(n + k) % 4 / 2] >> 16 * (k % 2))});
        }
        store_shared(reinterpret_cast<Chunk<V>*>(to + n), chunk);
    }
}
template <class V> DEVICE void store_halves(V* to, const Bytes& bytes) {
    UNROLL for (int n = 0; n < 4; n += 2) {
        u32 first[2], second[2];
        widen_four<true>(first, bytes.at[n], V());
        widen_four<true>(second, bytes.at[n + 1], V());
        store_shared(reinterpret_cast<Bytes*>(to + 4 * n), Bytes{{first[0], first[1], second[0], second[1]}});
    }
}
DEVICE void store_wide(f16* to, const Bytes& bytes, f16) { store_halves(to, bytes); }
DEVICE void store_wide(bf16* to, const Bytes& bytes, bf16) { store_halves(to, bytes); }

// COUNT rows of WIDTH columns in T, by the team's threads.
template <int COUNT, int WIDTH, class V> DEVICE void widen_rows(T* to, const V* from) {
    constexpr int PARTS = WIDTH / 16;
    UNROLL_LITTLE for (int part = thread_of<32 * TEAM>(); part < COUNT * PARTS; part += 32 * TEAM) {
        const int r = part / PARTS, d = part % PARTS * 16;
        store_wide(to + r * PITCH<WIDTH> + d,
                   load_shared(reinterpret_cast<const Bytes*>(from + r * STEP_OF_ROWS<V, WIDTH> + d)), T());
    }
}

template <class V> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;

// -- scales -----------------------------------------------------------------------------------------------------------

// Of what is stored in T there are none.
template <bool EIGHT_BITS> struct Scales {
    DEVICE Scales(const Arguments&, i64, bool) {}
    template <class Page> DEVICE void load(Real*, int, Page) const {}
    DEVICE void put_on(Real (&)[ROWS][COLUMNS<BLOCK_N>], const Real*) const {}
    DEVICE void put_on_weights(Real (&)[ROWS][COLUMNS<BLOCK_N>], Real (&)[ROWS][COLUMNS<BLOCK_DV>], const Real*) {}
    DEVICE void put_on_sums(Real (&)[ROWS][COLUMNS<BLOCK_DV>]) const {}
};

// Those of keys and of values of a head. Where pages have their own, a stage has that of each key, [BLOCK_N] and
// [BLOCK_N]; else each is one number.
template <> struct Scales<true> {
    static constexpr bool OF_TILES = IS_F16<T>;
    const Arguments& a;
    const Real* const keys;
    const Real* const values;
    const bool by_page;
    Real key = 1, sum = 1;  // on scores; on sums at the end

    DEVICE Scales(const Arguments& a, i64 head, bool any)
        : a(a), keys(reinterpret_cast<const Real*>(a.key_scales) + head * a.key_scale_head),
          values(reinterpret_cast<const Real*>(a.value_scales) + head * a.value_scale_head),
          by_page((a.key_scale_page | a.value_scale_page) != 0) {
        if (any && !by_page) key = *keys, sum = *values;  // without keys there may be no page
        if (by_page && OF_TILES) sum = 0;
    }
    // Asks for those of the keys from `start` on, of which `count` are there. `page_of(n)` is asked by whole warps.
    template <class Page> DEVICE void load(Real* to, int count, Page page_of) const {
        if (!by_page) return;
        UNROLL for (int first = 0; first < BLOCK_N; first += 32 * TEAM) {
            const int n = first + thread_of<32 * TEAM>(), bytes = n < count ? sizeof(Real) : 0;
            const i64 page = page_of(smaller(n, BLOCK_N - 1));
            if (n >= BLOCK_N) continue;
            copy_async<sizeof(Real)>(to + n, keys + (bytes ? page * a.key_scale_page : 0), bytes);
            copy_async<sizeof(Real)>(to + BLOCK_N + n, values + (bytes ? page * a.value_scale_page : 0), bytes);
        }
    }
    DEVICE void put_on(Real (&scores)[ROWS][COLUMNS<BLOCK_N>], const Real* of_tile) const {
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const Real by = by_page ? load_shared(of_tile + score_column(n)) : key;
            UNROLL for (int m = 0; m < ROWS; m++) scores[m][n] *= by;
        }
    }
    // On weights, if pages have their own. So that an f16 holds the product, it is relative to a power of 2, the same
    // for all keys of a tile, which the sums are then relative to as well.
    DEVICE void put_on_weights(Real (&p)[ROWS][COLUMNS<BLOCK_N>], Real (&sums)[ROWS][COLUMNS<BLOCK_DV>],
                               const Real* of_tile) {
        if (!by_page) return;
        Real by[COLUMNS<BLOCK_N>];
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) by[n] = load_shared(of_tile + BLOCK_N + score_column(n));
        if constexpr (OF_TILES) relate(by, sums);
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
            UNROLL for (int m = 0; m < ROWS; m++) p[m][n] *= by[n];
    }
    DEVICE void put_on_sums(Real (&sums)[ROWS][COLUMNS<BLOCK_DV>]) const {
        UNROLL for (int m = 0; m < ROWS; m++)
            UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= sum;
    }

private:
    // Makes `by` relative to the power of 2 at or below the largest, or to one that lies not too far below that of the
    // tiles before, so that a ratio of two is a number.
    DEVICE void relate(Real (&by)[COLUMNS<BLOCK_N>], Real (&sums)[ROWS][COLUMNS<BLOCK_DV>]) {
        Real most = 0;
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) most = larger(most, larger(by[n], -by[n]));
        most = bits_float(float_bits(row_max(most)) & 0x7f800000);
        if (most == 0) return;  // then weights become 0, and sums stay
        most = larger(most, sum * Real(5.421010862427522e-20));  // 2^-64
        if (most != sum) {
            const Real ratio = sum / most;
            UNROLL for (int m = 0; m < ROWS; m++)
                UNROLL for (int c = 0; c < COLUMNS<BLOCK_DV>; c++) sums[m][c] *= ratio;
            sum = most;
        }
        const Real whole = 1 / most;
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) by[n] *= whole;
    }
};
