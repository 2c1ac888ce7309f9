// What hides scores, or is added to them: positions, and a mask of any type.
//
// Where every row of a tile sees every column by position, its mask is read without a branch, all loads at once and
// before they are needed, and two columns by one load where a row of the mask allows it (MASK_PAIRS).
#pragma once
#include "portable/scores.cuh"
#include "positions.cuh"

enum { NO_MASK, BOOL_MASK, F16_MASK, BF16_MASK, F32_MASK, F64_MASK };

// Bytes of an element of the mask.
DEVICE int mask_size() {
    return MASK_KIND == BOOL_MASK ? 1 : MASK_KIND <= BF16_MASK ? 2 : MASK_KIND == F32_MASK ? 4 : 8;
}

// As many elements of the mask as `bytes` are, from `element` on: the first in the lowest bits.
DEVICE u64 mask_bits(const Arguments& a, i64 element, int bytes) {
    const u8* const at = a.mask.at + element * mask_size();
    if (bytes == 1) return *at;
    if (bytes == 2) return *reinterpret_cast<const u16*>(at);
    if (bytes == 4) return *reinterpret_cast<const u32*>(at);
    return *reinterpret_cast<const u64*>(at);
}

// What an element adds to a score: -inf where it hides it. A finite number that Real cannot hold does not become an
// infinity.
DEVICE Real bias(u64 bits) {
    if (MASK_KIND == BOOL_MASK) return bits & 0xff ? Real(0) : -INFINITE;
    if (MASK_KIND == F16_MASK) return widen(f16{u16(bits)});
    if (MASK_KIND == BF16_MASK) return widen(bf16{u16(bits)});
    if (MASK_KIND == F32_MASK) return bits_float(u32(bits));
    const double x = bits_double(bits);
    if (x - x != 0) return Real(x);
    return Real(smaller<double>(larger<double>(x, -LOWEST), LOWEST));
}
DEVICE Real bias_at(const Arguments& a, i64 element) { return bias(mask_bits(a, element, mask_size())); }

// Whatever the score is: an infinity or NaN does not show through what hides it.
DEVICE Real masked(Real score, Real bias) { return bias == -INFINITE ? bias : score + bias; }

// A tile's part of the mask, or nothing, on its way: asked for before the product that makes the scores, so that it is
// there after it. ALONG: columns of the tile are columns of the mask.
template <bool ALONG> struct MaskTile {
    u64 bits[ROWS][COLUMNS<BLOCK_N>];  // of one element, or at every second place of two

    static DEVICE int each() { return ALONG && MASK_PAIRS ? PAIR : 1; }

    // For the columns from `start`, of a tile that hides nothing by position. `mask(m)` is where a thread's row of the
    // mask begins, which is one there is, and `step` the mask's stride along columns.
    template <class Mask> DEVICE void fetch(const Arguments& a, int start, bool hides, Mask mask, i64 step) {
        if (MASK_KIND == NO_MASK || hides) return;
        UNROLL for (int m = 0; m < ROWS; m++) {
            const i64 line = mask(m) + start * step;
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n += each())
                bits[m][n] = mask_bits(a, line + score_column(n) * (each() > 1 ? 1 : step), each() * mask_size());
        }
    }

    DEVICE void put(Scores& s) const {
        if (MASK_KIND == NO_MASK) return;
        UNROLL for (int m = 0; m < ROWS; m++)
            UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
                const int second = n % each();
                s[m][n] = masked(s[m][n], bias(bits[m][n - second] >> 8 * second * mask_size()));
            }
    }
};

// Scores plus a mask, and -inf where a position is hidden, for the columns from `start`. `hides` says that the tile
// may hold positions that a row does not see: its mask is read here then, where it is seen, and else was fetched
// before. `sees(m)` is the interval that a thread's row sees: like `mask`, made anew, not kept from tile to tile in
// registers.
template <bool ALONG, class Sees, class Mask>
DEVICE void hide(Scores& s, const MaskTile<ALONG>& fetched, const Arguments& a, int start, bool hides, Sees sees,
                 Mask mask, i64 step) {
    if (!hides) return fetched.put(s);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Span span = sees(m);
        UNROLL for (int n = 0; n < COLUMNS<BLOCK_N>; n++) {
            const int at = start + score_column(n);
            if (at < span.from || at >= span.to)
                s[m][n] = -INFINITE;
            else if (MASK_KIND != NO_MASK)
                s[m][n] = masked(s[m][n], bias_at(a, mask(m) + at * step));
        }
    }
}
