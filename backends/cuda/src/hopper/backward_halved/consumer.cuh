// A warpgroup that computes: 64 keys against tiles of queries, half a tile at a time.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; columns of dQ; P^T and dS^T in 16 bits; and,
// from beginning to end, dK and dV. Invariants: left operands in registers are written, and turns of the loop end, when no
// product is under way. Every tile of the block is waited for and freed, also one that these keys are not seen by.
//
// A tile of dS^T is written over without asking whether it is still read. Who writes one has waited for the other one to
// be written by all, and they did that after they were done with this one.
#pragma once
#include "hopper/backward/columns.cuh"
#include "hopper/backward/loader.cuh"
#include "hopper/backward/results.cuh"

constexpr int HALF = BLOCK_N / 2;
constexpr int PIECES = 3, PIECE = MINE / PIECES;  // of a consumer's columns of dQ

struct Consumer {
    Shared& shared;
    const Arguments& a;
    const int index;
    const float factor = SOFTCAP ? float(a.cap) * UNIT : float(a.factor);
    u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Position<STAGES> at;
    Position<2> written_at;         // the tile of dS^T that is made
    Position<2> read_at = {1, 1};   // and the one before: of the first step, a use that never was
    float scores[HALF / 2], score_gradients[HALF / 2];
    u32 weights[HALF / 16][4], inner[HALF / 16][4];
    u32 shown;  // MASKED: what the mask shows the thread's columns, 16 bits for each of its rows
    float query_sums[PIECE / 2];
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    static DEVICE int lane() { return thread_index() % 32; }
    static DEVICE int warp() { return thread_index() % 128 / 32; }
    // What all lanes have read, or written.
    static DEVICE void release(Barrier& barrier) {
        warp_barrier();
        if (lane() == 0) barrier.arrive();
    }
    // Has addresses worked out again that would be kept from turn to turn in more registers than there are.
    DEVICE void forget_addresses() { origin = broadcast(origin); }
    DEVICE Matrix matrix(u32 place) const { return Matrix(origin + place); }

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) visit(block, step);
        store_gradient(a, block, block.first + 64 * index, key_sums, OF_KEY);
        store_gradient(a, block, block.first + 64 * index, value_sums, OF_VALUE);
    }
    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        int before = -1;  // the tile of dQ that the step before adds to
        ask_scores<0>();
        look(block, step);
        wait_products<0>();
        make_weights<0>(block, step);
        if (!SOFTCAP) pack(weights, scores);
        for (;;) {
            forget_addresses();
            differentiate<0>(block, step);
            ask_scores<1>();
            leave<0>();
            ask_query_sums(1);
            wait_products<0>();
            got_query_sums(before, 1);
            ask_query_sums(2);
            if (SOFTCAP) wait_products<0>(), got_query_sums(before, 2);
            make_weights<1>(block, step);
            if (!SOFTCAP) wait_products<0>(), got_query_sums(before, 2), pack(weights, scores);

            forget_addresses();
            differentiate<1>(block, step);
            const int tile = before = tile_of(block, step);
            at.next(), step.next();
            if (!step.more()) break;
            ask_scores<0>();
            leave<1>();
            look(block, step);
            ask_query_sums(0);
            wait_products<2>();
            if (SOFTCAP) got_step(tile);
            make_weights<0>(block, step);
            if (!SOFTCAP) got_step(tile), pack(weights, scores);
        }
        leave<1>();
        UNROLL for (int n = 0; n < PIECES; n++) {
            ask_query_sums(n);
            wait_products<0>();
            got_query_sums(before, n);
        }
        if (lane() == 0) wait_additions();
    }

    // -- parts of a step ------------------------------------------------------------------------------------------

    // Keys, where those past the end of a sequence may be NaN, which a weight of 0 does not take away.
    DEVICE void begin(const Keys& block) {
        shared.key_full.wait(0);
        shared.value_full.wait(0);
        if (!a.length_bytes || block.extent.end >= block.first + BLOCK_M) return;
        const int there = smaller(larger(block.extent.end - block.first - 64 * index, 0), 64);
        clear_rows<64, BLOCK_D>(shared.key[index], there);
        meet_at(1, 128 * CONSUMERS);
    }
    DEVICE int before_at() const { return at.stage ? at.stage - 1 : STAGES - 1; }
    // Where half a tile of queries, or of their upstream gradients, begins.
    static DEVICE u32 half_place(int half) { return Shared::place(half * HALF * PANEL); }

    template <int PART> DEVICE void ask_scores() {
        if (PART == 0) shared.query_full[at.stage].wait(at.parity);
        const Matrix queries = matrix(Shared::query_place(at.stage) + half_place(PART));
        begin_products();
        product_nt<HALF, BLOCK_D, BLOCK_N>(scores, matrix(Shared::key_place(index)), queries);
        commit_products();
    }
    // Of dQ, that a step adds to.
    DEVICE int tile_of(const Keys& block, const Step& step) const {
        return (block.batch * a.heads + step.head) * (a.padded / BLOCK_N) + step.start / BLOCK_N;
    }
    // What a half leaves: dS^T to the other consumer, and to dK. After the second, its step is over, and all of dS^T there.
    template <int PART> DEVICE void leave() {
        leave_gradients(PART);
        const int stage = PART ? before_at() : at.stage;
        begin_products();
        product_nn<BLOCK_D, HALF, BLOCK_N>(key_sums, inner, matrix(Shared::query_place(stage) + half_place(PART)));
        commit_products();
        if (PART == 0) return;
        show_writes();
        release(shared.written[written_at.stage]);
        written_at.next(), read_at.next();
        shared.written[read_at.stage].wait(read_at.parity);
    }
    // Columns of dQ of the step that was left. Before the first is left, that is of nothing, and goes nowhere.
    DEVICE void ask_query_sums(int n) {
        const int tile = read_at.stage, piece = PIECES * index + n;
        const u32 columns = Shared::place(piece / 2 * 64 * PANEL + piece % 2 * PIECE);
        begin_products();
        product_tn<PIECE, 64, false>(query_sums, matrix(Shared::gradient_place(tile, 0)),
                                     matrix(Shared::key_place(0) + columns));
        product_tn<PIECE, 64, true>(query_sums, matrix(Shared::gradient_place(tile, 1)),
                                    matrix(Shared::key_place(1) + columns));
        commit_products();
    }
    DEVICE void got_query_sums(int tile, int n) {
        hold(query_sums), hold(key_sums), hold(inner);
        if (tile >= 0) add_query_sums(tile, (PIECES * index + n) * PIECE / 8);
    }
    DEVICE void got_step(int tile) {
        wait_products<0>();
        release(shared.query_free[before_at()]);
        got_query_sums(tile, 0);
    }
    // Through shared memory, since a thread that added it would have to wait for the L2.
    DEVICE void add_query_sums(int tile, int first) {
        float* const staged = shared.sums[index][warp()];
        if (lane() == 0) wait_additions();
        warp_barrier();
        UNROLL for (int c = 0; c < PIECE / 8; c++) {
            const float* const x = query_sums + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(staged + c * QUADS + 4 * lane()),
                         Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
        show_writes();
        warp_barrier();
        if (lane() || !a.grad_query) return;
        add_floats(quads_of(sums_of(a.sums, tile), first), staged, PIECE / 8 * QUADS);
        commit_additions();
    }
    // What the mask shows, asked for before a product is waited for.
    DEVICE void look(const Keys& block, const Step& step) {
        if (!MASKED || !step.mixed) return;
        const int plane = mask_plane(a, block.batch, step.head), at = lane() / 8 * 4 + lane() / 4 % 2;
        shown = 0;
        UNROLL for (int n = 0; n < BLOCK_N / 4; n++) {
            const int query = step.start + n / 2 * 8 + first_column() + n % 2;
            const u32 bits = mask_row<BLOCK_M>(a, plane, block.first / BLOCK_M, query)[4 * index + warp()] >> at;
            shown |= (bits & 1) << n | (bits >> 2 & 1) << (n + 16);
        }
    }
    // Takes out what the thread's keys are not seen by.
    DEVICE void hide(int part, const Keys& block, const Step& step, float instead) {
        if (block.reach.hides(step.start))
            ::hide(scores, step.start + part * HALF, [&](int m) {
                const int key = block.first + 64 * index + row_of(m);
                return key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        const u32 here = shown >> part * HALF / 4;
        UNROLL for (int n = 0; n < HALF / 2; n++)
            if (!(here >> (n / 4 * 2 + n % 2 + n / 2 % 2 * 16) & 1)) scores[n] = instead;
    }
    // P^T from S^T, in its place. Behind a softcap P^T is packed, and in its place is what the tanh leaves of it.
    template <int PART> DEVICE void make_weights(const Keys& block, const Step& step) {
        Pair base[HALF / 8];
        numbers(base, shared.base[at.stage] + PART * HALF);
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor)), hide(PART, block, step, -INFINITE);
        UNROLL for (int c = 0; c < HALF / 8; c++)
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) {
                    weight[e] = power(multiply_add(score[e], factor, -base[c].at[e]));
                    if (SOFTCAP && score[e] == -INFINITE) weight[e] = unseen();
                }
                if (SOFTCAP) weights[c / 2][c % 2 * 2 + m] = pack_pair<T>(weight[0], weight[1]);
                UNROLL for (int e = 0; e < 2; e++)
                    score[e] = !SOFTCAP || score[e] == -INFINITE ? weight[e]
                                                                : weight[e] * multiply_add(-score[e], score[e], 1);
            }
        if (!SOFTCAP) hide(PART, block, step, unseen());
    }
    // dV, and dS^T in 16 bits.
    template <int PART> DEVICE void differentiate(const Keys& block, const Step& step) {
        const Matrix upstream = matrix(Shared::grad_out_place(at.stage) + half_place(PART));
        if (PART == 0) shared.grad_out_full[at.stage].wait(at.parity);
        Pair delta[HALF / 8];
        numbers(delta, shared.delta[at.stage] + PART * HALF);
        begin_products();
        product_nt<HALF, BLOCK_DV, BLOCK_N>(score_gradients, matrix(Shared::value_place(index)), upstream);
        commit_products();
        product_nn<BLOCK_DV, HALF, BLOCK_N>(value_sums, weights, upstream);
        commit_products();
        wait_products<1>();
        hold(score_gradients);
        const bool hidden = block.reach.hides(step.start) || (MASKED && step.mixed);
        UNROLL for (int n = 0; n < HALF / 2; n++) {
            float& x = score_gradients[n];
            x = scores[n] * (x - delta[n / 4].at[n % 2]);
            if (hidden && is_unseen(scores[n])) x = 0;  // 0 times what overflows is NaN
        }
        wait_products<0>();
        hold(value_sums), hold(weights);
        if (PART == 1) release(shared.grad_out_free[at.stage]);
        pack(inner, score_gradients);
    }
    // dS^T to shared memory, swizzled as TMA would have brought it.
    DEVICE void leave_gradients(int part) {
        const int row = warp() * 16 + lane() % 16;
        T* const to = shared.gradients[written_at.stage][index] + row * PANEL;
        UNROLL for (int k = 0; k < HALF / 16; k++)
            store_matrices(to + ((part * HALF / 8 + 2 * k + lane() / 16) ^ row % 8) * 8, inner[k]);
    }
};
