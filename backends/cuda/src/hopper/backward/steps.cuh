// Which keys a block of the backward has, and the steps that it takes: tiles of queries, head after head, but for those
// that a mask hides the keys from.
#pragma once
#include "hopper/barriers.cuh"
#include "hopper/mask.cuh"
#include "hopper/extent.cuh"
#include "schedule.cuh"

// Which keys a tile has; most queries see the first ones. With VARLEN tiles are numbered as in sequences.cuh.
DEVICE Place place_of_keys(const Arguments& a, u32 number) {
    const int heads = a.heads / a.group;
    if (VARLEN) return place(a, number, heads, heads, int(a.key_rows / BLOCK_M) + a.batch, false);
    return place(a, number, u32(a.batch) * heads, heads, ceil_div(a.keys, BLOCK_M), false);
}

// A tile of keys, and the queries that see any of them.
struct Keys {
    int batch, head_kv, first, split;
    Extent extent;
    Reach reach;  // of queries
    int tiles;    // of one head's queries
    int from, to; // steps, of all heads that share the keys
    int before;   // VARLEN: tiles of 64 queries that are kept before its own, of a head

    DEVICE Keys(const Arguments& a, u32 tile_number) {
        const Place at = place_of_keys(a, tile_number);
        batch = at.batch, head_kv = at.head, first = at.tile * BLOCK_M, split = at.split;
        if (VARLEN) batch = sequence_of_keys<BLOCK_M>(a, at.tile);
        extent = extent_in(a, batch);
        if (VARLEN) {
            first -= int(first_tile_of<BLOCK_M>(batch, first_key(extent))) * BLOCK_M;
            before = int(first_tile_of<SAVED>(batch, first_query(extent))) * (SAVED / 64);
        }
        const int end = VARLEN ? first + BLOCK_M : smaller(first + BLOCK_M, a.keys), last = smaller(end, extent.end) - 1;
        reach = Reach{{0, 0}, {0, 0}};
        if (first <= last) reach = ::reach(queries_of(a, extent, first), queries_of(a, extent, last));
        if (last < first + BLOCK_M - 1) reach.every = Span{0, 0};  // some keys are not there
        tiles = reach.tiles();
        const int each = ceil_div(tiles * a.group, a.splits);
        from = smaller(each * split, tiles * a.group), to = smaller(from + each, tiles * a.group);
    }
    // Rows before it, looked up again, since there are no registers to keep them; and how many it has, of which gradients
    // are stored.
    DEVICE i64 rows_before(const Arguments& a) const { return VARLEN ? key_offset(a, batch) : 0; }
    DEVICE int rows(const Arguments& a, i64 before) const {
        if (!VARLEN) return a.keys;
        return is_past(a, batch) ? int(a.key_rows - before) : extent.end;
    }
    // Where they are in the operands.
    DEVICE int plane() const { return VARLEN ? 0 : batch; }
    DEVICE int key_row() const { return int(first_key(extent)) + first; }
    // Where the tiles of queries begin that see any of them, and where they end.
    DEVICE int queries_from() const { return reach.first_tile() * BLOCK_N; }
    DEVICE int queries_to() const { return (reach.first_tile() + tiles) * BLOCK_N; }
};

// A tile of one head's queries, and what the mask has there.
struct Queries {
    int head, start;
    u32 mixed = 0;  // MASKED: whether it hides some of the keys from some of the queries
    u32 seen = 1;   // MASKED: whether it leaves any; else all are

    DEVICE void look(const Arguments& a, const Keys& keys) {
        const int plane = mask_plane(a, keys.batch, head), tile = keys.first / BLOCK_M;
        const auto any = [&](int kind) {
            u32 bits = 0;
            UNROLL for (int n = 0; n < BLOCK_N / GROUP; n++) {
                const int group = smaller(start / GROUP + n, mask_groups(a) - 1);
                bits |= mask_set<BLOCK_M>(a, plane, group, kind)[tile / 32] >> tile % 32;
            }
            return bits & 1;
        };
        mixed = any(HIDDEN), seen = any(SEEN);
    }
    // The number of its first 64 among all of dQ.
    DEVICE int tile(const Arguments& a, const Keys& keys) const {
        if (VARLEN) return head * int(a.saved_rows / 64) + keys.before + start / 64;
        return (keys.batch * a.heads + head) * (a.padded / 64) + start / 64;
    }
    // How many are left of the batch entry's.
    DEVICE int left(const Arguments& a, const Keys& keys) const { return queries_in(a, keys.extent) - start; }
};

// One step. The first of a head's tiles is the one beside the block's keys, or the nearest: so that blocks side by side
// add to different queries at a time.
struct Step : Queries {
    const Arguments& a;
    const Keys& keys;
    int number;

    DEVICE Step(const Arguments& a, const Keys& keys) : a(a), keys(keys), number(keys.from) {
        const int turns = keys.tiles ? number / keys.tiles : 0;
        head = keys.head_kv * a.group + turns;
        start = first() + (number - turns * keys.tiles) * BLOCK_N;
        if (start >= keys.queries_to()) start -= keys.tiles * BLOCK_N;
        find();
    }
    DEVICE bool more() const { return number < keys.to; }
    DEVICE void next() { go_on(), find(); }

private:
    DEVICE int first() const {
        const int beside = (keys.first - keys.extent.offset) / BLOCK_N * BLOCK_N;
        return beside < keys.queries_from() || beside >= keys.queries_to() ? keys.queries_from() : beside;
    }
    DEVICE void go_on() {
        number++, start += BLOCK_N;
        if (start == keys.queries_to()) start -= keys.tiles * BLOCK_N;
        if (start == first()) head++;
    }
    // The next step from here on that the mask leaves.
    DEVICE void find() {
        if (!MASKED) return;
        for (; more(); go_on()) {
            look(a, keys);
            if (seen) return;
        }
    }
};
