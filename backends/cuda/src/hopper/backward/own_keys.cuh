// What a warpgroup of most backwards has from beginning to end: dK and dV of 64 keys of its own.
#pragma once
#include "hopper/backward/worker.cuh"

// `Consumer`, which is one of these, visits the steps.
template <class Shared, class Step, class Consumer> struct OwnKeys : Worker<Shared> {
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    DEVICE OwnKeys(Shared& shared, const Arguments& a, int index) : Worker<Shared>(shared, a, index) {}

    DEVICE void run() {
        const Keys block(this->a);
        Step step(this->a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) static_cast<Consumer*>(this)->visit(block, step);
        if (this->a.splits == 1) tell_done();
        store_gradient(this->a, block, block.first + 64 * this->index, key_sums, OF_KEY);
        store_gradient(this->a, block, block.first + 64 * this->index, value_sums, OF_VALUE);
        if (this->a.splits > 1) tell_done();
    }
};
