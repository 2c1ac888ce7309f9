// How a block tells finish.cu that a tile of keys is done.
#pragma once
#include "hopper/backward/own_tiles.cuh"
#include "hopper/backward/sums.cuh"

// Where warps meet, all but that which loads. Those that compute tell, and go on: dQ has all that they add, and the parts
// of dK and dV are stored, where there are any.
//
// There is a barrier for each stage of keys: those that compute may be a tile ahead of who counts, and `keys_free`, for
// which who counts arrives as well, keeps them from being two.
constexpr int DONE = 15;
DEVICE void tell_done(int stage) { arrive_at(DONE - stage, 32 * (WARPS - 1)); }
// The others wait for them, and a thread counts each tile of keys.
template <class Shared> DEVICE void count_done(const Arguments& a, Shared& shared) {
    warp_barrier();
    await_launch_before();  // which has made all numbers 0, those too that nobody adds to
    Position<KEY_STAGES> at;
    for_own_tiles(a, at, [&](u32 number) {
        if (CONTINUED) warp_barrier();  // a lane of the first may have come from counting
        meet_at(DONE - at.stage, 32 * (WARPS - 1));
        if (thread_index() == 32) {
            const Place of = place_of_keys(a, number);
            count_block(done_of(a, i64(of.batch) * (a.heads / a.group) + of.head));
            if (CONTINUED) shared.keys_free[at.stage].arrive();
        }
    });
}
