// Who knows of what, by vector clocks (Mattern 1989; for races, Flanagan and Freund, FastTrack, 2009).
//
// What touches memory is an agent with a time of its own: a thread; the products of a warp that are under way, whose
// time counts the groups that are over; its additions to global memory, likewise; copies that complete on an mbarrier,
// whose time counts its phases. A clock holds the time up to which its owner knows of each agent. Barriers pass that on.
#pragma once
#include "emulator/fibers.hpp"

namespace emulator {

constexpr int THREADS = WARP * WARPS, BARRIERS = 64;
constexpr int OF_PRODUCTS = THREADS;               // by warp
constexpr int OF_ADDITIONS = OF_PRODUCTS + WARPS;  // by warp
constexpr int OF_COPIES = OF_ADDITIONS + WARPS;    // by mbarrier
constexpr int SHOWN = OF_COPIES + BARRIERS;        // by thread: of its writes, what products and copies may see
constexpr int AGENTS = SHOWN + THREADS;

struct Moment {
    int agent = -1;  // none
    unsigned time = 0;
};

struct Clock {
    unsigned at[AGENTS];

    void learn(const Clock& other) {
        for (int n = 0; n < AGENTS; n++) at[n] = at[n] < other.at[n] ? other.at[n] : at[n];
    }
    bool knows(Moment moment) const { return moment.agent < 0 || at[moment.agent] >= moment.time; }
    void forget() {
        for (unsigned& time : at) time = 0;
    }
};

inline Clock clocks[THREADS];

inline Moment now(int thread) { return {thread, clocks[thread].at[thread]}; }
// What the thread does from here on, nobody knows of yet.
inline void step(int thread) { clocks[thread].at[thread]++; }

// Threads from `first` on tell one another all that they know.
inline void share(int first, int count) {
    static Clock all;
    all = clocks[first];
    for (int n = first + 1; n < first + count; n++) all.learn(clocks[n]);
    for (int n = first; n < first + count; n++) clocks[n] = all, step(n);
}

inline void begin_clocks() {
    for (int n = 0; n < machine.threads; n++) clocks[n].forget(), step(n);
}

}  // namespace emulator
