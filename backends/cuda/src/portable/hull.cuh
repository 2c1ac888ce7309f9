// Padding by a mask: the keys that a mask of one row leaves, so that what lies before and after is never loaded.
#pragma once
#include "portable/mask.cuh"

// The shortest interval that holds all keys of `keys` that the mask does not hide, where it has one row for all queries
// (and `heads` heads); `keys` where it has not. Threads come together; `scratch` is shared memory for 2 WARPS integers,
// free again afterwards.
DEVICE Span hull(const Arguments& a, int b, int head, int heads, Span keys, int* scratch) {
    if (MASK_KIND == NO_MASK || a.mask.row != 0 || (heads > 1 && a.mask.head != 0) || keys.to <= keys.from) return keys;
    const i64 line = b * a.mask.batch + head * a.mask.head;
    Span found = {keys.to, keys.from};
    for (int j = keys.from + thread_index(); j < keys.to; j += 32 * WARPS) {
        if (bias_at(a, line + j * a.mask.column) != -INFINITE) found = {smaller(found.from, j), j + 1};
    }
    UNROLL for (int lanes = 16; lanes; lanes /= 2)
        found = {smaller(found.from, shuffle_xor(found.from, lanes)), larger(found.to, shuffle_xor(found.to, lanes))};
    const int warp = thread_index() / 32;
    if (lane() == 0) store_shared(scratch + 2 * warp, found.from), store_shared(scratch + 2 * warp + 1, found.to);
    barrier();
    UNROLL for (int n = 0; n < WARPS; n++)
        found = {smaller(found.from, load_shared(scratch + 2 * n)), larger(found.to, load_shared(scratch + 2 * n + 1))};
    barrier();
    return found;
}
