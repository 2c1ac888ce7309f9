// The instructions of hopper/instructions.cuh on a CPU.
#pragma once
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
    for (Named& b : named) b.here = 0, b.arrived.forget();
    for (Products& each : products) {
        for (Sums* sums : each.sums) delete sums;
        each = Products();
    }
}
inline void end_asynchronous() {
    if (!boxes.empty()) fail("copies were still under way at the end of a block");
    for (const Additions& each : additions)
        if (!each.under_way.empty()) fail("additions were still under way at the end of a block");
    for (const Products& each : products)
        if (!each.under_way.empty()) fail("products were still under way at the end of a block");
}

inline const bool asynchronous = [] {
    machine.begin = begin_asynchronous, machine.end = end_asynchronous, machine.deliver = deliver;
    return true;
}();

}  // namespace emulator
