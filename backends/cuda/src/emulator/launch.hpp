// The entry by which emulator.py launches the kernel ENTRY.
#pragma once
#include <utility>

#include "emulator/residents.hpp"

namespace emulator {

inline void* const* given;  // where each parameter lies

template <class... P, size_t... N> void call(void (*kernel)(P...), std::index_sequence<N...>) {
    kernel(*static_cast<const std::remove_reference_t<P>*>(given[N])...);
}
template <class... P> void call(void (*kernel)(P...)) { call(kernel, std::index_sequence_for<P...>()); }

}  // namespace emulator

// Runs `blocks` blocks, `residents` of them side by side where the kernel is one of Hopper's asynchronous ones, and
// returns what went wrong, or null.
EXPORTED const char* emulate(void* const* parameters, u32 blocks, int threads, size_t shared_bytes, int residents,
                             u32 seed) {
    using namespace emulator;
    if (threads > THREADS) return "more threads than the kernel was compiled for";
    given = parameters;
    make_fibers(threads);
    machine.kernel = [] { call(ENTRY); };
    machine.barrier = [] { share(0, machine.threads); };
    machine.blocks = blocks, machine.seed = seed;
    const auto begin = [=](u32 block) {
        machine.block = block;
        poison(shared_bytes);
        begin_clocks();
        machine.begin();
        for (int k = 0; k < threads; k++) copies[k].count = 0;
        begin_block();
    };
    const bool apart = residents <= 1 || !machine.exchange;
    if (!apart) run_side_by_side(residents, begin);
    for (u32 n = 0; apart && n < blocks && !machine.error[0]; n++) {
        begin(n);
        run_block();
        if (!machine.error[0]) machine.end();
    }
    return machine.error[0] ? machine.error : nullptr;
}
