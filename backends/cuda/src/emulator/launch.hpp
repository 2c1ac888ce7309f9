// The entry by which emulator.py launches the kernel ENTRY.
#pragma once
#include <utility>

#include "emulator/primitives.hpp"

namespace emulator {

inline void* const* given;  // where each parameter lies

template <class... P, size_t... N> void call(void (*kernel)(P...), std::index_sequence<N...>) {
    kernel(*static_cast<const std::remove_reference_t<P>*>(given[N])...);
}
template <class... P> void call(void (*kernel)(P...)) { call(kernel, std::index_sequence_for<P...>()); }

}  // namespace emulator

// Runs `blocks` blocks, and returns what went wrong, or null.
EXPORTED const char* emulate(void* const* parameters, u32 blocks, int threads, size_t shared_bytes) {
    using namespace emulator;
    if (threads > THREADS) return "more threads than the kernel was compiled for";
    given = parameters;
    make_fibers(threads);
    machine.kernel = [] { call(ENTRY); };
    machine.barrier = [] { share(0, machine.threads); };
    machine.blocks = blocks;
    for (u32 n = 0; n < blocks && !machine.error[0]; n++) {
        machine.block = n;
        poison(shared_bytes);
        begin_clocks();
        machine.begin();
        for (int k = 0; k < threads; k++) copies[k].count = 0;
        run_block();
        if (!machine.error[0]) machine.end();
    }
    return machine.error[0] ? machine.error : nullptr;
}
