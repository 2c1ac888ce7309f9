// The gradients of query, key and value of float32 in one pass: five products a tile, where kernels of their own that
// each make scores again take seven.
//
// A block keeps BLOCK_M keys of one key head and visits, for each query head that shares it, the tiles of BLOCK_N
// queries that see any of them. Tiles of scores are transposed, (keys, queries). Four warps have the values, 8 rows a
// thread, and four the keys:
//
//   of values   S = K Q^T     P = exp(S - base), to shared memory            dV += P dO
//   of keys     dP = V dO^T   waits for P; dS = P (dP - delta), to memory    dK += dS Q
//   all         dQ = dS^T K, a part of the keys each, added in global memory
//
// P and dS are read again by the warp that wrote them alone, but for dQ. dQ is added up in grad_query, which `prepare`
// has filled with zeros, by all blocks in any order: it alone does not repeat its bits. A weight that is hidden is -0,
// which no exponential is, so that its gradient is 0 whatever dP is.
//
// Shared memory: key and value [BLOCK_M][PITCH], P and dS [BLOCK_M][SCORES], query and grad_out [BLOCK_N][PITCH], base
// and delta [BLOCK_N]. The next tile of queries is on its way during the last product. Three barriers a tile.
#include "fused/products.cuh"
#include "gradient_rows.cuh"
#include "positions.cuh"
#include "schedule.cuh"

constexpr int ROLE = 4;  // warps of a role
static_assert(WARPS == 2 * ROLE, "two roles");
typedef Lanes<BLOCK_M / (ROLE * EACH)> Grid;  // of lanes, over keys and what goes across
typedef Lanes<4> Across;                      // over queries and columns of dQ
constexpr int WARP_ROWS = BLOCK_M / ROLE;
constexpr int QUERIES = BLOCK_N / Grid::ACROSS, COLUMNS = BLOCK_D / Grid::ACROSS;  // of a thread
constexpr int PITCH = BLOCK_D + VECTOR;              // an odd number of 16 bytes
constexpr int SCORES = BLOCK_N + 32 / Grid::DOWN;    // a warp's stores of one element each lie in different banks
constexpr int TILE = COLUMNS > 12 ? 8 : COLUMNS;      // columns that are added up by themselves first
static_assert(BLOCK_N % Grid::ACROSS == 0 && COLUMNS % VECTOR == 0 && COLUMNS % TILE == 0, "whole chunks");

// dQ: warps have 32 queries by QUERY_COLUMNS a thread each, and of those that have the same each a part of the keys.
constexpr int QUERY_COLUMNS = BLOCK_D % 64 == 0 ? 8 : BLOCK_D / Across::ACROSS;
constexpr int DOWN_WARPS = BLOCK_N / 32, ACROSS_WARPS = BLOCK_D / (QUERY_COLUMNS * Across::ACROSS);
constexpr int PARTS = WARPS / (DOWN_WARPS * ACROSS_WARPS), PART = BLOCK_M / PARTS;
static_assert(PARTS * DOWN_WARPS * ACROSS_WARPS == WARPS && PART * PARTS == BLOCK_M, "every warp has its part");

constexpr u32 HIDDEN = 0x80000000u;  // the bits of -0
constexpr int ROWS = BLOCK_M * PITCH, WEIGHTS = BLOCK_M * SCORES, PASSING = BLOCK_N * PITCH;
static_assert(sizeof(float) * (2 * ROWS + 2 * WEIGHTS + 2 * PASSING + 2 * BLOCK_N) == SHARED_BYTES,
              "tiles.py counts the same shared memory");

// COUNT rows of an operand to shared memory, of which `count` are there, and of their columns `dim`; the rest is 0.
template <int COUNT> DEVICE void load_rows(float* to, const float* from, i64 step, int count, int dim) {
    constexpr int CHUNKS = BLOCK_D / VECTOR;
    UNROLL for (int n = 0; n < COUNT * CHUNKS; n += 32 * WARPS) {
        const int part = n + thread_index(), r = part / CHUNKS, d = part % CHUNKS * VECTOR;
        if (COUNT * CHUNKS % (32 * WARPS) != 0 && part >= COUNT * CHUNKS) break;
        const bool there = r < count && d < dim;
        copy_async<16>(to + r * PITCH + d, there ? from + r * step + d : from, there ? 16 : 0);
    }
}

DEVICE const float* begin_of(const Operand& operand, i64 b, i64 h) {
    return reinterpret_cast<const float*>(operand.at) + b * operand.batch + h * operand.head;
}

KERNEL backward(const Arguments a) {
    float* const key = reinterpret_cast<float*>(shared_memory());
    float* const value = key + ROWS;
    float* const weights = value + ROWS;
    float* const gradients = weights + WEIGHTS;
    float* const query = gradients + WEIGHTS;
    float* const upstream = query + PASSING;
    float* const base = upstream + PASSING;
    float* const delta = base + BLOCK_N;

    const int heads = a.heads / a.group;
    const Place at = place(a, heads, ceil_div(a.keys, BLOCK_M), false);  // most queries see the first keys
    const int b = at.batch, first = at.tile * BLOCK_M;
    const i64 head_kv = at.head;
    const Extent e = extent(a, b);
    const int last = smaller(first + BLOCK_M, e.end) - 1;
    Reach reached = {{0, 0}, {0, 0}};
    if (first < e.end) reached = reach(queries_of(a, e, first), queries_of(a, e, last));
    if (last + 1 < first + BLOCK_M) reached.every = Span{0, 0};  // some are past the end
    const int first_tile = reached.first_tile(), tiles = reached.tiles();

    const int warp = thread_index() / 32;
    const bool of_values = warp < ROLE;  // else of keys
    const int my_row = warp % ROLE * WARP_ROWS + Grid::row(), my_column = Grid::column();
    // Operands of the first product and of the second, where the thread's begin.
    const float* const own = (of_values ? key : value) + my_row * PITCH;
    const float* const passing = (of_values ? query : upstream) + my_column * PITCH;
    float* const scores = (of_values ? weights : gradients) + my_row * SCORES;
    const float* const added = (of_values ? upstream : query) + my_column * VECTOR;
    // And of dQ: whose keys, which queries, which columns.
    const int part = warp / (DOWN_WARPS * ACROSS_WARPS) * PART;
    const int query_row = warp % DOWN_WARPS * 32 + Across::row() * VECTOR;
    const int query_column =
        warp / DOWN_WARPS % ACROSS_WARPS * QUERY_COLUMNS * Across::ACROSS + Across::column() * VECTOR;

    const auto load = [&](int t) {
        const int h = head_kv * a.group + t / tiles, start = (first_tile + t % tiles) * BLOCK_N;
        load_rows<BLOCK_N>(query, begin_of(a.query, b, h) + start * a.query.row, a.query.row, a.queries - start, a.dim);
        load_rows<BLOCK_N>(upstream, begin_of(a.grad_out, b, h) + start * a.grad_out.row, a.grad_out.row,
                           a.queries - start, a.dim_v);
        const i64 line = (i64(b) * a.heads + h) * a.padded + start;
        const int n = thread_index() * VECTOR;
        if (n < BLOCK_N)
            copy_async<16>(base + n, static_cast<const float*>(a.base) + line + n, 16);
        else if (n < 2 * BLOCK_N)
            copy_async<16>(delta + n - BLOCK_N, static_cast<const float*>(a.delta) + line + n - BLOCK_N, 16);
        copy_commit();
    };

    float sums[EACH][COLUMNS];
    clear(sums);
    const int count = tiles * a.group;
    if (count) {
        load_rows<BLOCK_M>(key, begin_of(a.key, b, head_kv) + first * a.key.row, a.key.row, e.end - first, a.dim);
        load_rows<BLOCK_M>(value, begin_of(a.value, b, head_kv) + first * a.value.row, a.value.row, e.end - first,
                           a.dim_v);
        load(0);
    }
    ROLLED for (int t = 0; t < count; t++) {
        const int h = head_kv * a.group + t / tiles, start = (first_tile + t % tiles) * BLOCK_N;
        copy_wait<0>();
        barrier();
        {
            float s[EACH][QUERIES];
            clear(s);
            product_nt<BLOCK_D, Grid::DOWN * PITCH, Grid::ACROSS * PITCH>(s, own, passing);
            if (of_values) {
                if (reached.hides(start))
                    UNROLL for (int m = 0; m < EACH; m++) {
                        const Span seen = queries_of(a, e, first + my_row + m * Grid::DOWN);
                        UNROLL for (int n = 0; n < QUERIES; n++) {
                            const int i = start + my_column + n * Grid::ACROSS;
                            if (i < seen.from || i >= seen.to) s[m][n] = -INFINITE;
                        }
                    }
                UNROLL for (int n = 0; n < QUERIES; n++) {
                    const float less = load_shared(base + my_column + n * Grid::ACROSS);
                    UNROLL for (int m = 0; m < EACH; m++) {
                        const float p = power(s[m][n] * float(a.factor) - less);
                        store_shared(scores + m * Grid::DOWN * SCORES + my_column + n * Grid::ACROSS,
                                     s[m][n] == -INFINITE ? -0.0f : p);
                    }
                }
            }
            barrier();
            if (!of_values)
                UNROLL for (int n = 0; n < QUERIES; n++) {
                    const float less = load_shared(delta + my_column + n * Grid::ACROSS);
                    UNROLL for (int m = 0; m < EACH; m++) {
                        float* const to = scores + m * Grid::DOWN * SCORES + my_column + n * Grid::ACROSS;
                        const float p = load_shared(to - WEIGHTS);
                        store_shared(to, float_bits(p) == HIDDEN ? 0.0f : p * (s[m][n] - less));
                    }
                }
            warp_barrier();
        }
        // The terms of a tile are added up by themselves first: one chain over all queries would round more.
        UNROLL for (int c = 0; c < COLUMNS; c += TILE) {
            float tile[EACH][TILE];
            clear(tile);
            product_nn<BLOCK_N, Grid::DOWN * SCORES, PITCH, Grid::ACROSS * VECTOR>(tile, scores,
                                                                                   added + c * Grid::ACROSS);
            UNROLL for (int m = 0; m < EACH; m++) UNROLL for (int n = 0; n < TILE; n++) sums[m][c + n] += tile[m][n];
        }
        barrier();
        if (t + 1 < count) load(t + 1);
        float tile[EACH][QUERY_COLUMNS];
        clear(tile);
        product_tn<PART, SCORES, 4 * VECTOR, PITCH, Across::ACROSS * VECTOR>(
            tile, gradients + part * SCORES + query_row, key + part * PITCH + query_column);
        UNROLL for (int m = 0; m < EACH; m++) {
            const int i = start + query_row + m / VECTOR * 4 * VECTOR + m % VECTOR;
            const i64 row = gradient_row(a, OF_QUERY, b, h, i, a.heads, a.queries);
            float* const to = static_cast<float*>(a.grad_query) + row * a.dim;
            UNROLL for (int n = 0; n < QUERY_COLUMNS; n += VECTOR) {
                const int d = query_column + n * Across::ACROSS;
                UNROLL for (int w = 0; w < VECTOR; w++) tile[m][n + w] *= float(a.scale);
                if (i < a.queries && d < a.dim) add_quad(to + d, tile[m] + n);
            }
        }
    }

    const int dim = of_values ? a.dim_v : a.dim;
    float* const to = static_cast<float*>(of_values ? a.grad_value : a.grad_key);
    const float weight = of_values ? 1.0f : float(a.scale);
    UNROLL for (int m = 0; m < EACH; m++) {
        const int j = first + my_row + m * Grid::DOWN;
        if (j >= a.keys) continue;
        const i64 row = gradient_row(a, of_values ? OF_VALUE : OF_KEY, b, head_kv, j, heads, a.keys) * dim;
        UNROLL for (int n = 0; n < COLUMNS; n += VECTOR) {
            const int d = my_column * VECTOR + n * Grid::ACROSS;
            Chunk<float> chunk;
            UNROLL for (int w = 0; w < VECTOR; w++)  // past the end a weight of 0 times NaN is NaN
                chunk.at[w] = j < e.end ? sums[m][n + w] * weight : 0.0f;
            if (d < dim) *reinterpret_cast<Chunk<float>*>(to + row + d) = chunk;
        }
    }
}
