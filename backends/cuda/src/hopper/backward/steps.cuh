// Which keys a block of the backward has, and the steps that it takes: tiles of queries, head after head, but for those
// that a mask hides the keys from.
//
// ORDERED: blocks add to a tile of dQ in the order of their keys, which is that of the grid. All begin with the last
// tile that sees their keys, and go back, each a step or so behind the one before it; under a causal mask the next keys
// have the fewer tiles, so that those behind end first. The heads of a tile come one after another, so that the blocks
// are one behind another in all of them, and splits take turns.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/mask.cuh"
#include "positions.cuh"
#include "schedule.cuh"

// The keys of a block, and the queries that see any of them.
struct Keys {
    int batch, head_kv, first, split;
    Extent extent;
    Reach reach;  // of queries
    int tiles;    // of one head's queries
    int from, to; // steps, of all heads that share the keys

    DEVICE Keys(const Arguments& a) {
        const int heads = a.heads / a.group;
        const Place at = place(a, heads, ceil_div(a.keys, BLOCK_M), false);  // most queries see the first keys
        batch = at.batch, head_kv = at.head, first = at.tile * BLOCK_M, split = at.split;
        extent = ::extent(a, batch);
        const int end = smaller(first + BLOCK_M, a.keys), last = smaller(end, extent.end) - 1;
        reach = Reach{{0, 0}, {0, 0}};
        if (first <= last) reach = ::reach(queries_of(a, extent, first), queries_of(a, extent, last));
        if (last < first + BLOCK_M - 1) reach.every = Span{0, 0};  // some keys are not there
        tiles = reach.tiles();
        const int each = ceil_div(tiles * a.group, a.splits);
        from = smaller(each * split, tiles * a.group), to = smaller(from + each, tiles * a.group);
    }
    // ORDERED: how many blocks add to the tile of queries at `start` before this one does. By position, tiles see
    // intervals of keys: so those are all blocks from the first key on that it sees.
    DEVICE int turn(const Arguments& a, int start) const {
        return first / BLOCK_M - keys_of(a, extent, start).from / BLOCK_M;
    }
};

// One step: a head and where its tile of queries begins. The first of a head's tiles is the one beside the block's keys,
// or the nearest: so that blocks side by side add to different queries at a time.
struct Step {
    const Arguments& a;
    const Keys& keys;
    const bool all;  // also what the mask hides
    int number;  // not ORDERED: of the step
    int head, start;
    u32 mixed;  // MASKED: whether the mask hides some of the keys from some of the queries
    u32 seen;   // MASKED: whether it leaves any; else all are

    DEVICE Step(const Arguments& a, const Keys& keys, bool all = false)
        : a(a), keys(keys), all(all), number(keys.from), mixed(0), seen(1) {
        if (ORDERED) {
            head = keys.head_kv * a.group + keys.split % a.group;
            start = end() - (1 + keys.split / a.group) * BLOCK_N;
            find();
            return;
        }
        const int turns = keys.tiles ? number / keys.tiles : 0;
        head = keys.head_kv * a.group + turns;
        start = first() + (number - turns * keys.tiles) * BLOCK_N;
        if (start >= end()) start -= keys.tiles * BLOCK_N;
        find();
    }
    DEVICE bool more() const { return ORDERED ? start >= keys.reach.first_tile() * BLOCK_N : number < keys.to; }
    DEVICE void next() { go_on(), find(); }

private:
    DEVICE int end() const { return (keys.reach.first_tile() + keys.tiles) * BLOCK_N; }
    DEVICE int first() const {
        const int from = keys.reach.first_tile() * BLOCK_N;
        const int beside = (keys.first - keys.extent.offset) / BLOCK_N * BLOCK_N;
        return beside < from || beside >= end() ? from : beside;
    }
    DEVICE void go_on() {
        if (ORDERED) {
            head += a.splits;
            for (; head >= (keys.head_kv + 1) * a.group; head -= a.group) start -= BLOCK_N;
            return;
        }
        number++, start += BLOCK_N;
        if (start == end()) start -= keys.tiles * BLOCK_N;
        if (start == first()) head++;
    }
    // The next step from here on that the mask leaves.
    DEVICE void find() {
        if (!MASKED) return;
        for (; more(); go_on()) {
            const int plane = mask_plane(a, keys.batch, head), group = smaller(start / GROUP, mask_groups(a) - 1);
            const int tile = keys.first / BLOCK_M;
            const auto bit = [&](int kind) { return mask_set<BLOCK_M>(a, plane, group, kind)[tile / 32] >> tile % 32 & 1; };
            mixed = bit(HIDDEN), seen = bit(SEEN);
            if (seen || all) return;
        }
    }
};
