// Tiles of rows on their way from global to shared memory.
#pragma once
#include "portable/products.cuh"

// Rows of an operand that lie evenly: row r begins at `at + r * row`, if r < count.
template <class V> struct Lines {
    const V* at;
    i64 row;
    int count;
    DEVICE const V* operator()(int r) const { return r < count ? at + r * row : nullptr; }
};

// Rows of a head's `operand` from `first` on, of which there are `rows`.
template <class V> DEVICE Lines<V> lines(const V* head, const Operand& operand, int first, int rows) {
    return Lines<V>{head + first * operand.row, operand.row, rows - first};
}

// From row to row of a tile in shared memory, in elements: 16 bytes more than a row holds, as PITCH is for T.
template <class V, int WIDTH> constexpr int STEP_OF_ROWS = WIDTH + 16 / int(sizeof(V));

// One copy after another by each of THREADS, of BYTES. Row r begins at `source(r)`, which is null if there is none.
template <int COUNT, int WIDTH, int THREADS, int BYTES, class V, class Source>
DEVICE void copy_each(V* tile, Source source, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(V), PARTS = WIDTH / STEP;
    const V* const anywhere = source(0);  // for copies of nothing; null where no row is there, of which then nothing is read
    UNROLL for (int n = 0; n < COUNT * PARTS; n += THREADS) {
        const int part = n + thread_of<THREADS>();
        if (COUNT * PARTS % THREADS != 0 && part >= COUNT * PARTS) break;
        const int r = part / PARTS, d = part % PARTS * STEP;
        const V* const from = source(r);
        const int there = from ? smaller(larger((dim - d) * int(sizeof(V)), 0), BYTES) : 0;
        copy_async<BYTES>(tile + r * STEP_OF_ROWS<V, WIDTH> + d, there ? from + d : anywhere, there, once);
    }
}
template <int COUNT, int WIDTH, int THREADS, int BYTES, class V, class Source>
DEVICE void copy_rows(V* tile, Source source, int dim, bool once) {
    copy_each<COUNT, WIDTH, THREADS, BYTES>(tile, source, dim, once);
}

// The same where a thread's copies are of one column, so that it goes from row to row by addition.
template <int COUNT, int WIDTH, int THREADS, int BYTES, class V>
DEVICE void copy_rows(V* tile, Lines<V> lines, int dim, bool once) {
    constexpr int STEP = BYTES / sizeof(V), PARTS = WIDTH / STEP, APART = THREADS / PARTS;
    if constexpr (THREADS % PARTS != 0 || COUNT % (APART ? APART : 1) != 0) {
        copy_each<COUNT, WIDTH, THREADS, BYTES>(tile, lines, dim, once);
    } else {
        const int thread = thread_of<THREADS>(), r = thread / PARTS, d = thread % PARTS * STEP;
        const int there = smaller(larger((dim - d) * int(sizeof(V)), 0), BYTES);
        const V* from = lines.at + r * lines.row + (there ? d : 0);
        V* to = tile + r * STEP_OF_ROWS<V, WIDTH> + d;
        UNROLL for (int n = 0; n < COUNT; n += APART) {
            copy_async<BYTES>(to + n * STEP_OF_ROWS<V, WIDTH>, from, r + n < lines.count ? there : 0, once);
            from += APART * lines.row;
        }
    }
}

// An element at a time; of 8 bits four, since a word of shared memory is one thread's.
template <int COUNT, int WIDTH, int THREADS, class V, class Source>
DEVICE void gather_rows(V* tile, Source source, i64 column, int dim) {
    constexpr int EACH = sizeof(V) == 1 ? 4 : 1;
    struct alignas(EACH * sizeof(V)) Together {
        V at[EACH];
    };
    for (int part = thread_of<THREADS>(); part < COUNT * WIDTH / EACH; part += THREADS) {
        const int r = part / (WIDTH / EACH), d = part % (WIDTH / EACH) * EACH;
        const V* const from = source(r);
        Together elements = {};
        UNROLL for (int n = 0; n < EACH; n++)
            if (from && d + n < dim) elements.at[n] = from[(d + n) * column];
        store_shared(reinterpret_cast<Together*>(tile + r * STEP_OF_ROWS<V, WIDTH> + d), elements);
    }
}

// Rows 0 to COUNT of a tile, WIDTH columns each, of which `dim` are there; the rest is 0. `bytes` is how much one copy
// may move: 16, 8 or 4 where rows lie in steps of that, and the size of an element where nothing is known. THREADS
// share the work, the team's or the block's. `once` is as in `copy_async`.
template <int COUNT, int WIDTH, int THREADS = 32 * TEAM, class V, class Source>
DEVICE void load_rows(V* tile, Source source, i64 column, int dim, int bytes, bool once = false) {
    if (bytes == 16)
        copy_rows<COUNT, WIDTH, THREADS, 16>(tile, source, dim, once);
    else if (!GENERIC && bytes == 8 && sizeof(V) < 8)
        copy_rows<COUNT, WIDTH, THREADS, 8>(tile, source, dim, once);
    else if (!GENERIC && bytes == 4 && sizeof(V) < 4)
        copy_rows<COUNT, WIDTH, THREADS, (sizeof(V) < 4 ? 4 : sizeof(V))>(tile, source, dim, once);
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
