// The order of sequences of unlike lengths, where rows are few: the longest first, since what begins last is to end soon.
#pragma once
#include "extents.cuh"

constexpr int MOST_ORDERED = 256, SHORT = 512;

// The length of sequence n, to 32 bits. Any number does, as long as all blocks read the same one. No branch depends on
// what type lengths have, so that those of several sequences are on their way together.
DEVICE int length_of(const Arguments& a, int n) {
    if (VARLEN && !PAGED) {
        const u32* const offsets = reinterpret_cast<const u32*>(a.key_offsets);
        const int words = a.key_offset_bytes / 4;
        return int(offsets[(n + 1) * words] - offsets[n * words]);
    }
    return *reinterpret_cast<const int*>(a.lengths + n * a.length_stride);
}
DEVICE bool have_words(const Arguments& a) { return (VARLEN && !PAGED) || a.length_bytes >= 4 || a.length_bytes <= -4; }

// Which sequence comes at `place`, by a whole warp: by the five highest bits of the longest length, and sequences alike
// in those as they are. So do all come if there are more than MOST_ORDERED, if none is longer than SHORT, and if lengths
// are of 8 or 16 bits; and the rows past the last one (VARLEN).
DEVICE int by_length(const Arguments& a, int place) {
    constexpr int MINE = MOST_ORDERED / 32, BITS = 5;
    const int count = a.batch - VARLEN, own = thread_index() % 32;
    if (count < 2 || count > MOST_ORDERED || place >= count || !have_words(a)) return place;
    int length[MINE], longest = 0;
    UNROLL for (int m = 0; m < MINE; m++) length[m] = 32 * m + own < count ? length_of(a, 32 * m + own) : 0;
    UNROLL for (int m = 0; m < MINE; m++) {
        length[m] = 32 * m + own < count ? larger(smaller(length[m], a.keys), 0) : -1;
        longest = larger(longest, length[m]);
    }
    longest = largest_of_warp(longest);
    if (longest <= SHORT) return place;
    const int shift = highest(longest) + 1 - BITS;
    const auto each = [&](auto use) {
        UNROLL for (int m = 0; m < MINE; m++) {
            if (32 * m >= count) break;
            use(m, length[m] >> shift);
        }
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
