// The order of a few sequences in pages: the longest first, since what begins last is to end soon.
#pragma once
#include "extents.cuh"

constexpr int MOST_ORDERED = 32;

// Which sequence comes at `place`, by a whole warp. More than MOST_ORDERED come as they are; so do the rows past the last
// one (VARLEN).
DEVICE int by_length(const Arguments& a, int place) {
    const int count = a.batch - VARLEN, own = thread_index() % 32;
    if (count < 2 || count > MOST_ORDERED || place >= count) return place;
    const int length = own < count ? extent(a, own).end : -1;
    int before = 0;
    UNROLL for (int n = 1; n < 32; n++) {
        const int other = shuffle_xor(length, n);
        before += other > length || (other == length && (own ^ n) < own);
    }
    int found = before == place ? own : 0;
    UNROLL for (int n = 16; n; n /= 2) found = larger(found, shuffle_xor(found, n));
    return found;
}
