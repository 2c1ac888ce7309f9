// Every instruction that only Hopper has, by a name of its own; emulator/hopper.hpp has the same for a CPU.
//
// Most are asynchronous: copies by TMA complete on an mbarrier in shared memory, products of a warpgroup in groups that
// are waited for. Both read and write shared memory by another way (a proxy) than threads do.
#pragma once
#include "numbers.cuh"

constexpr int PANEL = 64;  // columns of 16 bits that a row of a tile has side by side: tma.cuh

#ifdef EMULATED
#include "emulator/hopper.hpp"
#else

#define CONSTANT const __grid_constant__

// A CUtensorMap of an operand: dimensions column, row, head, batch.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// -- mbarriers --------------------------------------------------------------------------------------------------------

DEVICE void init_barrier(u64* at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to TMA; a barrier of the block follows.
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive_at(u64* at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}
// Arrives, and holds the phase until TMA has brought `bytes`.
DEVICE void arrive_expecting(u64* at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
DEVICE bool has_passed(u64* at, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(at)), "r"(parity) : "memory");
    return done;
}
// Waits for the end of a phase of `parity`.
DEVICE void await(u64* at, u32 parity) {
    while (!has_passed(at, parity)) {}
}

// Of a warp's lanes, which are all here, one. The assembler knows that it is one, unlike that of a number: who asks TMA for
// copies does so at once then, and not in a loop over lanes.
DEVICE bool is_elected() {
    u32 it;
    asm volatile("{\n.reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(it));
    return it;
}

// -- some threads of a block ------------------------------------------------------------------------------------------

// `threads` of the block meet by a number below 16; 0 is that of `barrier`. Who arrives there does not wait.
DEVICE void meet_at(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE void arrive_at(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// What warpgroups that copy give up, those that compute get: 64 Ki registers for all warps.
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// -- shared memory ----------------------------------------------------------------------------------------------------

DEVICE u8* shared_panels() {
    extern __shared__ __align__(1024) u8 panels[];
    return panels;
}

DEVICE void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Brings the box of `map` that begins there: rows of a panel, those of one head after another's, swizzled by 128 bytes, 0
// outside the operand.
DEVICE void copy_box(void* to, const TensorMap& map, u64* full, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(full)), "r"(column), "r"(row), "r"(head),
                   "r"(batch) : "memory");
}
// Brings bytes that lie side by side, 16 at a time.
DEVICE void copy_bytes(void* to, const void* from, int bytes, u64* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                   "r"(shared_address(full)) : "memory");
}
// What this thread wrote, products and copies are to see, of which a barrier tells them.
DEVICE void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16 bits: lane l names row l % 8 of matrix l / 8, and has elements 2 (l % 4) and the next of
// row l / 4 of each.
DEVICE void store_matrices(void* row, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared_address(row)), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// -- global memory ----------------------------------------------------------------------------------------------------

// Adds numbers in shared memory to those that lie side by side in global memory, by a thread that shows them first; in
// which order others do is left open. Such additions of a thread are waited for in groups.
DEVICE void add_floats(float* to, const float* from, int count) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(count * 4) : "memory");
}
DEVICE void commit_additions() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's have read what they add.
DEVICE void wait_additions() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until they are done.
DEVICE void finish_additions() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Tells threads of other blocks how far a row of additions has come, once this thread's are done.
DEVICE void leave_number(u32* at, u32 number) {
    asm volatile("fence.proxy.async.global;\nst.release.gpu.global.u32 [%0], %1;"
                 ::"l"(__cvta_generic_to_global(at)), "r"(number) : "memory");
}
// Makes it 0 before what this thread does next.
DEVICE void clear_number(u32* at) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;\nfence.acq_rel.gpu;"
                 ::"l"(__cvta_generic_to_global(at)), "r"(0) : "memory");
}
// Counts a block whose additions are done, and what it stored, by a thread that all others have told so.
DEVICE void count_block(u32* at) {
    asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.u32 [%0], 1;"
                 ::"l"(__cvta_generic_to_global(at)) : "memory");
}
// How far it has come; `follow_additions` before this thread adds.
DEVICE u32 number_at(const u32* at) {
    u32 number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(__cvta_generic_to_global(at)) : "memory");
    return number;
}
// Waits until it has come there.
DEVICE void await_number(const u32* at, u32 number) {
    while (number_at(at) < number) {}
}
DEVICE void follow_additions() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// -- products of a warpgroup ------------------------------------------------------------------------------------------

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than PENDING groups of products are under way.
template <int PENDING> DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int COUNT> DEVICE void hold(float (&registers)[COUNT]) {
    UNROLL for (int n = 0; n < COUNT; n++) asm volatile("" : "+f"(registers[n])::"memory");
}
template <int COUNT> DEVICE void hold(u32 (&registers)[COUNT][4]) {
    UNROLL for (int n = 0; n < COUNT; n++)
        UNROLL for (int r = 0; r < 4; r++) asm volatile("" : "+r"(registers[n][r])::"memory");
}

// sums (64 x COLUMNS) = keep * sums + a (64 x 16) b (16 x COLUMNS), of the matrices that descriptors tell of:
//   nt   a by rows, and b by columns: 16 neighbours of each are summed over
//   tn   a by columns, and b by rows
//   nn   a in registers or by rows, and b by rows
template <int COLUMNS> struct Instruction;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define OCTET(n) "+f"(d[8 * (n)]), "+f"(d[8 * (n) + 1]), "+f"(d[8 * (n) + 2]), "+f"(d[8 * (n) + 3]), \
                 "+f"(d[8 * (n) + 4]), "+f"(d[8 * (n) + 5]), "+f"(d[8 * (n) + 6]), "+f"(d[8 * (n) + 7])
#define OCTETS_1 OCTET(0)
#define OCTETS_2 OCTETS_1, OCTET(1)
#define OCTETS_4 OCTETS_2, OCTET(2), OCTET(3)
#define OCTETS_5 OCTETS_4, OCTET(4)
#define OCTETS_6 OCTETS_5, OCTET(5)
#define OCTETS_7 OCTETS_6, OCTET(6)
#define OCTETS_8 OCTETS_7, OCTET(7)
#define OCTETS_12 OCTETS_8, OCTET(8), OCTET(9), OCTET(10), OCTET(11)
#define OCTETS_16 OCTETS_12, OCTET(12), OCTET(13), OCTET(14), OCTET(15)
#define NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_2 NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_4 NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_5 NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_6 NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_7 NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_8 NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_12 NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
                         ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_16 NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
                          ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// P to U number the operands that follow the sums.
#define OPCODE(COLUMNS) "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TEXT(STORAGE) "." TEXT(STORAGE)
#define IN_SHARED(NAME, A_TURNED, B_TURNED, COLUMNS, COUNT, P, Q, R)                                                  \
    template <int KEEP> static DEVICE void NAME(float (&d)[COLUMNS / 2], u64 a, u64 b) {                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R ", 0;\n" OPCODE(COLUMNS)                                 \
                     " {" NAMES_##COUNT "}, %" #P ", %" #Q ", p, 1, 1, " #A_TURNED ", " #B_TURNED ";\n}"              \
                     : OCTETS_##COUNT : "l"(a), "l"(b), "n"(KEEP));                                                   \
    }
#define INSTRUCTION(COLUMNS, COUNT, P, Q, R, S, U)                                                                    \
    template <> struct Instruction<COLUMNS> {                                                                         \
        IN_SHARED(nt, 0, 0, COLUMNS, COUNT, P, Q, R)                                                                  \
        IN_SHARED(tn, 1, 1, COLUMNS, COUNT, P, Q, R)                                                                  \
        IN_SHARED(nn, 0, 1, COLUMNS, COUNT, P, Q, R)                                                                  \
        static DEVICE void nn(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" OPCODE(COLUMNS)                                   \
                         " {" NAMES_##COUNT "}, {%" #P ", %" #Q ", %" #R ", %" #S "}, %" #U ", p, 1, 1, 1;\n}"        \
                         : OCTETS_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
        }                                                                                                             \
    };
INSTRUCTION(16, 1, 8, 9, 10, 11, 12)
INSTRUCTION(32, 2, 16, 17, 18, 19, 20)
INSTRUCTION(64, 4, 32, 33, 34, 35, 36)
INSTRUCTION(80, 5, 40, 41, 42, 43, 44)
INSTRUCTION(96, 6, 48, 49, 50, 51, 52)
INSTRUCTION(112, 7, 56, 57, 58, 59, 60)
INSTRUCTION(128, 8, 64, 65, 66, 67, 68)
INSTRUCTION(192, 12, 96, 97, 98, 99, 100)
INSTRUCTION(256, 16, 128, 129, 130, 131, 132)
#undef INSTRUCTION
#undef IN_SHARED
#undef OPCODE

#endif
