// Tiles of rows on their way from global to shared memory.
#pragma once
#include "portable/products.cuh"

// Rows of an operand that lie evenly: row r begins at `at + r * row`, if r < count.
struct Lines {
    const T* at;
    i64 row;
    int count;
    DEVICE const T* operator()(int r) const { return r < count ? at + r * row : nullptr; }
};

// Rows of a head's `operand` from `first` on, of which there are `rows`.
DEVICE Lines lines(const T* head, const Operand& operand, int first, int rows) {
    return Lines{head + first * operand.row, operand.row, rows - first};
}

// One copy after another by each of THREADS, of BYTES. Row r begins at `source(r)`, which is null if there is none.
template <int COUNT, int WIDTH, int THREADS, int BYTES, class Source>
DEVICE void copy_rows(T* tile, Source source, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(T), PARTS = WIDTH / STEP;
    const T* const anywhere = source(0);  // a tile has a row, and a copy of nothing an address
    UNROLL for (int n = 0; n < COUNT * PARTS; n += THREADS) {
        const int part = n + thread_of<THREADS>();
        if (COUNT * PARTS % THREADS != 0 && part >= COUNT * PARTS) break;
        const int r = part / PARTS, d = part % PARTS * STEP;
        const T* const from = source(r);
        const int there = from ? smaller(larger((dim - d) * int(sizeof(T)), 0), BYTES) : 0;
        copy_async<BYTES>(tile + r * PITCH<WIDTH> + d, there ? from + d : anywhere, there, once);
    }
}

// The same where a thread's copies are of one column, so that it goes from row to row by addition.
template <int COUNT, int WIDTH, int THREADS, int BYTES>
DEVICE void copy_rows(T* tile, Lines lines, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(T), PARTS = WIDTH / STEP, APART = THREADS / PARTS;
    if constexpr (THREADS % PARTS != 0 || COUNT % (APART ? APART : 1) != 0) {
        copy_rows<COUNT, WIDTH, THREADS, BYTES, Lines>(tile, lines, dim, once);
    } else {
        const int thread = thread_of<THREADS>(), r = thread / PARTS, d = thread % PARTS * STEP;
        const int there = smaller(larger((dim - d) * int(sizeof(T)), 0), BYTES);
        const T* from = lines.at + r * lines.row + (there ? d : 0);
        T* to = tile + r * PITCH<WIDTH> + d;
        UNROLL for (int n = 0; n < COUNT; n += APART) {
            copy_async<BYTES>(to + n * PITCH<WIDTH>, from, r + n < lines.count ? there : 0, once);
            from += APART * lines.row;
        }
    }
}

template <int COUNT, int WIDTH, int THREADS, class Source>
DEVICE void gather_rows(T* tile, Source source, i64 column, int dim) {
    for (int part = thread_of<THREADS>(); part < COUNT * WIDTH; part += THREADS) {
        const int r = part / WIDTH, d = part % WIDTH;
        const T* const from = source(r);
        T element = T();
        if (from && d < dim) element = from[d * column];
        store_shared(tile + r * PITCH<WIDTH> + d, element);
    }
}

// Rows 0 to COUNT of a tile, WIDTH columns each, of which `dim` are there; the rest is 0. `bytes` is how much one copy
// may move: 16, 8 or 4 where rows lie in steps of that, and the size of an element where nothing is known. THREADS
// share the work, the team's or the block's. `once` is as in `copy_async`.
template <int COUNT, int WIDTH, int THREADS = 32 * TEAM, class Source>
DEVICE void load_rows(T* tile, Source source, i64 column, int dim, int bytes, bool once = false) {
    if (bytes == 16)
        copy_rows<COUNT, WIDTH, THREADS, 16>(tile, source, dim, once);
    else if (!GENERIC && bytes == 8 && sizeof(T) < 8)
        copy_rows<COUNT, WIDTH, THREADS, 8>(tile, source, dim, once);
    else if (!GENERIC && bytes == 4 && sizeof(T) < 4)
        copy_rows<COUNT, WIDTH, THREADS, (sizeof(T) < 4 ? 4 : sizeof(T))>(tile, source, dim, once);
    else
        gather_rows<COUNT, WIDTH, THREADS>(tile, source, column, dim);
}

// Calls use(t, slot) for tile t of the team's `count`, once load(t, slot) has brought it; STAGES - 1 loads run ahead.
// What `also` asks for, of all threads, is there at the first tile, and what was asked for before. At `use` the team's
// threads have the tile; none is still in the one before.
template <class Load, class Also, class Use> DEVICE void pipeline(int count, Load load, Also also, Use use) {
    if constexpr (STAGES == 1) also(), copy_commit();
    UNROLL for (int t = 0; t < STAGES - 1; t++) {
        if (t < count) load(t, t);
        if (t == 0) also();
        copy_commit();
    }
    if constexpr (TEAMS > 1) {  // teams wait for one another here alone, those without tiles too
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        barrier();
    }
    int slot = 0;
    for (int t = 0; t < count; t++) {
        if constexpr (STAGES == 1) {
            if (t > 0) team_barrier();
            load(t, 0);
            copy_commit();
            copy_wait<0>();
            team_barrier();
        } else {
            copy_wait<STAGES - 2>();
            team_barrier();
            const int ahead = t + STAGES - 1;
            if (ahead < count) load(ahead, slot == 0 ? STAGES - 1 : slot - 1);
            copy_commit();
        }
        use(t, slot);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    copy_wait<0>();
}
template <class Load, class Use> DEVICE void pipeline(int count, Load load, Use use) {
    pipeline(count, load, [] {}, use);
}
