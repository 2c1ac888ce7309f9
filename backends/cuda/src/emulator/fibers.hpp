// Blocks of threads on one CPU thread: each thread of a block is a fiber, which runs until it waits for others.
//
// Blocks run one after another, or side by side (residents.hpp). What a warp does together (shuffles, matrix
// instructions) is done once all of its lanes have come to it; lanes that come to different ones, and barriers that some
// threads never reach, are reported. Warps take turns by chance, the same at every run of a seed, so that nothing can rely
// on their order.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK = size_t(1) << 18;

enum class Wait { nothing, warp, block, other, end };

// Done for the 32 lanes of a warp at once, each with its own arguments.
typedef void (*Together)(void** lanes);

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool begun;
    Wait wait;
    Together together;
    void* arguments;
    bool (*ready)(const void*);  // of another wait: whether it is over
    const void* awaited;
};

struct Machine {
    Fiber* fibers;
    int threads;
    int current;
    unsigned block, blocks;  // which one, of how many
    unsigned seed;           // of what is left to chance
    jmp_buf scheduler;
    bool inside;  // a fiber, not the scheduler
    void (*kernel)();
    void (*barrier)();  // called when all threads have met
    // What is asynchronous: before and after a block, and what has a copy arrive that is under way, if there is one.
    void (*begin)() = [] {};
    void (*end)() = [] {};
    bool (*deliver)() = [] { return false; };
    void (*exchange)(int) = nullptr;  // it, with what was set aside of a block that runs beside others
    unsigned random;
    char error[400];
};

inline Machine machine;

// A number below `most`.
inline int chance(int most) {
    machine.random = machine.random * 1664525 + 1013904223;
    return (machine.random >> 8) % most;
}

// Ends the run. The fiber that fails goes no further; the scheduler has to see to that itself.
inline void fail(const char* what) {
    if (!machine.error[0])
        snprintf(machine.error, sizeof machine.error, "block %u, thread %d: %s", machine.block, machine.current, what);
    if (machine.inside) _longjmp(machine.scheduler, 1);
}

// Hands over to the scheduler, until what is waited for has come.
inline void wait_for(Wait what) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.wait = what;
    if (!_setjmp(fiber.here)) _longjmp(machine.scheduler, 1);
}

// Until `ready` says so of what is `awaited`.
inline void wait_until(bool (*ready)(const void*), const void* awaited) {
    if (ready(awaited)) return;
    Fiber& fiber = machine.fibers[machine.current];
    fiber.ready = ready;
    fiber.awaited = awaited;
    wait_for(Wait::other);
}

inline void together(Together operation, void* arguments) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.together = operation;
    fiber.arguments = arguments;
    wait_for(Wait::warp);
}

inline void live() {
    for (;;) {
        machine.kernel();
        wait_for(Wait::end);
    }
}

inline void resume(int thread) {
    machine.current = thread;
    Fiber& fiber = machine.fibers[thread];
    fiber.wait = Wait::nothing;
    if (_setjmp(machine.scheduler)) {
        machine.inside = false;
        return;
    }
    machine.inside = true;
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

// Whether all lanes of the warp waited, and have what they waited for.
inline bool release_warp(int warp) {
    Fiber* const lanes = machine.fibers + warp * WARP;
    void* arguments[WARP];
    for (int n = 0; n < WARP; n++) {
        if (lanes[n].wait != Wait::warp) return false;
        arguments[n] = lanes[n].arguments;
    }
    for (int n = 1; n < WARP; n++)
        if (lanes[n].together != lanes[0].together) {
            machine.current = warp * WARP + n;
            fail("the lanes of a warp have come to different instructions");
            return false;
        }
    lanes[0].together(arguments);
    return true;
}

// Lets the warp go on as far as it can. Returns whether it moved.
inline bool run_warp(int warp) {
    Fiber* const lanes = machine.fibers + warp * WARP;
    bool moved = false;
    for (;;) {
        for (int lane = 0; lane < WARP && !machine.error[0]; lane++) {
            if (lanes[lane].wait == Wait::other && lanes[lane].ready(lanes[lane].awaited))
                lanes[lane].wait = Wait::nothing;
            if (lanes[lane].wait != Wait::nothing) continue;
            resume(warp * WARP + lane);
            moved = true;
        }
        if (machine.error[0] || !release_warp(warp)) return moved;
        for (int lane = 0; lane < WARP; lane++) lanes[lane].wait = Wait::nothing;
        moved = true;
    }
}

inline void begin_block() {
    machine.random = machine.block + machine.seed * 2654435761u;
    for (int n = 0; n < machine.threads; n++) machine.fibers[n].wait = Wait::nothing;
}

enum class Came { on, nowhere, to_end };

// Lets each warp go on as far as it can, and says how far the block has come.
inline Came run_round() {
    const int warps = machine.threads / WARP;
    bool moved = false, ended = true, all_wait = true;
    for (int n = 0, first = chance(warps), turn = chance(2); n < warps; n++) {
        moved |= run_warp((first + (turn ? n : warps - n)) % warps);
        if (machine.error[0]) return Came::to_end;
    }
    for (int n = 0; n < machine.threads; n++) {
        ended &= machine.fibers[n].wait == Wait::end;
        all_wait &= machine.fibers[n].wait == Wait::block;
    }
    if (ended) return Came::to_end;
    if (all_wait) {
        machine.barrier();
        for (int n = 0; n < machine.threads; n++) machine.fibers[n].wait = Wait::nothing;
        moved = true;
    }
    if (machine.deliver()) moved = true;
    return moved ? Came::on : Came::nowhere;
}

inline void run_block() {
    for (;;) {
        const Came came = run_round();
        if (came == Came::to_end) return;
        if (came == Came::nowhere)
            return fail("a barrier is waited for that some threads never reach, or a number that no block has left");
    }
}

inline void make_fibers(int threads) {
    if (machine.fibers && machine.threads == threads && !machine.error[0]) return;
    static char* stacks = nullptr;  // of a run that failed, they are given up as they are
    stacks = static_cast<char*>(malloc(STACK * threads));
    machine.fibers = static_cast<Fiber*>(calloc(threads, sizeof(Fiber)));
    machine.threads = threads;
    machine.error[0] = 0;
    for (int n = 0; n < threads; n++) {
        Fiber& fiber = machine.fibers[n];
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks + STACK * n;
        fiber.start.uc_stack.ss_size = STACK;
        makecontext(&fiber.start, live, 0);
    }
}

}  // namespace emulator
