// How a block of every backward begins and ends: the first warpgroup loads, one thread of it, and the others compute.
#pragma once
#include "hopper/backward/done.cuh"
#include "hopper/backward/loader.cuh"

constexpr int LOADER_REGISTERS = 24, COMPUTING_REGISTERS = 240;
static_assert(COMPUTING % 4 == 0, "warps of whole warpgroups");
// What a block has, summed over a lane of each warpgroup: all lanes are given as many, a multiple of eight.
constexpr int BLOCK_REGISTERS = 65536 / (32 * WARPS) / 8 * 8 * (WARPS / 4);
static_assert(LOADER_REGISTERS + COMPUTING / 4 * COMPUTING_REGISTERS <= BLOCK_REGISTERS, "registers for all");

// `compute` is told the number of its warpgroup. `beside` is for threads of the first one that load nothing.
template <class Shared, class Step, class Compute, class Beside>
DEVICE void share_work(const Arguments& a, const Maps& maps, Compute compute, Beside beside) {
    let_next_begin();
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    if (thread_index() == 0) {
        prefetch(maps.queries), prefetch(maps.keys), prefetch(maps.values), prefetch(maps.upstream);
        init_barriers(shared);
    }
    barrier();
    const int group = broadcast(thread_index() / 128);  // as the compiler knows to be all lanes'
    if (group == 0) {
        give_registers<LOADER_REGISTERS>();
        if (broadcast(thread_index() / 32)) {  // as well
            beside(shared);
            count_done(a, shared);
        } else if (thread_index() == 0)
            Loader<Shared, Step>{a, shared, maps}.run();
    } else {
        take_registers<COMPUTING_REGISTERS>();
        compute(shared, group - 1);
    }
}
template <class Shared, class Step, class Compute>
DEVICE void share_work(const Arguments& a, const Maps& maps, Compute compute) {
    share_work<Shared, Step>(a, maps, compute, [](Shared&) {});
}
