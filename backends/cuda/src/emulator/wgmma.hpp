// Products of a warpgroup on a CPU, as late as they may come: when they are waited for.
//
// A warp has a quarter of the product's rows, and is emulated by itself. Until they are waited for, sums hold NaN, and
// it is an error to write them, or left operands in registers: those until no product at all is under way, since ptxas
// before 13.3 does not keep them apart otherwise. Operands in shared memory are read at the end, and count as read
// until then.
#pragma once
#include "emulator/tma.hpp"

namespace emulator {

enum class Form { nt, tn, nn };  // as hopper/instructions.cuh has them

// The registers of a warp that products add to.
struct Sums {
    float* at[WARP];
    int count, products;  // numbers of a lane; products that are under way
    std::vector<float> kept;
};
struct Left {
    const u32* at[WARP];
    u32 kept[WARP][4];
};
struct Product {
    Form form;
    bool keep, in_registers;  // the left operand
    int columns, group;
    u64 a, b;  // descriptors
    Left left;
    Sums* sums;
};

struct Products {
    std::vector<Product> under_way;
    std::vector<Sums*> sums;
    std::vector<Left> lefts;
    int committed, over;  // groups
    bool begun;
};

inline Products products[WARPS];

// One lane's part of an instruction.
struct Asked {
    Form form;
    bool keep;
    int columns;
    float* sums;
    const u32* left;  // null where it is in shared memory
    u64 a, b;
};

// Whether the 16 that are summed over lie side by side in the left operand, or in the right one.
inline bool along(Form form, bool left) { return form == Form::nt || (form == Form::nn && left); }

// Where element (row, k) of a matrix is: `side_by_side` says that k's neighbours lie side by side, else the row's.
inline u32 element(u64 descriptor, bool side_by_side, int row, int k) {
    const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const u32 stride = (descriptor >> 32 & 0x3fff) << 4;
    const u32 offset = side_by_side ? row / 8 * stride + row % 8 * ROW_BYTES + k * 2
                             : row / COLUMNS * leading + k / 8 * stride + k % 8 * ROW_BYTES + row % COLUMNS * 2;
    return swizzled(start + offset);
}

inline float number(u32 at) {
    T value;
    memcpy(&value, shared.memory + at, 2);
    return widen(T(value));
}

constexpr u32 BLANK_SUM = 0xffffffffu;

inline bool blank(const Sums& sums) {
    for (int lane = 0; lane < WARP; lane++)
        for (int n = 0; n < sums.count; n++)
            if (float_bits(sums.at[lane][n]) != BLANK_SUM) return false;
    return true;
}

inline void ask(int warp, void** all) {
    const Asked* lanes[WARP];
    for (int n = 0; n < WARP; n++) lanes[n] = static_cast<Asked*>(all[n]);
    const Asked& first = *lanes[0];
    Products& mine = products[warp];
    if (!mine.begun) return fail("products were asked for with no wgmma.fence since the last were waited for");
    Product product = {first.form, first.keep, first.left != nullptr, first.columns,
                       mine.committed + 1, first.a, first.b};

    const Visit visit = {{OF_PRODUCTS + warp, unsigned(product.group)}, clocks[warp * WARP], false, true};
    for (int k = 0; k < 16; k++) {
        for (int row = warp % 4 * 16; row < warp % 4 * 16 + 16 && !first.left; row++)
            if (!touch(shared.memory + element(first.a, along(first.form, true), row, k), 2, visit)) return;
        for (int row = 0; row < first.columns; row++)
            if (!touch(shared.memory + element(first.b, along(first.form, false), row, k), 2, visit)) return;
    }
    if (first.left) {
        for (int n = 0; n < WARP; n++) {
            product.left.at[n] = lanes[n]->left;
            memcpy(product.left.kept[n], lanes[n]->left, sizeof product.left.kept[n]);
        }
        mine.lefts.push_back(product.left);
    }
    for (Sums* sums : mine.sums)
        if (sums->at[0] == first.sums) product.sums = sums;
    if (!product.sums) {
        Sums* const sums = product.sums = new Sums;
        sums->count = first.columns / 2, sums->products = 0;
        sums->kept.resize(WARP * sums->count);
        for (int n = 0; n < WARP; n++) {
            sums->at[n] = lanes[n]->sums;
            memcpy(&sums->kept[n * sums->count], lanes[n]->sums, sums->count * sizeof(float));
            memset(lanes[n]->sums, 0xff, sums->count * sizeof(float));
        }
        mine.sums.push_back(sums);
    } else if (!blank(*product.sums)) {
        return fail("sums of a product under way were written");
    }
    product.sums->products++;
    mine.under_way.push_back(product);
}

inline void multiply(int warp, const Product& p) {
    static float a[16][16], b[256][16];
    for (int k = 0; k < 16; k++) {
        for (int row = 0; row < 16; row++) {
            const int lane = row % 8 * 4 + k % 8 / 2, n = warp % 4 * 16 + row;
            a[row][k] = p.in_registers ? half_of<T>(p.left.kept[lane][row / 8 + k / 8 * 2], k % 2)
                                       : number(element(p.a, along(p.form, true), n, k));
        }
        for (int row = 0; row < p.columns; row++) b[row][k] = number(element(p.b, along(p.form, false), row, k));
    }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < p.columns; column++) {
            const int lane = row % 8 * 4 + column % 8 / 2, n = 4 * (column / 8) + 2 * (row / 8) + column % 2;
            float& at = p.sums->kept[lane * p.sums->count + n];
            double sum = p.keep ? at : 0;
            for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[column][k];
            at = float(sum);
        }
}

// Ends all but the last groups.
inline void end_products(int warp, int pending) {
    Products& mine = products[warp];
    mine.over = mine.committed - pending > mine.over ? mine.committed - pending : mine.over;
    size_t left = 0;
    for (const Product& product : mine.under_way) {
        if (product.group > mine.over) {
            mine.under_way[left++] = product;
            continue;
        }
        mine.begun = false;
        multiply(warp, product);
        product.sums->products--;
    }
    mine.under_way.resize(left);
    left = 0;
    for (Sums* sums : mine.sums) {
        if (sums->products) {
            mine.sums[left++] = sums;
            continue;
        }
        if (!blank(*sums)) return fail("sums of a product under way were written");
        for (int n = 0; n < WARP; n++) memcpy(sums->at[n], &sums->kept[n * sums->count], sums->count * sizeof(float));
        delete sums;
    }
    mine.sums.resize(left);
    for (int n = 0; n < WARP; n++) {
        unsigned& known = clocks[warp * WARP + n].at[OF_PRODUCTS + warp];
        known = known < unsigned(mine.over) ? mine.over : known;
    }
    if (!mine.under_way.empty()) return;
    for (const Left& operand : mine.lefts)
        for (int n = 0; n < WARP; n++)
            if (memcmp(operand.at[n], operand.kept[n], sizeof operand.kept[n]))
                return fail("a left operand in registers was written while products were under way");
    mine.lefts.clear();
}

}  // namespace emulator

template <int COUNT> DEVICE void hold(float (&)[COUNT]) {}
template <int COUNT> DEVICE void hold(u32 (&)[COUNT][4]) {}

DEVICE void begin_products() {
    emulator::together([](void**) { emulator::products[emulator::machine.current / 32].begun = true; }, nullptr);
}
DEVICE void commit_products() {
    emulator::together([](void**) { emulator::products[emulator::machine.current / 32].committed++; }, nullptr);
}
template <int PENDING> DEVICE void wait_products() {
    emulator::together([](void**) { emulator::end_products(emulator::machine.current / 32, PENDING); }, nullptr);
}

template <int COLUMNS> struct Instruction {
    template <int KEEP> static DEVICE void nt(float (&d)[COLUMNS / 2], u64 a, u64 b) {
        ask({emulator::Form::nt, bool(KEEP), COLUMNS, d, nullptr, a, b});
    }
    template <int KEEP> static DEVICE void tn(float (&d)[COLUMNS / 2], u64 a, u64 b) {
        ask({emulator::Form::tn, bool(KEEP), COLUMNS, d, nullptr, a, b});
    }
    template <int KEEP> static DEVICE void nn(float (&d)[COLUMNS / 2], u64 a, u64 b) {
        ask({emulator::Form::nn, bool(KEEP), COLUMNS, d, nullptr, a, b});
    }
    static DEVICE void nn(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {
        ask({emulator::Form::nn, true, COLUMNS, d, a, 0, b});
    }
    static void ask(emulator::Asked asked) {
        emulator::together([](void** all) { emulator::ask(emulator::machine.current / 32, all); }, &asked);
    }
};
