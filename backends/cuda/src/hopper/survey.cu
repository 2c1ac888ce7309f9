// One look at a bool mask before the forward: which tiles of keys it hides, and the mask in bits (mask.cuh).
//
// A block takes a group of rows and 32 tiles of keys, a word of the sets. Eight lanes share a row of a tile, 16 columns
// each; a warp takes four tiles and goes down the rows, which it shares with others. Rows past the last see everything,
// as where there is no mask.
//
// It also clears `counter`, from which the blocks of the forward take their tiles of rows.
#include "hopper/mask.cuh"

constexpr int EACH = 16, SHARING = 8, SIDE = 32 / SHARING;  // columns of a lane, lanes of a tile, tiles of a warp
constexpr int TILES = 32, AT_ONCE = 4;                      // of a block; rows that a warp waits for together
static_assert(BLOCK_N % EACH == 0 && BLOCK_N <= EACH * SHARING, "the lanes of a tile hold all of it");
static_assert(WARPS >= TILES / SIDE, "a block holds all of its tiles");
static_assert(2 * WARPS * sizeof(u32) == SHARED_BYTES, "hopper.py counts the same shared memory");

// The highest bit of each byte that is not 0.
DEVICE u32 bytes_set(u32 word) { return ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080; }

// What a row sees of the 16 columns of a lane: four bits for each quarter, of columns 8 c + 2 q + e at 4 q + 2 c + e.
struct Look {
    u32 quarters = 0;
    bool hidden = false;  // of those that are there

    // All 16, side by side.
    DEVICE void wide(const Chunk<u32>& all) {
        // Of the same half of both groups of 8 columns, bits 0 and 2 of four bytes; the product has all eight on top.
        u32 half[2];
        UNROLL for (int n = 0; n < 2; n++)
            half[n] = (bytes_set(all.at[n]) >> 7 | bytes_set(all.at[n + 2]) >> 5) * 0x01021020;
        quarters = half[0] >> 24 | half[1] >> 24 << 8;
        hidden = quarters != 0xffff;
    }
    // The first `count`, `step` apart.
    DEVICE void narrow(const u8* at, i64 step, int count) {
        for (int n = 0; n < count; n++) {
            const u32 sees = at[n * step] != 0;
            quarters |= sees << (n % 8 / 2 * 4 + n / 8 * 2 + n % 2);
            hidden |= !sees;
        }
    }
};

// Of the quarters of eight lanes, one put together: 2 (lane % 2) + lane / 2 % 2.
DEVICE u32 joined(u32 quarters, int lane) {
    const u32 pair = quarters >> 8 * (lane & 1) & 0xff, others = shuffle_xor(quarters >> 8 * (~lane & 1) & 0xff, 1);
    const u32 even = lane & 1 ? others : pair, odd = lane & 1 ? pair : others;  // of two lanes, two quarters each
    const u32 first = even & 15 | (odd & 15) << 4, second = even >> 4 | odd >> 4 << 4;
    const u32 byte = shuffle_xor(lane & 2 ? first : second, 2);
    const u32 half = lane & 2 ? byte | second << 8 : first | byte << 8;
    const u32 other = shuffle_xor(half, 4);
    return lane & 4 ? other | half << 16 : half | other << 16;
}

DEVICE u32 any_of_warp(u32 bits) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) bits |= shuffle_xor(bits, lanes);
    return bits;
}

KERNEL survey(const Arguments a) {
    u32* const found = reinterpret_cast<u32*>(shared_memory());
    if (block_index() == 0 && thread_index() == 0) *a.counter = 0;

    const int words = mask_words(a), groups = mask_groups(a);
    const int word = block_index() % words, group = block_index() / words % groups;
    const int plane = block_index() / words / groups;
    const u8* const mask = a.mask.at + plane / a.mask_heads * a.mask.batch + plane % a.mask_heads * a.mask.head;
    const bool aligned = a.mask.column == 1 && (reinterpret_cast<u64>(mask) | u64(a.mask.row)) % EACH == 0;

    const int warp = thread_index() / 32, lane = thread_index() % SHARING;
    const int there = smaller(TILES, mask_tiles(a) - TILES * word);
    const int across = ceil_div(there, SIDE), down = WARPS / across;
    const int place = warp % across * SIDE + thread_index() % 32 / SHARING, tile = TILES * word + place;
    const int first = tile * BLOCK_N + lane * EACH;
    const int count = lane * EACH < BLOCK_N ? smaller(EACH, a.keys - first) : 0;  // none past the last tile
    const int rows = warp / across >= down ? 0 : a.mask_rows == 1 ? 1 : GROUP, ends = a.mask_rows - group * GROUP;
    const u8* const line = mask + group * GROUP * a.mask.row + first * a.mask.column;
    u32* const out = mask_row(a, plane, tile, group * GROUP) + 2 * (lane & 1) + lane / 2;
    bool seen = false, hidden = false;
    const auto put = [&](int r, const Look& look) {
        if (r < ends) seen |= look.quarters != 0, hidden |= look.hidden;
        const u32 bits = joined(r < ends ? look.quarters : 0xffff, lane);
        if (lane < 4 && place < there) out[4 * r] = bits;
    };
    // A warp goes down the rows, AT_ONCE together where its lanes have all of their columns, or none.
    const bool odd = any_of_warp(count > 0 && !(aligned && count == EACH));
    const int step = odd ? 1 : AT_ONCE;
    for (int begin = warp / across * step; begin < rows; begin += down * step) {
        if (odd) {
            Look look;
            if (begin < ends) look.narrow(line + begin * a.mask.row, a.mask.column, count);
            put(begin, look);
            continue;
        }
        Chunk<u32> all[AT_ONCE];
        UNROLL for (int n = 0; n < AT_ONCE; n++)
            if (count > 0 && begin + n < ends)
                all[n] = *reinterpret_cast<const Chunk<u32>*>(line + (begin + n) * a.mask.row);
        UNROLL for (int n = 0; n < AT_ONCE; n++)
            if (begin + n < rows) {
                Look look;
                if (count > 0) look.wide(all[n]);
                put(begin + n, look);
            }
    }

    const u32 bit = place < there ? 1u << place : 0;
    const u32 seen_tiles = any_of_warp(seen ? bit : 0), hidden_tiles = any_of_warp(hidden ? bit : 0);
    if (thread_index() % 32 == 0) store_shared(found + SEEN * WARPS + warp, seen_tiles);
    if (thread_index() % 32 == 0) store_shared(found + HIDDEN * WARPS + warp, hidden_tiles);
    barrier();
    if (thread_index() > HIDDEN) return;
    u32 all = 0;
    for (int n = 0; n < WARPS; n++) all |= load_shared(found + thread_index() * WARPS + n);
    mask_set(a, plane, group, thread_index())[word] = all;
}
