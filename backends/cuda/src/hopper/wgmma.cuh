// Products of a warpgroup on Hopper's tensor cores: asynchronous, with operands in shared memory as TMA leaves them.
//
// A warpgroup multiplies 64 rows. Sums lie in registers like those of mma: the thread of lane l of warp w holds rows
// 16 w + l / 4 (m = 0) and 8 further (m = 1); of column 8 c + 2 (l % 4) + e it is sums[4 c + 2 m + e]. Packed in pairs,
// that is the left operand of the next product.
//
// Invariants: registers of a product under way are neither read nor written before `wait`; `hold` keeps the compiler
// from moving such accesses across it. Left operands in registers are rewritten only when no product at all is under
// way: ptxas before 13.3 does not keep them apart otherwise.
#pragma once
#include "hopper/tma.cuh"

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

// -- one instruction --------------------------------------------------------------------------------------------------

// Where something in shared memory begins, in units of 16 bytes, and one more a lane: in lane 0 it is the truth.
DEVICE u32 lane_address(const void* at) { return (shared_address(at) >> 4 & 0x3fff) + thread_index() % 32; }

// Where a matrix lies, of which `at` is the `lane_address`: the low word holds its address and `panel`, the bytes
// between panels where rows are what is summed over (elsewhere it is not read), the high one the bytes between groups
// of 8 rows and the kind of swizzle. Lane 0 tells the others, which look as if they had different ones: so the compiler
// adds in uniform registers, where it else moves every sum there.
struct Matrix {
    u32 low;
    DEVICE Matrix(u32 at, int panel) : low(__shfl_sync(0xffffffffu, at, 0) | u32(panel >> 4) << 16) {}
    // The same matrix some bytes on.
    DEVICE u64 advanced(int bytes) const { return u64(HIGH) << 32 | (low + (bytes >> 4)); }
    static constexpr u32 HIGH = 8 * PANEL * sizeof(T) >> 4 | 1u << 30;
};

// sums (64 x COLUMNS) = keep * sums + a (64 x 16) b (16 x COLUMNS): a in shared memory, 16 neighbouring columns of
// rows, and b the same, transposed; or a in registers, and b 16 rows.
template <int COLUMNS> struct Instruction;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define OCTET(n) "+f"(d[8 * (n)]), "+f"(d[8 * (n) + 1]), "+f"(d[8 * (n) + 2]), "+f"(d[8 * (n) + 3]), \
                 "+f"(d[8 * (n) + 4]), "+f"(d[8 * (n) + 5]), "+f"(d[8 * (n) + 6]), "+f"(d[8 * (n) + 7])
#define OCTETS_4 OCTET(0), OCTET(1), OCTET(2), OCTET(3)
#define OCTETS_5 OCTETS_4, OCTET(4)
#define OCTETS_8 OCTETS_5, OCTET(5), OCTET(6), OCTET(7)
#define OCTETS_16 OCTETS_8, OCTET(8), OCTET(9), OCTET(10), OCTET(11), OCTET(12), OCTET(13), OCTET(14), OCTET(15)
#define NAMES_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_5 NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_8 NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
                        ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_16 NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
                         ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
                         ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110" \
                         ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124" \
                         ", %125, %126, %127"

// P to U number the operands that follow the sums.
#define INSTRUCTION(COLUMNS, COUNT, P, Q, R, S, U)                                                                    \
    template <> struct Instruction<COLUMNS> {                                                                         \
        template <int KEEP> static DEVICE void run(float (&d)[COLUMNS / 2], u64 a, u64 b) {                           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TEXT(STORAGE) "." TEXT(STORAGE)      \
                         " {" NAMES_##COUNT "}, %" #P ", %" #Q ", p, 1, 1, 0, 0;\n}"                                  \
                         : OCTETS_##COUNT : "l"(a), "l"(b), "n"(KEEP));                                               \
        }                                                                                                             \
        static DEVICE void run(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TEXT(STORAGE) "." TEXT(STORAGE)      \
                         " {" NAMES_##COUNT "}, {%" #P ", %" #Q ", %" #R ", %" #S "}, %" #U ", p, 1, 1, 1;\n}"        \
                         : OCTETS_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
        }                                                                                                             \
    };
INSTRUCTION(64, 4, 32, 33, 34, 35, 36)
INSTRUCTION(80, 5, 40, 41, 42, 43, 44)
INSTRUCTION(128, 8, 64, 65, 66, 67, 68)
INSTRUCTION(256, 16, 128, 129, 130, 131, 132)
#undef INSTRUCTION

// -- products of tiles ------------------------------------------------------------------------------------------------

constexpr int ROW_BYTES = PANEL * sizeof(T);

// sums = left (64 x DEPTH) right (COLUMNS x DEPTH)^T, both in shared memory, by their `lane_address`.
template <int COLUMNS, int DEPTH> DEVICE void product_nt(float (&sums)[COLUMNS / 2], u32 left, u32 right) {
    const Matrix a(left, 0), b(right, 0);
    UNROLL for (int k = 0; k < DEPTH; k += 16) {
        const int panel = k / PANEL, within = k % PANEL * int(sizeof(T));
        const u64 a_k = a.advanced(panel * 64 * ROW_BYTES + within);
        const u64 b_k = b.advanced(panel * COLUMNS * ROW_BYTES + within);
        if (k == 0)
            Instruction<COLUMNS>::template run<0>(sums, a_k, b_k);
        else
            Instruction<COLUMNS>::template run<1>(sums, a_k, b_k);
    }
}

// sums += left (64 x DEPTH, packed) right (DEPTH x COLUMNS in shared memory).
template <int COLUMNS, int DEPTH>
DEVICE void product_nn(float (&sums)[COLUMNS / 2], const u32 (&left)[DEPTH / 16][4], u32 right) {
    const Matrix b(right, DEPTH * ROW_BYTES);
    UNROLL for (int k = 0; k < DEPTH / 16; k++)
        Instruction<COLUMNS>::run(sums, left[k], b.advanced(k * 16 * ROW_BYTES));
}
