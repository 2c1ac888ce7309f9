// The order of sequences of unlike lengths, where rows are few: the longest first, since what begins last is to end soon.
#pragma once
#include "extents.cuh"

constexpr int MOST_ORDERED = 256;

// Which sequence comes at `place`, by a whole warp: by the five highest bits of the longest length, and sequences alike
// in those as they are. More than MOST_ORDERED come as they are; so do the rows past the last one (VARLEN).
DEVICE int by_length(const Arguments& a, int place) {
    constexpr int MINE = MOST_ORDERED / 32, BITS = 5;
    const int count = a.batch - VARLEN, own = thread_index() % 32;
    if (count < 2 || count > MOST_ORDERED || place >= count) return place;
    int length[MINE], longest = 1;
    UNROLL for (int m = 0; m < MINE; m++) {
        const int n = 32 * m + own;
        length[m] = n < count ? extent_at(a, n).end : -1;
        longest = larger(longest, length[m]);
    }
    UNROLL for (int lanes = 16; lanes; lanes /= 2) longest = larger(longest, shuffle_xor(longest, lanes));
    const int shift = larger(highest(longest) + 1 - BITS, 0);
    const auto each = [&](auto use) {
        UNROLL for (int m = 0; m < MINE; m++)
            if (32 * m < count) use(m, length[m] >> shift);
    };
    int those = 0, longer = 0;  // the highest bits of the one at `place`, and how many have higher ones
    UNROLL for (int bit = 1 << BITS - 1; bit; bit /= 2) {
        int there = 0;
        each([&](int, int bits) { there += ones(lanes_where(bits >= those + bit)); });
        if (there > place)
            those += bit;
        else
            longer = there;
    }
    int before = place - longer, found = 0;  // of those alike
    each([&](int m, int bits) {
        const u32 alike = lanes_where(bits == those);
        const bool it = bits == those && ones(alike & (1u << own) - 1) == before;
        const u32 where = lanes_where(it);
        if (where) found = 32 * m + highest(where);
        before -= ones(alike);
    });
    return found;
}
