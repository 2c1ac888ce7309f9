// The warps of a block that share tiles of keys are a team. Many rows make one of all warps, which have rows of their
// own; few rows make one of each warp, which all have the same rows and take tiles of keys in turns.
#pragma once
#include "numbers.cuh"

constexpr int TEAM = WARPS / TEAMS;  // warps
static_assert(TEAMS == 1 || TEAM == 1, "a team is a block or a warp, as barriers are");

DEVICE int team() { return TEAMS == 1 ? 0 : thread_index() / 32; }
// Which of THREADS, a team's or the block's, this one is.
template <int THREADS> DEVICE int thread_of() {
    return THREADS == 32 * WARPS ? thread_index() : thread_index() % THREADS;
}
DEVICE void team_barrier() {
    if constexpr (TEAMS == 1)
        barrier();
    else
        warp_barrier();
}
