// The steps of blocks that add to dQ in turn.
//
// They add to a tile in the order of their keys, which is that of the grid. All begin with the last tile that sees their
// keys, and go back, each a step or so behind the one before it; under a causal mask the next keys have the fewer tiles,
// so that those behind end first. The heads of a tile come one after another, so that the blocks are one behind another
// in all of them, and splits take turns.
#pragma once
#include "hopper/backward/steps.cuh"

struct OrderedStep : Queries {
    const Arguments& a;
    const Keys& keys;
    const bool all;  // also what the mask hides

    DEVICE OrderedStep(const Arguments& a, const Keys& keys, bool all = false) : a(a), keys(keys), all(all) {
        head = keys.head_kv * a.group + keys.split % a.group;
        start = keys.queries_to() - (1 + keys.split / a.group) * BLOCK_N;
        find();
    }
    DEVICE bool more() const { return start >= keys.queries_from(); }
    DEVICE void next() { go_on(), find(); }
    // How many blocks add to its tile before this one does. By position, tiles see intervals of keys: so those are all
    // blocks from the first key on that it sees.
    DEVICE int turn() const { return keys.first / BLOCK_M - keys_of(a, keys.extent, start).from / BLOCK_M; }

private:
    DEVICE void go_on() {
        head += a.splits;
        for (; head >= (keys.head_kv + 1) * a.group; head -= a.group) start -= BLOCK_N;
    }
    DEVICE void find() {
        if (!MASKED) return;
        for (; more(); go_on()) {
            look(a, keys);
            if (seen || all) return;
        }
    }
};
