// One look at a bool mask before the forward or the backward: which tiles of keys it hides, and the mask in bits (mask.cuh).
//
// A block takes a group of rows and eight tiles of keys, a byte of the sets. Its threads lie side by side, ACROSS of
// them with a chunk of EACH columns each, and go down the rows together, DOWN at a time, with all of a thread's loads
// on their way at once. Where there are four tiles or fewer, and blocks enough, it takes 2, 4 or 8 groups: a team of
// its threads each, with so many times fewer side by side. Of eight tiles of 128 keys:
//
//             tile 8 byte     tile 8 byte + 1       tile 8 byte + 7
//   row 0     | 0  1 ...  7 | 8  9 ...  15 |  ...  | ... ACROSS - 1 |    threads; a chunk of `mask_bits` of each
//   row 1     | ACROSS ...                                          |
//
//   bit of `mask_sets`  0             1                     7            of the byte of SEEN, and of that of HIDDEN
//
// Rows past the last see everything, as where there is no mask. The block of the last tiles fills up its word with 0.
//
// It also makes `counter` blank, from which the blocks of the forward take their tiles of rows. They are launched
// beside it, and wait for its end.
#include "hopper/mask.cuh"

constexpr int EACH = 16, TILES = 8;                                         // columns of a thread, tiles of a block
constexpr int ACROSS = TILES * BLOCK_N / EACH, DOWN = 32 * WARPS / ACROSS;  // threads
constexpr int ROWS = (GROUP + DOWN - 1) / DOWN;                             // of a thread
static_assert(BLOCK_N % EACH == 0 && BLOCK_N <= EACH * CHUNKS, "whole chunks");
static_assert(TILES == 8 && ACROSS % TILES == 0 && (WARPS & WARPS - 1) == 0, "teams of 2, 4 or 8, and whole warps");
static_assert(WARPS * sizeof(u32) == SHARED_BYTES, "survey.py counts the same shared memory");

// The highest bit of each byte that is not 0.
DEVICE u32 bytes_set(u32 word) { return ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080; }

// Byte n of a chunk: `left` has columns 4 n to 4 n + 3 of the 16, a byte each, and `right` those 8 further on. Column
// 8 c + 2 q + e is bit 4 q + 2 c + e of a chunk; here c is 0 in `left` and 1 in `right`. What is set moves from the
// lowest bits of its byte to the highest byte, all at once by a product, whose other terms lie in bits of their own
// below or beyond the word:
//
//   byte                   3       2       1       0
//   set, left, c = 0      24      16       8       0
//        right, c = 1     26      18      10       2
//   moved up by            5      12      17      24
//   of the product     29 31   28 30   25 27   24 26
DEVICE u32 half_chunk(u32 left, u32 right) {
    constexpr u32 UP = 1u << 5 | 1u << 12 | 1u << 17 | 1u << 24;
    return (bytes_set(left) >> 7 | bytes_set(right) >> 5) * UP >> 24;
}

// As mask.cuh lays them out, 16 columns side by side: a byte each, four to a word.
DEVICE u32 chunk_of(const Chunk<u32>& bytes) {
    return half_chunk(bytes.at[0], bytes.at[2]) | half_chunk(bytes.at[1], bytes.at[3]) << 8;
}

// The 16 bytes, or 32, from a multiple of 16 on that have `count` bytes at `at`: they begin in the mask's memory, and
// are not to be read where they end beyond it.
struct Around {
    Chunk<u32> low, high;

    DEVICE static const u8* end(const u8* at, int count) {
        const int past = reinterpret_cast<u64>(at) % EACH;
        return at - past + (count <= 0 ? 0 : past + count > EACH ? 2 * EACH : EACH);
    }
    DEVICE void load(const u8* at, int count) {
        const int past = reinterpret_cast<u64>(at) % EACH;
        if (count > 0) low = *reinterpret_cast<const Chunk<u32>*>(at - past);
        if (past + count > EACH) high = *reinterpret_cast<const Chunk<u32>*>(at - past + EACH);
    }
    // Those at `at`, and zeros past `count` of them.
    DEVICE Chunk<u32> from(const u8* at, int count) const {
        const int past = reinterpret_cast<u64>(at) % EACH;
        u32 words[8] = {low.at[0],  low.at[1],  low.at[2],  low.at[3],
                        high.at[0], high.at[1], high.at[2], high.at[3]};
        if (past & 8) UNROLL for (int n = 0; n < 6; n++) words[n] = words[n + 2];
        if (past & 4) UNROLL for (int n = 0; n < 5; n++) words[n] = words[n + 1];
        Chunk<u32> bytes;
        UNROLL for (int n = 0; n < 4; n++) {
            const u32 word = u32((u64(words[n + 1]) << 32 | words[n]) >> 8 * (past & 3));
            const int there = count - 4 * n;
            bytes.at[n] = there >= 4 ? word : there <= 0 ? 0 : word & (1u << 8 * there) - 1;
        }
        return bytes;
    }
};

// What a row sees of the 16 columns of a thread.
struct Look {
    u32 chunk = 0;        // as mask.cuh lays it out
    bool hidden = false;  // some of those that are there

    // Side by side, where `full` is the chunk of a row that sees all of them.
    DEVICE void wide(const Chunk<u32>& bytes, u32 full) {
        chunk = chunk_of(bytes);
        hidden = chunk != full;
    }
    // The first `count`, `step` apart.
    DEVICE void narrow(const u8* at, i64 step, int count) {
        for (int n = 0; n < count; n++) {
            const u32 sees = at[n * step] != 0;
            const int c = n / 8, q = n % 8 / 2, e = n % 2;
            chunk |= sees << (4 * q + 2 * c + e);
            hidden |= !sees;
        }
    }
};

// Teams of a block, as a power of 2, where there are so many tiles, and groups of all planes: `_teams` of survey.py.
DEVICE int teams_for(int tiles, int groups) {
    constexpr int LEAST = 128;  // blocks
    int power = 0;
    while (tiles << power + 1 <= TILES && LEAST << power + 1 <= groups) power++;
    return power;
}

// What a team of a block's threads looks at: a group of rows of one plane, and the tiles of one byte of its sets.
struct Part {
    static constexpr int THREADS = 32 * WARPS;
    int power;    // of 2: teams of the block
    int thread;   // of the team
    int plane, group, byte;
    int tiles;   // that are there
    int beyond;  // bytes that fill up the word
    bool exists;

    DEVICE Part(const Arguments& a) {
        const int all = mask_tiles<BLOCK_N>(a), bytes = ceil_div(all, TILES), groups = mask_groups(a);
        power = teams_for(all, a.mask_batch * a.mask_heads * groups);
        thread = thread_index() & (THREADS >> power) - 1;
        const int parts = groups + (1 << power) - 1 >> power, team = thread_index() / (THREADS / TILES) >> 3 - power;
        byte = block_index() % bytes, group = (block_index() / bytes % parts << power) + team;
        plane = block_index() / bytes / parts;
        tiles = smaller(TILES, all - TILES * byte);
        beyond = byte == bytes - 1 ? 4 * mask_words<BLOCK_N>(a) - bytes : 0;
        exists = group < groups;
    }
    DEVICE void store(const Arguments& a, int kind, u32 set) const {
        u8* const bytes = reinterpret_cast<u8*>(mask_set<BLOCK_N>(a, plane, group, kind)) + byte;
        bytes[0] = set;
        for (int n = 1; n <= beyond; n++) bytes[n] = 0;
    }
};

// What a thread looks at: EACH columns of one of the part's tiles, and of the group's rows `down`, down + DOWN and so
// on, as many as are below `rows`.
struct Column {
    int tile, down, rows;
    int count;        // of its columns that there are
    int ends;         // rows of the mask from the group's first on
    const u8* mask;   // the first column of the group's first row
    const u8* end;    // of the plane, where columns lie side by side
    u16* chunks;      // where the bits of that row go
    bool aligned;     // so that all can be read 16 bytes at once

    DEVICE Column(const Arguments& a, const Part& part) {
        const u8* const plane =
            a.mask.at + part.plane / a.mask_heads * a.mask.batch + part.plane % a.mask_heads * a.mask.head;
        const int width = ACROSS >> part.power;
        down = part.power ? part.thread / width : part.thread / ACROSS;
        const int across = part.thread - down * width;
        tile = across * EACH / BLOCK_N;
        const int first = TILES * part.byte * BLOCK_N + across * EACH;
        count = larger(smaller(EACH, a.keys - first), 0);
        // Not by `count == EACH`: ptxas of CUDA 13.0 and 13.2 takes that as true of 0 as well.
        const bool whole = first + EACH <= a.keys;
        aligned = whole && a.mask.column == 1 && (reinterpret_cast<u64>(plane) | u64(a.mask.row)) % EACH == 0;
        ends = a.mask_rows - part.group * GROUP;
        rows = !part.exists || tile >= part.tiles || down >= DOWN ? 0 : a.mask_rows == 1 ? 1 : GROUP;
        mask = plane + part.group * GROUP * a.mask.row + first * a.mask.column;
        end = plane + (a.mask.row > 0 ? (a.mask_rows - 1) * a.mask.row : 0) + a.keys;
        chunks = mask_row<BLOCK_N>(a, part.plane, TILES * part.byte + tile, part.group * GROUP) +
                 across % (BLOCK_N / EACH);
    }
};

DEVICE u32 any_of_warp(u32 bits) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) bits |= shuffle_xor(bits, lanes);
    return bits;
}

KERNEL survey(const Arguments a) {
    let_next_begin();
    u32* const of_warps = reinterpret_cast<u32*>(shared_memory());  // [WARPS]
    if (block_index() == 0 && thread_index() == 0) *a.counter = BLANK;

    const Part part(a);
    // Bits of each row; and whether some row of the mask sees something, or some does not.
    const Column column(a, part);
    struct {
        bool seen = false, hidden = false;
    } any;
    const auto put = [&](int r, const Look& look) {
        if (r < column.ends) any.seen |= look.chunk != 0, any.hidden |= look.hidden;
        column.chunks[CHUNKS * r] = r < column.ends ? look.chunk : 0xffff;
    };
    if (column.aligned) {
        Chunk<u32> bytes[ROWS];
        UNROLL for (int n = 0; n < ROWS; n++) {
            const int r = column.down + n * DOWN;
            if (r < smaller(column.rows, column.ends))
                bytes[n] = *reinterpret_cast<const Chunk<u32>*>(column.mask + r * a.mask.row);
        }
        UNROLL for (int n = 0; n < ROWS; n++) {
            const int r = column.down + n * DOWN;
            if (r >= column.rows) continue;
            Look look;
            look.wide(bytes[n], 0xffff);
            put(r, look);
        }
    } else if (a.mask.column == 1) {
        constexpr int AT_ONCE = 3;  // rows, for which there are registers
        Chunk<u32> ones;
        UNROLL for (int n = 0; n < 4; n++) ones.at[n] = ~0u;
        const u32 full = chunk_of(Around{ones, ones}.from(nullptr, column.count));
        const auto within = [&](int r) { return Around::end(column.mask + r * a.mask.row, column.count) <= column.end; };
        for (int from = column.down; from < column.rows; from += AT_ONCE * DOWN) {
            Around around[AT_ONCE];
            UNROLL for (int n = 0; n < AT_ONCE; n++) {
                const int r = from + n * DOWN;
                if (r < smaller(column.rows, column.ends) && within(r))
                    around[n].load(column.mask + r * a.mask.row, column.count);
            }
            UNROLL for (int n = 0; n < AT_ONCE; n++) {
                const int r = from + n * DOWN;
                if (r >= column.rows) continue;
                const u8* const row = column.mask + r * a.mask.row;
                Look look;
                if (within(r))
                    look.wide(around[n].from(row, column.count), full);
                else if (r < column.ends)
                    look.narrow(row, 1, column.count);
                put(r, look);
            }
        }
    } else {
        for (int r = column.down; r < column.rows; r += DOWN) {
            Look look;
            if (r < column.ends) look.narrow(column.mask + r * a.mask.row, a.mask.column, column.count);
            put(r, look);
        }
    }

    // The part's byte of SEEN, and above it that of HIDDEN: of a thread, of its warp, of all warps of the team.
    const u32 sets = any_of_warp(u32(any.seen) << column.tile | u32(any.hidden) << (TILES + column.tile));
    const int warp = thread_index() / 32, kind = part.thread;
    if (thread_index() % 32 == 0) store_shared(of_warps + warp, sets);
    barrier();
    if (kind > HIDDEN || !part.exists) return;
    u32 all = 0;
    for (int n = 0; n < WARPS >> part.power; n++) all |= load_shared(of_warps + warp + n);
    part.store(a, kind, all >> TILES * kind);
}
