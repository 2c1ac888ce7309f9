// Blocks side by side, as SMs have them: which of them goes on, and how far, is left to chance.
//
// What a block has to itself is set aside while others run. Blocks begin in their order on the grid.
#pragma once
#include <memory>

#include "emulator/primitives.hpp"

namespace emulator {

struct Resident {
    Fiber* fibers = nullptr;
    unsigned block = 0, random = 0;
    Clock clocks[THREADS];
    Shared shared = {};
    bool ended = true, stuck = false;
};

// The machine's block with what was set aside of a resident, or the other way round.
inline void exchange(Resident& its, int number) {
    std::swap(machine.fibers, its.fibers), std::swap(machine.block, its.block), std::swap(machine.random, its.random);
    std::swap(clocks, its.clocks), std::swap(shared, its.shared);
    machine.exchange(number);
}

constexpr int MOST_ROUNDS = 64;  // without another block

// `begin` makes the machine's block that of a number on the grid.
template <class Begin> void run_side_by_side(int count, Begin begin) {
    static std::vector<std::unique_ptr<Resident>> residents;
    while (int(residents.size()) < count) residents.emplace_back(new Resident());
    unsigned next = 0, random = machine.seed;
    const auto draw = [&](int most) {
        random = random * 1664525 + 1013904223;
        return int((random >> 8) % most);
    };
    const int threads = machine.threads;
    for (int live = 0;;) {
        for (int n = 0; n < count && next < machine.blocks; n++) {
            Resident& its = *residents[n];
            if (!its.ended) continue;
            exchange(its, n);
            make_fibers(threads);
            begin(next++);
            exchange(its, n);
            its.ended = its.stuck = false, live++;
        }
        if (!live) return;
        const int number = draw(count);
        Resident& its = *residents[number];
        if (its.ended) continue;
        exchange(its, number);
        Came came = Came::on;
        for (int round = draw(MOST_ROUNDS); round >= 0 && came == Came::on; round--) {
            came = run_round();
            if (came != Came::nowhere)
                for (auto& each : residents) each->stuck = false;
        }
        its.stuck = came == Came::nowhere;
        if (came == Came::to_end && !machine.error[0]) machine.end();
        bool all = its.stuck;
        for (int n = 0; n < count; n++) all &= residents[n]->ended || residents[n]->stuck;
        if (all) fail("each block waits for a barrier that some threads never reach, or a number that no block has left");
        if (came == Came::to_end) its.ended = true, live--;
        exchange(its, number);
        if (machine.error[0]) return residents.clear();
    }
}

}  // namespace emulator
