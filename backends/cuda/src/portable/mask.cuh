// What hides scores, or is added to them: positions, and a mask of any type.
//
// Where every row of a tile sees every column by position, its mask is read without a branch, all loads at once and
// before they are needed, and two columns by one load where a row of the mask allows it (MASK_PAIRS). Generic kernels
// read all of it so, one element at a time.
#pragma once
#include "portable/scores.cuh"
#include "positions.cuh"

enum { NO_MASK, BOOL_MASK, F16_MASK, BF16_MASK, F32_MASK, F64_MASK };

// Bytes of an element of the mask.
DEVICE int mask_size(const Arguments& a) {
    return MASK_KIND == BOOL_MASK ? 1 : MASK_KIND <= BF16_MASK ? 2 : MASK_KIND == F32_MASK ? 4 : 8;
}

// As many elements of the mask as `bytes` are, from `element` on: the first in the lowest bits.
DEVICE u64 mask_bits(const Arguments& a, i64 element, int bytes) {
    const u8* const at = a.mask.at + element * mask_size(a);
    if (bytes == 1) return *at;
    if (bytes == 2) return *reinterpret_cast<const u16*>(at);
    if (bytes == 4) return *reinterpret_cast<const u32*>(at);
    return *reinterpret_cast<const u64*>(at);
}

// What an element adds to a score: -inf where it hides it. A finite number that Real cannot hold does not become an
// infinity.
DEVICE Real bias(u8 x) { return x ? Real(0) : -INFINITE; }
DEVICE Real bias(f16 x) { return widen(x); }
DEVICE Real bias(bf16 x) { return widen(x); }
DEVICE Real bias(float x) { return x; }
DEVICE Real bias(double x) {
    if (x - x != 0) return Real(x);
    return Real(smaller<double>(larger<double>(x, -LOWEST), LOWEST));
}
DEVICE Real bias_of(const Arguments& a, u64 bits) {
    if (MASK_KIND == BOOL_MASK) return bias(u8(bits));
    if (MASK_KIND == F16_MASK) return bias(f16{u16(bits)});
    if (MASK_KIND == BF16_MASK) return bias(bf16{u16(bits)});
    if (MASK_KIND == F32_MASK) return bias(bits_float(u32(bits)));
    return bias(bits_double(bits));
}
DEVICE Real bias_at(const Arguments& a, i64 element) { return bias_of(a, mask_bits(a, element, mask_size(a))); }

// Whatever the score is: an infinity or NaN does not show through what hides it.
DEVICE Real masked(Real score, Real bias) { return bias == -INFINITE ? bias : score + bias; }

// A tile's part of the mask, or nothing, on its way: asked for before the product that makes the scores, so that it is
// there after it. ALONG: columns of the tile are columns of the mask.
template <bool ALONG, bool ANY = GENERIC> struct MaskTile {
    u64 bits[ROWS][COLUMNS<BLOCK_N>];  // of one element, or at every second place of two

    static DEVICE int each() { return ALONG && MASK_PAIRS ? PAIR : 1; }

    // For the columns from `start`, of a tile that hides nothing by position. `mask(m)` is where a thread's row of the
    // mask begins, which is one there is, and `step` the mask's stride along columns.
    template <class Mask> DEVICE void fetch(const Arguments& a, int start, bool hides, Mask mask, i64 step) {
        if (MASK_KIND == NO_MASK || hides) return;
        UNROLL for (int m = 0; m < ROWS; m++) {
            const i64 line = mask(m) + start * step;
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n += each())
                bits[m][n] = mask_bits(a, line + score_column(n) * (each() > 1 ? 1 : step), each() * mask_size(a));
        }
    }

    DEVICE void put(Scores& s, const Arguments& a) const {
        if (MASK_KIND == NO_MASK) return;
        UNROLL for (int m = 0; m < ROWS; m++)
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
                const int second = n % each();
                s[m][n] = masked(s[m][n], bias_of(a, bits[m][n - second] >> 8 * second * mask_size(a)));
            }
    }

    DEVICE Real at(const Arguments& a, int, int, i64 element) const { return bias_at(a, element); }
};

// The same for a mask whose type is known at run time, of tiles that hide positions too.
template <bool ALONG> struct MaskTile<ALONG, true> {
    Real biases[ROWS][COLUMNS<BLOCK_N>];

    template <class Mask> DEVICE void fetch(const Arguments& a, int start, bool, Mask mask, i64 step) {
        if (MASK_KIND == BOOL_MASK) fetch<u8>(a, start, mask, step);
        if (MASK_KIND == F16_MASK) fetch<f16>(a, start, mask, step);
        if (MASK_KIND == BF16_MASK) fetch<bf16>(a, start, mask, step);
        if (MASK_KIND == F32_MASK) fetch<float>(a, start, mask, step);
        if (MASK_KIND == F64_MASK) fetch<double>(a, start, mask, step);
    }

    template <class V, class Mask> DEVICE void fetch(const Arguments& a, int start, Mask mask, i64 step) {
        const int last = (ALONG ? a.keys : a.queries) - 1;
        UNROLL for (int m = 0; m < ROWS; m++) {
            const V* const line = reinterpret_cast<const V*>(a.mask.at) + mask(m);
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++)
                biases[m][n] = bias(line[smaller(start + score_column(n), last) * step]);
        }
    }

    DEVICE void put(Scores&, const Arguments&) const {}
    DEVICE Real at(const Arguments&, int m, int n, i64) const { return biases[m][n]; }
};

// Scores plus a mask, and -inf where a position is hidden, for the columns from `start`. `hides` says that the tile
// may hold positions that a row does not see: its mask is read here then, where it is seen, and else was fetched
// before, as that of a generic kernel always is. `sees(m)` is the interval that a thread's row sees: like `mask`, made
// anew, not kept from tile to tile in registers.
template <bool ALONG, class Sees, class Mask>
DEVICE void hide(Scores& s, const MaskTile<ALONG>& fetched, const Arguments& a, int start, bool hides, Sees sees,
                 Mask mask, i64 step) {
    if (!hides && !(GENERIC && MASK_KIND != NO_MASK)) return fetched.put(s, a);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Span span = sees(m);
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const int at = start + score_column(n);
            if (at < span.from || at >= span.to)
                s[m][n] = -INFINITE;
            else if (MASK_KIND != NO_MASK)
                s[m][n] = masked(s[m][n], fetched.at(a, m, n, mask(m) + at * step));
        }
    }
}
