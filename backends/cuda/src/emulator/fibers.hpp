// Blocks of threads on one CPU thread: each thread of a block is a fiber, which runs until it waits for others.
//
// Blocks run one after another. What a warp does together (shuffles, matrix instructions) is done once all of its lanes
// have come to it; lanes that come to different ones, and barriers that some threads never reach, are reported.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK = size_t(1) << 18;

enum class Wait { nothing, warp, block, end };

// Done for the 32 lanes of a warp at once, each with its own arguments.
typedef void (*Together)(void** lanes);

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool begun;
    Wait wait;
    Together together;
    void* arguments;
};

struct Machine {
    Fiber* fibers;
    int threads;
    int current;
    unsigned block;
    jmp_buf scheduler;
    bool inside;  // a fiber, not the scheduler
    void (*kernel)();
    unsigned barriers;        // that the block has passed
    unsigned* warp_barriers;  // that each warp has passed, those of the block included
    char error[400];
};

inline Machine machine;

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

inline void run_block() {
    machine.barriers = 0;
    for (int n = 0; n < machine.threads / WARP; n++) machine.warp_barriers[n] = 0;
    for (int n = 0; n < machine.threads; n++) machine.fibers[n].wait = Wait::nothing;
    // Warps take turns in an order that changes at every barrier, so that nothing can rely on it.
    const int warps = machine.threads / WARP;
    for (;;) {
        bool moved = false, ended = true, all_wait = true;
        for (int n = 0; n < warps; n++) {
            const int warp = (machine.barriers + machine.block) % 2 ? n : warps - 1 - n;
            for (;;) {
                for (int lane = 0; lane < WARP && !machine.error[0]; lane++) {
                    const int thread = warp * WARP + lane;
                    if (machine.fibers[thread].wait != Wait::nothing) continue;
                    resume(thread);
                    moved = true;
                }
                if (machine.error[0]) return;
                if (!release_warp(warp)) break;
                for (int lane = 0; lane < WARP; lane++) machine.fibers[warp * WARP + lane].wait = Wait::nothing;
                moved = true;
            }
            if (machine.error[0]) return;
        }
        for (int n = 0; n < machine.threads; n++) {
            ended &= machine.fibers[n].wait == Wait::end;
            all_wait &= machine.fibers[n].wait == Wait::block;
        }
        if (ended) return;
        if (all_wait) {
            machine.barriers++;
            for (int n = 0; n < warps; n++) machine.warp_barriers[n]++;
            for (int n = 0; n < machine.threads; n++) machine.fibers[n].wait = Wait::nothing;
            moved = true;
        }
        if (!moved) return fail("a barrier is waited for that some threads never reach");
    }
}

inline void make_fibers(int threads) {
    if (machine.fibers && machine.threads == threads && !machine.error[0]) return;
    static char* stacks = nullptr;  // of a run that failed, they are given up as they are
    stacks = static_cast<char*>(malloc(STACK * threads));
    machine.fibers = static_cast<Fiber*>(calloc(threads, sizeof(Fiber)));
    machine.warp_barriers = static_cast<unsigned*>(calloc(threads / WARP, sizeof(unsigned)));
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
