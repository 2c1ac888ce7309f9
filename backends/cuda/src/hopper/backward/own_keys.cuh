// What a warpgroup of most backwards has from beginning to end: dK and dV of 64 keys of its own.
#pragma once
#include "hopper/backward/worker.cuh"

// `Consumer`, which is one of these, visits the steps.
template <class Shared, class Step, class Consumer> struct OwnKeys : Worker<Shared> {
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    DEVICE OwnKeys(Shared& shared, const Arguments& a, int index) : Worker<Shared>(shared, a, index) {}

    DEVICE void run() {
        for_own_tiles(this->a, this->keys_at, [&](u32 number) { work_on(Keys(this->a, number)); });
    }
    DEVICE void work_on(const Keys& block) {
        Step step(this->a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) static_cast<Consumer*>(this)->visit(block, step);
        else if (CONTINUED) this->await_keys();
        if (CONTINUED) this->release_together(this->shared.keys_free[this->keys_at.stage]);
        if (this->a.splits == 1) tell_done(this->keys_at.stage);
        store_gradient(this->a, block, block.first + 64 * this->index, key_sums, OF_KEY);
        store_gradient(this->a, block, block.first + 64 * this->index, value_sums, OF_VALUE);
        if (this->a.splits > 1) tell_done(this->keys_at.stage);
    }
};
