// One look at a bool mask before the forward: which tiles of keys it hides, and the mask in bits (mask.cuh).
//
// A block takes a group of rows and eight tiles of keys, a byte of the sets. Its threads lie side by side, 16 columns
// each, and go down the rows together, with all of a thread's loads on their way at once. Rows past the last see
// everything, as where there is no mask.
//
// It also makes `counter` blank, from which the blocks of the forward take their tiles of rows. They are launched
// beside it, and wait for its end.
#include "hopper/mask.cuh"

constexpr int EACH = 16, TILES = 8;                                         // columns of a thread, tiles of a block
constexpr int ACROSS = TILES * BLOCK_N / EACH, DOWN = 32 * WARPS / ACROSS;  // threads
constexpr int ROWS = (GROUP + DOWN - 1) / DOWN;                             // of a thread
static_assert(BLOCK_N % EACH == 0 && BLOCK_N <= EACH * CHUNKS, "whole chunks");
static_assert(WARPS * sizeof(u32) == SHARED_BYTES, "hopper.py counts the same shared memory");

// The highest bit of each byte that is not 0.
DEVICE u32 bytes_set(u32 word) { return ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080; }

// What a row sees of the 16 columns of a thread: four bits for each quarter, of columns 8 c + 2 q + e at 4 q + 2 c + e.
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

DEVICE u32 any_of_warp(u32 bits) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) bits |= shuffle_xor(bits, lanes);
    return bits;
}

KERNEL survey(const Arguments a) {
    let_next_begin();
    u32* const found = reinterpret_cast<u32*>(shared_memory());
    if (block_index() == 0 && thread_index() == 0) *a.counter = BLANK;

    const int bytes = 4 * mask_words<BLOCK_N>(a), groups = mask_groups(a);
    const int byte = block_index() % bytes, group = block_index() / bytes % groups;
    const int plane = block_index() / bytes / groups;
    const auto set = [&](int kind, u32 tiles) {
        reinterpret_cast<u8*>(mask_set<BLOCK_N>(a, plane, group, kind))[byte] = tiles;
    };
    const int there = smaller(TILES, mask_tiles<BLOCK_N>(a) - TILES * byte);
    if (there <= 0) {  // it fills up a word
        if (thread_index() <= HIDDEN) set(thread_index(), 0);
        return;
    }
    const u8* const mask = a.mask.at + plane / a.mask_heads * a.mask.batch + plane % a.mask_heads * a.mask.head;
    const bool aligned = a.mask.column == 1 && (reinterpret_cast<u64>(mask) | u64(a.mask.row)) % EACH == 0;

    const int chunk = thread_index() % ACROSS, down = thread_index() / ACROSS;
    const int place = chunk * EACH / BLOCK_N, tile = TILES * byte + place;
    const int first = TILES * byte * BLOCK_N + chunk * EACH;
    const int ends = a.mask_rows - group * GROUP;
    const int rows = place >= there || down >= DOWN ? 0 : a.mask_rows == 1 ? 1 : GROUP;
    const u8* const line = mask + group * GROUP * a.mask.row + first * a.mask.column;
    u16* const out = mask_row<BLOCK_N>(a, plane, tile, group * GROUP) + chunk % (BLOCK_N / EACH);
    bool seen = false, hidden = false;
    const auto put = [&](int r, const Look& look) {
        if (r < ends) seen |= look.quarters != 0, hidden |= look.hidden;
        out[CHUNKS * r] = r < ends ? look.quarters : 0xffff;
    };
    if (aligned && first + EACH <= a.keys) {
        Chunk<u32> all[ROWS];
        UNROLL for (int n = 0; n < ROWS; n++)
            if (down + n * DOWN < smaller(rows, ends))
                all[n] = *reinterpret_cast<const Chunk<u32>*>(line + (down + n * DOWN) * a.mask.row);
        UNROLL for (int n = 0; n < ROWS; n++)
            if (down + n * DOWN < rows) {
                Look look;
                look.wide(all[n]);
                put(down + n * DOWN, look);
            }
    } else {
        const int count = larger(smaller(EACH, a.keys - first), 0);
        for (int r = down; r < rows; r += DOWN) {
            Look look;
            if (r < ends) look.narrow(line + r * a.mask.row, a.mask.column, count);
            put(r, look);
        }
    }

    const u32 tiles = any_of_warp(u32(seen) << place | u32(hidden) << (TILES + place));
    if (thread_index() % 32 == 0) store_shared(found + thread_index() / 32, tiles);
    barrier();
    if (thread_index() > HIDDEN) return;
    u32 all = 0;
    for (int n = 0; n < WARPS; n++) all |= load_shared(found + n);
    set(thread_index(), all >> TILES * thread_index());
}
