// Barriers of some threads on a CPU: mbarriers, on which copies complete too, and those that are known by a number.
#pragma once
#include "emulator/shadow.hpp"

namespace emulator {

struct Mbarrier {
    int arrivals, each;  // that are still to come in this phase; in each phase
    int bytes;           // that copies are still to bring
    unsigned phases;     // that are over
    bool published;
    Moment made;
    Clock arrived, passed;  // what those know who came in this phase; and in all before
};

inline Mbarrier mbarriers[BARRIERS];
inline int mbarriers_made;

// In shared memory lies which one it is.
constexpr u64 MADE = 0x6d62617272696572;

inline Mbarrier& mbarrier(const u64* at) {
    static Mbarrier none;
    const u64 number = *at ^ MADE;
    if (number >= u64(mbarriers_made)) return fail("an mbarrier was not initialised"), none;
    Mbarrier& found = mbarriers[number];
    if (!clocks[machine.current].knows(found.made)) fail("an mbarrier was initialised with no barrier since");
    return found;
}

inline void end_phase(Mbarrier& b) {
    if (b.arrivals || b.bytes) return;
    b.arrivals = b.each;
    b.arrived.at[OF_COPIES + int(&b - mbarriers)] = ++b.phases;
    b.passed.learn(b.arrived);
}

inline void arrive(Mbarrier& b, int bytes) {
    if (b.arrivals == 0) return fail("more arrive at an mbarrier than it waits for");
    b.arrived.learn(clocks[machine.current]);
    step(machine.current);
    b.arrivals--, b.bytes += bytes;
    end_phase(b);
}

struct Named {
    int threads, here;
    unsigned rounds;
    Clock arrived, passed;
};

inline Named named[16];

inline Named& arrive(int number, int threads) {
    Named& b = named[number];
    if (b.here && b.threads != threads) fail("threads meet at a barrier in different numbers");
    b.threads = threads;
    b.arrived.learn(clocks[machine.current]);
    step(machine.current);
    if (++b.here == threads) b.here = 0, b.rounds++, b.passed.learn(b.arrived);
    return b;
}

}  // namespace emulator

DEVICE void init_barrier(u64* at, int arrivals) {
    using namespace emulator;
    touch(at, sizeof *at, true, machine.current);
    if (mbarriers_made == BARRIERS) return fail("more mbarriers than the emulator has");
    Mbarrier& b = mbarriers[mbarriers_made];
    b = Mbarrier{arrivals, arrivals, 0, 0, false, now(machine.current)};
    *at = mbarriers_made++ ^ MADE;
}
DEVICE void publish_barriers() {
    for (int n = 0; n < emulator::mbarriers_made; n++) emulator::mbarriers[n].published = true;
}
DEVICE void arrive_at(u64* at) { emulator::arrive(emulator::mbarrier(at), 0); }
DEVICE void arrive_expecting(u64* at, int bytes) { emulator::arrive(emulator::mbarrier(at), bytes); }
DEVICE void await(u64* at, u32 parity) {
    using namespace emulator;
    struct Wait {
        const Mbarrier& b;
        u32 parity;
    } wait = {mbarrier(at), parity};
    wait_until(
        [](const void* awaited) {
            const Wait* const wait = static_cast<const Wait*>(awaited);
            return wait->b.phases % 2 != wait->parity;
        },
        &wait);
    clocks[machine.current].learn(wait.b.passed);
}

DEVICE void meet_at(int number, int threads) {
    using namespace emulator;
    struct Wait {
        const Named& b;
        unsigned rounds;
    } wait = {named[number], named[number].rounds};
    arrive(number, threads);
    wait_until(
        [](const void* awaited) {
            const Wait* const wait = static_cast<const Wait*>(awaited);
            return wait->b.rounds != wait->rounds;
        },
        &wait);
    clocks[machine.current].learn(wait.b.passed);
}
DEVICE void arrive_at(int number, int threads) { emulator::arrive(number, threads); }
