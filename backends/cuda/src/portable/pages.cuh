// Keys and values in pages (PAGED): row j of a sequence is row j % page of the page that its table has at j / page.
//
// Of arrays (pages, heads, page, columns), whose `batch` is from page to page. A table's entry is read for a row that is
// there, and for no other: past the length it may be anything.
#pragma once
#include "portable/tiles.cuh"

enum { NO_PAGES, ANY_PAGES, WHOLE_PAGES };  // of PAGED: a tile of keys is in one page, or in several or parts of them

// The table of a batch entry.
struct PageTable {
    const Arguments& a;
    const i64 first;

    DEVICE PageTable(const Arguments& a, i64 b) : a(a), first(b * a.table_batch) {}

    // Which page key j is in, and which row of it.
    DEVICE i64 page(int j) const {
        const i64 at = first + quotient(j, a.by_page) * a.table_step;
        return a.table_bytes == 4 ? reinterpret_cast<const int*>(a.table)[at] : reinterpret_cast<const i64*>(a.table)[at];
    }
    DEVICE int row(int j) const { return j - int(quotient(j, a.by_page)) * a.page; }
};

// Rows of a head's `operand` from key `start` on, of which there are `count`.
struct PagedLines {
    const PageTable& table;
    const T* head;
    const Operand& operand;
    int start, count;

    DEVICE const T* operator()(int r) const {
        if (r >= count) return nullptr;
        return head + table.page(start + r) * operand.batch + table.row(start + r) * operand.row;
    }
};
