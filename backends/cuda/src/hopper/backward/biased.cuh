// P^T and dS^T where a float mask is added to scores (BIAS); weigher.cuh says what is in whose place.
//
// A tile of the mask lies (queries, keys), as TMA brings it: a panel for each consumer's 64 keys. Scores lie (keys,
// queries). So it is read as transposed matrices of 8 queries and 8 keys, of which a lane gets two queries of one key,
// those of its scores. The rows of a matrix are 8 queries at the same 16 bytes of keys, which the swizzle puts into
// banks of their own.
//
// P = exp(S - base - rest), and S is never above base: portable/rest.cuh says why.
#pragma once
#include "hopper/backward/weigher.cuh"
#include "hopper/bias.cuh"

struct BiasedWeigher : Weigher {
    u32 of_rows[BLOCK_N / 16][4];  // BIAS_OF_ROWS: pairs of queries, in the order of packed weights
    float of_keys[2];              // BIAS_OF_ALL: of the thread's two keys

    DEVICE BiasedWeigher(const Arguments& a, const Keys& block, int index) : Weigher(a, block, index) {}

    // What of the mask is asked for before a product is waited for; behind a softcap a tile's would spill.
    static constexpr bool EARLY = !SOFTCAP || BIAS == BIAS_OF_ALL;

    // The thread's numbers of the mask, of which `tile` is this consumer's panel, or null.
    DEVICE void fetch(const Queries& step, const T* tile) {
        const int lane = thread_index() % 32;
        if (BIAS == BIAS_OF_ROWS) {
            const int row = lane / 16 * 8 + lane % 8, chunk = thread_index() % 128 / 32 * 2 + lane / 8 % 2;
            const T* const from = tile + row * PANEL + (chunk ^ lane % 8) * 8;
            UNROLL for (int k = 0; k < BLOCK_N / 16; k++) load_matrices_transposed(of_rows[k], from + k * 16 * PANEL);
        }
        if (BIAS == BIAS_OF_ALL) {
            const T* const row =
                reinterpret_cast<const T*>(a.mask.at) + block.batch * a.mask.batch + step.head * a.mask.head;
            UNROLL for (int m = 0; m < 2; m++) {
                const int key = smaller(block.first + 64 * index + row_of(m), a.keys - 1);
                of_keys[m] = widen(row[key * a.mask.column]);
            }
        }
    }
    // That of the element 4 c + 2 m + e.
    DEVICE float bias(int c, int m, int e) const {
        if (BIAS == BIAS_OF_ALL) return of_keys[m];
        return widen(T{u16(of_rows[c / 2][c % 2 * 2 + m] >> 16 * e)});
    }
    // `weigh`; `rest(c)` is of columns 8 c on. What positions hide is hidden where the mask is inf, too.
    template <int COUNT, class Base, class Rest>
    DEVICE void weigh_biased(float (&scores)[COUNT], u32 (&packed)[COUNT / 8][4], const Queries& step, Base base,
                             Rest rest, const T* tile) {
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor));
        if (!EARLY) fetch(step, tile);
        if (!SOFTCAP)
            each<COUNT>([&](int n, float bias) { scores[n] = multiply_add(scores[n], float(a.factor), bias); });
        hide(scores, step, -INFINITE);
        UNROLL for (int c = 0; c < COUNT / 4; c++) {
            const Pair bases = base(c), rests = rest(c);
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) {
                    float s = SOFTCAP ? multiply_add(score[e], float(a.cap), bias(c, m, e)) : score[e];
                    if (SOFTCAP && BIAS == BIAS_OF_ROWS && score[e] == -INFINITE) s = -INFINITE;
                    const float below = largest(bases.at[e] - s, 0.0f);
                    weight[e] = power(multiply_add(below, -UNIT, -rests.at[e]));
                    if (SOFTCAP && BIAS == BIAS_OF_ALL && score[e] == -INFINITE) weight[e] = 0;  // by s, it spills
                }
                if (SOFTCAP) packed[c / 2][c % 2 * 2 + m] = packed_pair(weight, c, m);
                UNROLL for (int e = 0; e < 2; e++) {
                    const float tanh = larger(score[e], -1);
                    score[e] = SOFTCAP ? weight[e] * multiply_add(-tanh, tanh, 1) : weight[e];
                }
            }
        }
    }
    // Takes out what the mask hides and what is no number there: S or dP may have overflowed. Few tiles have any, and
    // only those are gone over again.
    template <int COUNT>
    DEVICE void mend(float (&gradients)[COUNT], float (&weighed)[COUNT], u32 (&packed)[COUNT / 8][4],
                     const Queries& step, const T* tile) {
        bool numbers = true;
        UNROLL for (int n = 0; n < COUNT; n++) numbers &= gradients[n] == gradients[n];
        if (all_of_warp(numbers)) return;
        fetch(step, tile);
        each<COUNT>([&](int n, float bias) {
            if (bias != -INFINITE) return;
            gradients[n] = 0, weighed[n] = 0;
            if (SOFTCAP) packed[n / 8][n % 8 / 2] &= n % 2 ? 0x0000ffff : 0xffff0000;
        });
    }

private:
    template <int COUNT, class Use> DEVICE void each(Use use) const {
        UNROLL for (int n = 0; n < COUNT; n++) use(n, bias(n / 4, n / 2 % 2, n % 2));
    }
};
