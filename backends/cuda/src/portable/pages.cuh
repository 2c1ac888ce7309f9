// Keys and values in pages (PAGED): row j of a sequence is row j % page of the page that its table has at j / page.
//
// Of arrays (pages, heads, page, columns), whose `batch` is from page to page. A table's entry is read for a row that is
// there, and for no other: past the length it may be anything.
#pragma once
#include "portable/tiles.cuh"

// Of PAGED: a tile of keys may be in several pages, or in parts of them, of which each lane of a warp has one; is in one
// page; or may be in more than there are lanes. Or a lane has the page of each SECTION of a tile, which lies in one.
enum { NO_PAGES, SOME_PAGES, WHOLE_PAGES, MANY_PAGES, PAGES_OF_SECTIONS };
constexpr int SECTION = 16;  // keys

// The table of a batch entry.
struct PageTable {
    const Arguments& a;
    const int batch;

    // Which page key j is in, by its number in the sequence: the table's entry.
    DEVICE int number(int j) const { return int(quotient(j, a.by_page)); }
    DEVICE i64 entry(int number) const {
        const i64 at = batch * a.table_batch + number * a.table_step;
        return a.table_bytes == 4 ? reinterpret_cast<const int*>(a.table)[at] : reinterpret_cast<const i64*>(a.table)[at];
    }
    DEVICE int row(int j) const { return j - number(j) * a.page; }

    // Of a tile of keys from `start` on, which end at `end`: its page, or of SOME_PAGES the one that this lane asks for.
    // Pages are fewer than 2^32 (launching/arguments.py).
    DEVICE u32 of_tile(int start, int end) const {
        if (PAGED == MANY_PAGES) return 0;
        if (PAGED == WHOLE_PAGES) return u32(entry(number(start)));
        if (PAGED == PAGES_OF_SECTIONS) {
            const int first = start + lane() * SECTION;
            return lane() < BLOCK_N / SECTION && first < end ? u32(entry(number(first))) : 0;
        }
        const int mine = number(start) + lane();
        return mine <= number(end - 1) ? u32(entry(mine)) : 0;
    }
};

// The page of key n of a tile that begins at `start`, of which there is a key `last`; asked by all lanes of a warp at
// once, of which each has what `of_tile` gave it.
DEVICE i64 page_of_key(const PageTable& table, u32 page, int start, int last, int n) {
    if (PAGED == WHOLE_PAGES) return page;
    if (PAGED == PAGES_OF_SECTIONS) return of_lane(page, smaller(n, last) / SECTION);
    const int number = table.number(start + smaller(n, last));
    return PAGED == SOME_PAGES ? i64(of_lane(page, number - table.number(start))) : table.entry(number);
}

// Rows of a head's `operand` from key `start` on, of which there are `count`. Each lane of a warp has one of the tile's
// pages, `page`, so that no copy waits for a look into the table. Of MANY_PAGES each looks.
template <class V> struct PagedLines {
    const PageTable& table;
    const V* head;
    const Operand& operand;
    int start, count;
    u32 page;

    // Where row r begins, or the last one; asked by all lanes of a warp at once.
    DEVICE const V* at(int r) const {
        const i64 found = page_of_key(table, page, start, count - 1, r);
        return head + found * operand.batch + table.row(start + smaller(r, count - 1)) * operand.row;
    }
    DEVICE const V* operator()(int r) const {
        const V* const from = at(r);
        return r < count ? from : nullptr;
    }
};

template <int COUNT, int WIDTH, int THREADS, int BYTES, class V>
DEVICE void copy_rows(V* tile, PagedLines<V> lines, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(V), PARTS = WIDTH / STEP;
    constexpr bool WHOLE_WARPS = COUNT * PARTS % 32 == 0;
    UNROLL for (int n = 0; n < COUNT * PARTS; n += THREADS) {
        const int part = n + thread_of<THREADS>();
        if (WHOLE_WARPS && COUNT * PARTS % THREADS != 0 && part >= COUNT * PARTS) break;
        const int r = part / PARTS, d = part % PARTS * STEP;
        const int there = r < lines.count ? smaller(larger((dim - d) * int(sizeof(V)), 0), BYTES) : 0;
        if constexpr (WHOLE_WARPS) {
            copy_async<BYTES>(tile + r * STEP_OF_ROWS<V, WIDTH> + d, lines.at(r) + (there ? d : 0), there, once);
        } else {
            const V* const from = lines.at(r) + (there ? d : 0);
            if (part < COUNT * PARTS) copy_async<BYTES>(tile + r * STEP_OF_ROWS<V, WIDTH> + d, from, there, once);
        }
    }
}

// The same rows where each section of the tile lies in one page, which a lane has.
template <class V> struct SectionLines {
    const PageTable& table;
    const V* head;
    const Operand& operand;
    int start, count;
    u32 page;

    // Rows of the section from row n of the tile on.
    DEVICE Lines<V> from(int n) const {
        const i64 found = of_lane(page, n / SECTION);
        const int first = table.row(start + n);
        return lines(head + found * operand.batch, operand, first, first + count - n);
    }
    // Asked by all lanes of a warp at once.
    DEVICE const V* operator()(int r) const {
        const i64 found = of_lane(page, r / SECTION);
        return r < count ? head + found * operand.batch + table.row(start + r) * operand.row : nullptr;
    }
};

template <int COUNT, int WIDTH, int THREADS, int BYTES, class V>
DEVICE void copy_rows(V* tile, SectionLines<V> sections, int dim, bool once) {
    UNROLL for (int n = 0; n < COUNT; n += SECTION)
        copy_rows<(COUNT < SECTION ? COUNT : SECTION), WIDTH, THREADS, BYTES>(tile + n * STEP_OF_ROWS<V, WIDTH>,
                                                                             sections.from(n), dim, once);
}
