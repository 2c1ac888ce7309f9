// The instructions of hopper/instructions.cuh on a CPU.
#pragma once
#include <memory>

#include "emulator/wgmma.hpp"

#define CONSTANT const

template <int COUNT> DEVICE void give_registers() {}
template <int COUNT> DEVICE void take_registers() {}

struct Stored {
    u8* row;
    const u32* from;
};

DEVICE void store_matrices(void* row, const u32 (&from)[4]) {
    Stored mine = {static_cast<u8*>(row), from};
    emulator::together(
        [](void** all) {
            for (int n = 0; n < 32; n++)
                for (int matrix = 0; matrix < 4; matrix++) {
                    const int names = 8 * matrix + n / 4;  // the lane that names the row
                    u8* const to = static_cast<Stored*>(all[names])->row + 4 * (n % 4);
                    if (!emulator::touch(to, 4, true, emulator::machine.current / 32 * 32 + names)) return;
                    memcpy(to, &static_cast<Stored*>(all[n])->from[matrix], 4);
                }
        },
        &mine);
}

namespace emulator {

inline void begin_asynchronous() {
    mbarriers_made = 0;
    boxes.clear();
    for (Additions& each : additions) each = Additions();
    for (Named& b : named) b.here = 0, b.arrived.forget(), b.passed.forget();
    for (Products& each : products) {
        for (Sums* sums : each.sums) delete sums;
        each = Products();
    }
}
inline void end_asynchronous() {
    if (!boxes.empty()) fail("copies were still under way at the end of a block");
    for (Additions& each : additions) {
        for (const Addition& addition : each.under_way)
            if (addition.read.empty()) return fail("additions were still under way at the end of a block");
        each.finish();
    }
    for (const Products& each : products)
        if (!each.under_way.empty()) fail("products were still under way at the end of a block");
}

// What a block has of it while others run.
struct Asynchronous {
    Mbarrier mbarriers[BARRIERS];
    int made = 0;
    Named named[16];
    std::vector<Box> boxes;
    Additions additions[WARPS];
    Products products[WARPS];
};

inline void exchange_asynchronous(int resident) {
    static std::vector<std::unique_ptr<Asynchronous>> aside;
    while (int(aside.size()) <= resident) aside.emplace_back(new Asynchronous());
    Asynchronous& its = *aside[resident];
    std::swap(mbarriers, its.mbarriers), std::swap(mbarriers_made, its.made), std::swap(named, its.named);
    std::swap(boxes, its.boxes), std::swap(additions, its.additions), std::swap(products, its.products);
}

inline const bool asynchronous = [] {
    machine.begin = begin_asynchronous, machine.end = end_asynchronous, machine.deliver = deliver;
    machine.exchange = exchange_asynchronous;
    return true;
}();

}  // namespace emulator
