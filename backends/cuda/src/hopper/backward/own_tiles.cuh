// Which tiles of keys a block of the backward works on: one, or, CONTINUED, one after another.
//
// Then there are as many blocks as SMs, and the keys of a tile come while the gradients of the one before are computed and
// stored. Tiles are dealt out beforehand, as a block would wait for a count in global memory. Where that is slower, by what
// choice.py reckons, there is a block for each.
#pragma once
#include "hopper/backward/steps.cuh"

#ifndef CONTINUED
#define CONTINUED 0
#endif
constexpr int KEY_STAGES = CONTINUED ? 2 : 1;

// Calls `with` with the number of each; its keys come to the stage `at`.
template <class With> DEVICE void for_own_tiles(const Arguments& a, Position<KEY_STAGES>& at, With with) {
    if (!CONTINUED) return with(block_index());
    ROLLED for (u32 number = block_index(); number < u32(a.key_tiles); number += blocks(), at.next()) with(number);
}
