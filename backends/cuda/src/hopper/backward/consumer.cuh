// A warpgroup that computes: 64 keys against tiles of queries, as the loader brings them.
//
// Registers: S^T, in whose place come P^T and what dS^T is made of; dP^T; columns of dQ; P^T and dS^T in 16 bits; and,
// from beginning to end, dK and dV. Invariants: left operands in registers are written when no product is under way.
// Every tile of the block is waited for and freed, also one that these keys are not seen by.
//
// A tile of dS^T is written over without asking whether it is still read. It is read for dQ after all have `written`
// it, and each consumer is done with that before it has written the next one. There are two: who writes one again has
// waited for the other, and so for all who read the first.
#pragma once
#include "gradient_rows.cuh"
#include "hopper/backward/loader.cuh"
#include "hopper/backward/sums.cuh"
#include "hopper/store.cuh"

constexpr int NONE = -1;
enum { KEYS = 1, VALUES = 2 };  // KEPT

struct alignas(8) Pair {
    float at[2];
};

struct Consumer {
    Shared& shared;
    const Arguments& a;
    const int index;
    const float factor = SOFTCAP ? float(a.cap) * UNIT : float(a.factor);
    const u32 origin = shared_address(&shared) >> 4;  // in units of 16 bytes
    Position<STAGES> at;
    Position<GRADIENTS> written_at, read_at;
    Scores scores, score_gradients;
    Weights weights, inner;
    Pair of_columns[BLOCK_N / 8];
    u32 shown[BLOCK_N / 64];  // MASKED: what the mask shows the thread's columns, 16 bits for each of its rows
    u32 kept[BLOCK_D / 16][4];  // KEPT: keys or values, packed
    float query_sums[MINE / 2];
    float key_sums[BLOCK_D / 2], value_sums[BLOCK_DV / 2];

    static DEVICE void release(Barrier& free) {
        if (thread_index() % 32 == 0) free.arrive();
    }

    DEVICE void run() {
        const Keys block(a);
        Step step(a, block);
        UNROLL for (float& sum : key_sums) sum = 0;
        UNROLL for (float& sum : value_sums) sum = 0;
        if (step.more()) PHASED ? visit_in_phases(block, step) : visit(block, step);
        if (block.extent.end < block.first + BLOCK_M) clear_beyond(block, key_sums), clear_beyond(block, value_sums);
        store(block);
    }
    // A turn of the loop ends where no product is under way, in the middle of a step: more than one across the turn, the
    // compiler lets come one after another.
    DEVICE void visit(const Keys& block, Step& step) {
        begin(block);
        int tile = NONE;  // of dQ, that the step before adds to
        ask_scores();
        look(block, step);
        wait_products<0>();
        make_weights(block, step);
        if (!SOFTCAP) pack(weights, scores);
        for (;;) {
            differentiate(block, step);
            at.next();
            const int left = tile_of(block, step);
            step.next();
            if (!step.more()) {
                leave(tile, left);
                break;
            }
            ask_scores();
            leave(tile, left);
            look(block, step);
            wait_products<1>();
            ask_query_sums();
            if (SOFTCAP) got_sums(tile);  // first, for want of registers
            make_weights(block, step);
            if (!SOFTCAP) got_sums(tile), pack(weights, scores);
        }
        ask_query_sums();
        got_sums(tile);
        if (DIRECT) return;
        show_writes();
        warp_barrier();
        add_query_sums(tile);
        if (thread_index() % 32 == 0) wait_additions();
    }

    // PHASED: numbers and products of a step one after the other, so that one consumer's products are beside the numbers
    // of the other. dQ is a step behind, by which time the other one has left its dS. A turn begins with the scores.
    DEVICE void visit_in_phases(const Keys& block, Step& step) {
        begin(block);
        keep();
        int tile = NONE, tile_staged = NONE;  // of dQ, that the step before adds to
        leave_nothing();
        if (TURNS && index == CONSUMERS - 1) pass_turn(index);
        ask_scores();
        wait_products<0>();
        hold(scores);
        for (;;) {
            look_at_mask(block, step);
            ask_score_gradients();
            make_weights(block, step);
            if (EARLY) {
                if (!SOFTCAP) pack(weights, scores);
                ask_value_sums();
                wait_products<1>();
            } else {
                wait_products<0>();
            }
            derive(block, step);
            leave_in_phase();
            add_query_sums(tile_staged);
            const int now = tile_of(block, step);
            step.next();
            if (TURNS) await_turn(index);
            ask_key_sums();
            wait_products<0>();
            got_key_sums();
            at.next();
            if (!step.more()) {
                if (TURNS) pass_turn(index);
                end_query_sums(tile);
                end_query_sums(now);
                break;
            }
            ask_query_sums_of(read_at);
            ask_scores();
            if (TURNS) pass_turn(index);
            wait_products<1>();
            release_gradients();
            hand_over(tile);
            tile_staged = tile, tile = now;
            wait_products<0>();
            hold(scores);
        }
    }
    DEVICE void end_query_sums(int tile) {
        ask_query_sums_of(read_at);
        wait_products<0>();
        release_gradients();
        hand_over(tile);
        if (DIRECT) return;
        show_writes();
        warp_barrier();
        add_query_sums(tile);
        if (thread_index() % 32 == 0) wait_additions();
    }
    DEVICE void release_gradients() {
        release(shared.gradients_free[read_at.stage]);
        read_at.next();
    }
    DEVICE void keep() {
        if (!KEPT) return;
        const T* const from = KEPT == KEYS ? shared.key[index] : shared.value[index];
        UNROLL for (int k = 0; k < BLOCK_D / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) {
                const int row = row_of(r % 2), column = 16 * k % PANEL / 8 + r / 2;
                const T* const at = from + (16 * k / PANEL * 64 + row) * PANEL + (column ^ row % 8) * 8 + first_column();
                kept[k][r] = load_shared(reinterpret_cast<const u32*>(at));
            }
    }
    DEVICE void leave_nothing() {
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) inner[k][r] = 0;
        leave_in_phase();
    }
    DEVICE void leave_in_phase() {
        shared.gradients_free[written_at.stage].wait(written_at.parity ^ 1);
        leave_gradients();
        show_writes();
        warp_barrier();
        release(shared.written[written_at.stage]);
        written_at.next();
    }
    DEVICE void ask_score_gradients() {
        const Matrix values(origin + Shared::value_place(index)), upstream(origin + Shared::grad_out_place(at.stage));
        shared.grad_out_full[at.stage].wait(at.parity);
        begin_products();
        if (KEPT == VALUES)
            product_nt<BLOCK_N, BLOCK_DV>(score_gradients, kept, upstream);
        else
            product_nt<BLOCK_N, BLOCK_DV>(score_gradients, values, upstream);
        commit_products();
    }
    // P^T and dS^T in 16 bits.
    DEVICE void derive(const Keys& block, const Step& step) {
        hold(score_gradients);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Pair delta = number(shared.delta[at.stage], c);
            UNROLL for (int n = 4 * c; n < 4 * c + 4; n++)
                score_gradients[n] = scores[n] * (score_gradients[n] - delta.at[n % 2]);
        }
        hide(score_gradients, block, step, 0);  // 0 times what overflows is NaN
        if (EARLY) {
            wait_products<0>();
            hold(value_sums), hold(weights);
            release(shared.grad_out_free[at.stage]);
        }
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++) {  // side by side, so that a register comes free for each taken
            if (!SOFTCAP && !EARLY) pack(weights[k], scores + 8 * k);
            pack(inner[k], score_gradients + 8 * k);
        }
    }
    // EARLY: dV beside dS.
    DEVICE void ask_value_sums() {
        const Matrix upstream(origin + Shared::grad_out_place(at.stage));
        begin_products();
        product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, upstream);
        commit_products();
    }
    // dV and dK of a step.
    DEVICE void ask_key_sums() {
        const Matrix upstream(origin + Shared::grad_out_place(at.stage)), queries(origin + Shared::query_place(at.stage));
        begin_products();
        if (!EARLY) product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, upstream);
        product_nn<BLOCK_D, BLOCK_N>(key_sums, inner, queries);
        commit_products();
    }
    DEVICE void got_key_sums() {
        hold(value_sums), hold(key_sums), hold(weights), hold(inner);
        if (!EARLY) release(shared.grad_out_free[at.stage]);
        release(shared.query_free[at.stage]);
    }
    // dQ of the step before, to where it is added from: through shared memory, since a thread that adds it itself may have
    // to wait for the L2, or DIRECT.
    DEVICE void hand_over(int tile) {
        hold(query_sums);
        const int lane = thread_index() % 32;
        if (DIRECT) {
            if (tile == NONE || !a.grad_query) return;
            UNROLL for (int c = 0; c < MINE / 8; c++)
                add_quad(sums_at(tile) + c * QUADS + 4 * lane, query_sums + 4 * c);
            return;
        }
        if (lane == 0) wait_additions();
        warp_barrier();
        UNROLL for (int c = 0; c < MINE / 8; c++) {
            const float* const x = query_sums + 4 * c;
            store_shared(reinterpret_cast<Chunk<float>*>(staged() + c * QUADS + 4 * lane),
                         Chunk<float>{{x[0], x[1], x[2], x[3]}});
        }
    }
    // The warp's of dQ.
    DEVICE float* sums_at(int tile) const { return quads_of(sums_of(a.sums, tile), BY_QUERIES ? 0 : index * MINE / 8); }

    // -- parts of a step ------------------------------------------------------------------------------------------

    // Keys and values, where those past the end of a sequence may be NaN, which a weight of 0 does not take away.
    DEVICE void begin(const Keys& block) {
        shared.key_full.wait(0);
        shared.value_full.wait(0);
        if (!a.length_bytes || block.extent.end >= block.first + BLOCK_M) return;
        const int there = smaller(larger(block.extent.end - block.first - 64 * index, 0), 64);
        clear_rows<64, BLOCK_D>(shared.key[index], there);
        clear_rows<64, BLOCK_DV>(shared.value[index], there);
        meet_at(1, 128 * CONSUMERS);
    }
    DEVICE int before() const { return at.stage ? at.stage - 1 : STAGES - 1; }
    DEVICE void ask_scores() {
        const Matrix keys(origin + Shared::key_place(index)), queries(origin + Shared::query_place(at.stage));
        shared.query_full[at.stage].wait(at.parity);
        begin_products();
        if (KEPT == KEYS)
            product_nt<BLOCK_N, BLOCK_D>(scores, kept, queries);
        else
            product_nt<BLOCK_N, BLOCK_D>(scores, keys, queries);
        commit_products();
    }
    // Of dQ, that a step adds to.
    DEVICE int tile_of(const Keys& block, const Step& step) const {
        return (block.batch * a.heads + step.head) * (a.padded / 64) + step.start / 64 + (BY_QUERIES ? index : 0);
    }
    // What a step leaves: dS^T to the other consumer, and to dK; and what the one before left goes to dQ.
    DEVICE void leave(int& tile, int left) {
        leave_gradients();
        const Matrix queries(origin + Shared::query_place(before()));
        begin_products();
        product_nn<BLOCK_D, BLOCK_N>(key_sums, inner, queries);
        commit_products();
        show_writes();
        warp_barrier();
        release(shared.written[written_at.stage]);
        add_query_sums(tile);
        tile = left;
    }
    // This consumer's part of dQ, of the step that was left.
    DEVICE void ask_query_sums() {
        ask_query_sums_of(written_at);
        written_at.next();
    }
    DEVICE void ask_query_sums_of(const Position<GRADIENTS>& at) {
        const int tile = at.stage;
        const int first = BY_QUERIES ? 0 : index * MINE;
        const u32 columns = Shared::place(first / PANEL * 64 * PANEL + first % PANEL);
        const u32 rows = BY_QUERIES ? Shared::place(index * 64 * PANEL) : 0;
        const Matrix gradients[] = {Matrix(origin + Shared::gradient_place(tile, 0) + rows),
                                    Matrix(origin + Shared::gradient_place(tile, 1) + rows)};
        const Matrix keys[] = {Matrix(origin + Shared::key_place(0) + columns),
                               Matrix(origin + Shared::key_place(1) + columns)};
        shared.written[tile].wait(at.parity);
        begin_products();
        product_tn<MINE, 64, false>(query_sums, gradients[0], keys[0]);
        product_tn<MINE, 64, true>(query_sums, gradients[1], keys[1]);
        commit_products();
    }
    // dK and dQ of the step that was left.
    DEVICE void got_sums(int tile) {
        wait_products<0>();
        hold(query_sums), hold(key_sums), hold(inner);
        release(shared.query_free[before()]);
        hand_over(tile);
    }
    // Once it was shown.
    DEVICE void add_query_sums(int tile) {
        if (DIRECT || thread_index() % 32 || tile == NONE || !a.grad_query) return;
        add_floats(sums_at(tile), staged(), MINE / 8 * QUADS);
        commit_additions();
    }
    DEVICE float* staged() const { return shared.sums[index][thread_index() % 128 / 32]; }
    // Takes out what the thread's keys are not seen by.
    DEVICE void hide(Scores& tile, const Keys& block, const Step& step, float instead) const {
        if (block.reach.hides(step.start))
            ::hide(tile, step.start, [&](int m) {
                const int key = block.first + 64 * index + row_of(m);
                return key < a.keys ? queries_of(a, block.extent, key) : Span{0, 0};
            }, instead);
        if (!MASKED || !step.mixed) return;
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++)
            if (!(shown[n / 32] >> (n % 32 / 4 * 2 + n % 2 + n / 2 % 2 * 16) & 1)) tile[n] = instead;
    }
    // What is asked for before a product is waited for: base, and what the mask shows.
    DEVICE void look(const Keys& block, const Step& step) {
        numbers(shared.base[at.stage]);
        look_at_mask(block, step);
    }
    DEVICE void look_at_mask(const Keys& block, const Step& step) {
        if (!MASKED || !step.mixed) return;
        const int plane = mask_plane(a, block.batch, step.head), lane = thread_index() % 32;
        const int chunk = 4 * index + thread_index() % 128 / 32, at = lane / 8 * 4 + lane / 4 % 2;
        UNROLL for (u32& bits : shown) bits = 0;
        UNROLL for (int n = 0; n < BLOCK_N / 4; n++) {
            const int query = smaller(step.start + n / 2 * 8 + first_column() + n % 2, a.queries - 1);
            const u32 bits = mask_row<BLOCK_M>(a, plane, block.first / BLOCK_M, query)[chunk] >> at;
            shown[n / 16] |= (bits & 1) << n % 16 | (bits >> 2 & 1) << (n % 16 + 16);
        }
    }
    // The numbers of the thread's columns, asked for before a product is waited for.
    DEVICE void numbers(const float* from) {
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) of_columns[c] = number(from, c);
    }
    static DEVICE Pair number(const float* from, int c) {
        return load_shared(reinterpret_cast<const Pair*>(from + 8 * c + first_column()));
    }
    // P^T from S^T, in its place. Behind a softcap P^T is packed, and in its place is what the tanh leaves of it.
    DEVICE void make_weights(const Keys& block, const Step& step) {
        hold(scores);
        if (SOFTCAP) cap(scores, float(a.factor));
        hide(scores, block, step, -INFINITE);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Pair base = PHASED ? number(shared.base[at.stage], c) : of_columns[c];
            UNROLL for (int m = 0; m < 2; m++) {
                float* const score = scores + 4 * c + 2 * m;
                float weight[2];
                UNROLL for (int e = 0; e < 2; e++) weight[e] = power(multiply_add(score[e], factor, -base.at[e]));
                if (SOFTCAP) weights[c / 2][c % 2 * 2 + m] = pack_pair<T>(weight[0], weight[1]);
                UNROLL for (int e = 0; e < 2; e++) {
                    const float tanh = larger(score[e], -1);  // of what is hidden, -inf
                    score[e] = SOFTCAP ? weight[e] * multiply_add(-tanh, tanh, 1) : weight[e];
                }
            }
        }
    }
    // dV, and dS^T in 16 bits.
    DEVICE void differentiate(const Keys& block, const Step& step) {
        const Matrix values(origin + Shared::value_place(index)), upstream(origin + Shared::grad_out_place(at.stage));
        shared.grad_out_full[at.stage].wait(at.parity);
        if (BLOCK_D == PANEL) numbers(shared.delta[at.stage]);
        begin_products();
        product_nt<BLOCK_N, BLOCK_DV>(score_gradients, values, upstream);
        commit_products();
        product_nn<BLOCK_DV, BLOCK_N>(value_sums, weights, upstream);
        commit_products();
        wait_products<1>();
        hold(score_gradients);
        if (BLOCK_D != PANEL) numbers(shared.delta[at.stage]);
        UNROLL for (int c = 0; c < BLOCK_N / 8; c++) {
            const Pair delta = of_columns[c];
            UNROLL for (int m = 0; m < 2; m++)
                UNROLL for (int e = 0; e < 2; e++) {
                    const int n = 4 * c + 2 * m + e;
                    score_gradients[n] = scores[n] * (score_gradients[n] - delta.at[e]);
                }
        }
        hide(score_gradients, block, step, 0);  // 0 times what overflows is NaN
        wait_products<0>();
        hold(value_sums), hold(weights);
        release(shared.grad_out_free[at.stage]);
        pack(inner, score_gradients);
    }
    static DEVICE void pack(Weights& to, const Scores& from) {
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++) pack(to[k], from + 8 * k);
    }
    static DEVICE void pack(u32 (&to)[4], const float* from) {
        UNROLL for (int r = 0; r < 4; r++) to[r] = pack_pair<T>(from[2 * r], from[2 * r + 1]);
    }
    // dS^T to shared memory, swizzled as TMA would have brought it.
    DEVICE void leave_gradients() {
        const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane % 16;
        T* const to = shared.gradients[written_at.stage][index] + row * PANEL;
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++) {
            const int panel = 16 * k / PANEL, chunk = 2 * k % 8 + lane / 16;
            store_matrices(to + panel * 64 * PANEL + (chunk ^ row % 8) * 8, inner[k]);
        }
    }
    // Keys that are not there weigh 0, but 0 times NaN is NaN.
    template <int COUNT> DEVICE void clear_beyond(const Keys& block, float (&sums)[COUNT]) const {
        UNROLL for (int m = 0; m < 2; m++)
            if (block.first + 64 * index + row_of(m) >= block.extent.end)
                UNROLL for (int n = 0; n < COUNT; n++)
                    if (n / 2 % 2 == m) sums[n] = 0;
    }
    DEVICE void store(const Keys& block) {
        const int heads = a.heads / a.group, first = block.first + 64 * index;
        if (a.splits > 1) {
            const i64 tiles = ceil_div(a.keys, BLOCK_M) * CONSUMERS, all = i64(a.batch) * heads * tiles;
            const i64 line = (i64(block.batch) * heads + block.head_kv) * tiles + first / 64;
            leave_part(key_sums, sums_of(a.parts, 2 * all * block.split + line));
            leave_part(value_sums, sums_of(a.parts, 2 * all * block.split + all + line));
            return;
        }
        const float scale = a.scale;
        UNROLL for (int m = 0; m < 2; m++) {
            const int row = first + row_of(m);
            const auto to = [&](void* gradient, Gradient which, int dim) {
                const i64 line = gradient_row(a, which, block.batch, block.head_kv, row, heads, a.keys);
                return gradient && row < a.keys ? static_cast<T*>(gradient) + line * dim : nullptr;
            };
            store_row<BLOCK_D>(to(a.grad_key, OF_KEY, a.dim), key_sums, m, scale, a.dim);
            store_row<BLOCK_DV>(to(a.grad_value, OF_VALUE, a.dim_v), value_sums, m, 1, a.dim_v);
        }
    }
    template <int COUNT> static DEVICE void leave_part(const float (&sums)[COUNT], float* tile) {
        UNROLL for (int c = 0; c < COUNT / 4; c++)
            *reinterpret_cast<Chunk<float>*>(quad_of(tile, c)) =
                Chunk<float>{{sums[4 * c], sums[4 * c + 1], sums[4 * c + 2], sums[4 * c + 3]}};
    }
};
