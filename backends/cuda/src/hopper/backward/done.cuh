// How a block tells finish.cu that it is done.
#pragma once
#include "hopper/backward/steps.cuh"
#include "hopper/backward/sums.cuh"

// Where warps meet, all but that which loads. Those that compute tell, and go on: dQ has all that they add, and the parts
// of dK and dV are stored, where there are any.
constexpr int DONE = 15;
DEVICE void tell_done() { arrive_at(DONE, 32 * (WARPS - 1)); }
// The others wait for them, and a thread counts the block.
DEVICE void count_done(const Arguments& a) {
    warp_barrier();
    await_launch_before();  // which has made all numbers 0, those too that nobody adds to
    meet_at(DONE, 32 * (WARPS - 1));
    const Place at = place_of_keys(a);
    if (thread_index() == 32) count_block(done_of(a, i64(at.batch) * (a.heads / a.group) + at.head));
}
