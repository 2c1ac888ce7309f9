// Keys and values in pages (PAGED): row j of a sequence is row j % page of the page that its table has at j / page.
//
// Of arrays (pages, heads, page, columns), whose `batch` is from page to page. A table's entry is read for a row that is
// there, and for no other: past the length it may be anything.
#pragma once
#include "portable/tiles.cuh"

// Of PAGED: a tile of keys may be in several pages, or in parts of them, of which each lane of a warp has one; is in one
// page; or may be in more than there are lanes.
enum { NO_PAGES, SOME_PAGES, WHOLE_PAGES, MANY_PAGES };

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
        const int mine = number(start) + lane();
        return mine <= number(end - 1) ? u32(entry(mine)) : 0;
    }
};

// Rows of a head's `operand` from key `start` on, of which there are `count`. Each lane of a warp has one of the tile's
// pages, `page`, so that no copy waits for a look into the table. Of MANY_PAGES each looks.
struct PagedLines {
    const PageTable& table;
    const T* head;
    const Operand& operand;
    int start, count;
    u32 page;

    // Where row r begins, or the last one; asked by all lanes of a warp at once.
    DEVICE const T* at(int r) const {
        const int j = start + smaller(r, count - 1), number = table.number(j);
        const i64 found =
            PAGED == SOME_PAGES ? i64(of_lane(page, number - table.number(start))) : table.entry(number);
        return head + found * operand.batch + (j - number * table.a.page) * operand.row;
    }
    DEVICE const T* operator()(int r) const {
        const T* const from = at(r);
        return r < count ? from : nullptr;
    }
};

template <int COUNT, int WIDTH, int THREADS, int BYTES>
DEVICE void copy_rows(T* tile, PagedLines lines, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(T), PARTS = WIDTH / STEP;
    static_assert(COUNT * PARTS % 32 == 0);
    UNROLL for (int n = 0; n < COUNT * PARTS; n += THREADS) {
        const int part = n + thread_of<THREADS>();
        if (COUNT * PARTS % THREADS != 0 && part >= COUNT * PARTS) break;
        const int r = part / PARTS, d = part % PARTS * STEP;
        const int there = r < lines.count ? smaller(larger((dim - d) * int(sizeof(T)), 0), BYTES) : 0;
        copy_async<BYTES>(tile + r * PITCH<WIDTH> + d, lines.at(r) + (there ? d : 0), there, once);
    }
}
