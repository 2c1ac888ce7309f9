// Every instruction that is not plain C++, by a name of its own; emulator/primitives.hpp has the same for a CPU.
//
// A kernel touches shared memory through these alone, so that the emulator can see races.
#pragma once
#include "arguments.cuh"

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// 16 bytes, which is what one thread moves at a time.
template <class T> struct alignas(16) Chunk {
    static constexpr int SIZE = 16 / sizeof(T);
    T at[SIZE];
};

#ifdef EMULATED
#include "emulator/primitives.hpp"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
#define UNROLL _Pragma("unroll")
#define UNROLL_LITTLE _Pragma("unroll 4")
#define UNROLL_TWICE _Pragma("unroll 2")
#define UNROLL_EIGHT _Pragma("unroll 8")
#define ROLLED _Pragma("unroll 1")
#define INFINITE __int_as_float(0x7f800000)

DEVICE int thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }

// -- threads together -------------------------------------------------------------------------------------------------

DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
template <class V> DEVICE V shuffle_xor(V value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
template <class V> DEVICE V of_lane(V value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// That of lane 0.
template <class V> DEVICE V broadcast(V value) { return of_lane(value, 0); }
DEVICE bool all_of_warp(bool it) { return __all_sync(0xffffffffu, it); }
DEVICE int largest_of_warp(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    UNROLL for (int lanes = 16; lanes; lanes /= 2) {
        const int other = shuffle_xor(x, lanes);
        x = x > other ? x : other;
    }
    return x;
#endif
}
DEVICE u32 lanes_where(bool it) { return __ballot_sync(0xffffffffu, it); }
// From 9.0 on, of launches that follow one another: the next may begin where this one leaves room, once all blocks have
// come here. Before it reads what this one has written, it waits for its end, or for what tells of that part.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void await_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Has the L2 fetch the line of memory that holds `at`.
DEVICE void fetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at))); }

// -- from block to block ----------------------------------------------------------------------------------------------

// Adds 1, and returns what it was.
DEVICE u32 take_number(u32* at) { return atomicAdd(at, 1u); }
// Two neighbouring numbers, where pairs begin; two of 32 bits are there together or not yet, and so is each of 64.
DEVICE void store_relaxed(float* at, float first, float second) {
    const u64 both = u64(__float_as_uint(second)) << 32 | __float_as_uint(first);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"(both) : "memory");
}
DEVICE void store_relaxed(double* at, double first, double second) {
    asm volatile("st.relaxed.gpu.global.v2.f64 [%0], {%1, %2};"
                 ::"l"(__cvta_generic_to_global(at)), "d"(first), "d"(second) : "memory");
}
DEVICE void load_relaxed(float& first, float& second, const float* at) {
    u64 both;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(__cvta_generic_to_global(at)) : "memory");
    first = __uint_as_float(u32(both)), second = __uint_as_float(u32(both >> 32));
}
DEVICE void load_relaxed(double& first, double& second, const double* at) {
    asm volatile("ld.relaxed.gpu.global.v2.f64 {%0, %1}, [%2];"
                 : "=d"(first), "=d"(second) : "l"(__cvta_generic_to_global(at)) : "memory");
}
// The number whose bits are all 1, and whether one of two that were left together is that.
DEVICE float blank(float) { return __uint_as_float(0xffffffffu); }
DEVICE double blank(double) { return __longlong_as_double(-1); }
DEVICE bool is_blank(float, float second) { return __float_as_uint(second) == 0xffffffffu; }
DEVICE bool is_blank(double first, double second) {
    return __double_as_longlong(first) == -1 || __double_as_longlong(second) == -1;
}

// Adds four numbers to those that lie side by side, where 16 bytes begin; when, and in which order others do, is left open.
DEVICE void add_quad(float* to, const float* x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(to)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
    for (int k = 0; k < 4; k++) atomicAdd(to + k, x[k]);
#endif
}

// -- shared memory ----------------------------------------------------------------------------------------------------

DEVICE u8* shared_memory() {
    extern __shared__ __align__(16) u8 memory[];
    return memory;
}
template <class V> DEVICE V load_shared(const V* at) { return *at; }
template <class V> DEVICE void store_shared(V* at, V value) { *at = value; }
DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// The same number, of which no compiler knows that threads share a part. ptxas before 13.2 adds such a part by a uniform
// register, and then puts the descriptor of a copy with a cache policy into an odd one, which no GPU takes.
DEVICE u32 varying(u32 address) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1302
    u32 below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    address ^= below >> 31;  // of 32 lanes none is above the last
#endif
    return address;
}

// Copies the first `bytes` of BYTES from global to shared memory and zeroes the rest. Done by `copy_wait`, for the
// thread that asked; for the others, by the barrier after it. `once`: nobody reads it again, and what the L2 holds of
// others stays there.
template <int BYTES> DEVICE void copy_async(void* to, const void* from, int bytes, bool once = false) {
#if __CUDA_ARCH__ >= 800
    if (BYTES == 16 && once) {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                     ::"r"(varying(shared_address(to))), "l"(__cvta_generic_to_global(from)), "r"(bytes), "l"(policy)
                     : "memory");
    } else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(bytes) : "memory");
#else
    struct alignas(BYTES) Block {
        u32 words[BYTES / 4];
    };
    if (bytes == BYTES)
        *static_cast<Block*>(to) = *static_cast<const Block*>(from);
    else
        for (int n = 0; n < BYTES; n++)
            static_cast<u8*>(to)[n] = n < bytes ? static_cast<const u8*>(from)[n] : u8(0);
#endif
}
DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until no more than PENDING of this thread's groups of copies are under way.
template <int PENDING> DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// -- tensor cores -----------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16 bits: lane l names row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of
// row l / 4 of each; transposed, of column l / 4.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// c (16 x 8) += a (16 x 16) b (16 x 8). Lane l holds of c, rows l / 4 (c0, c1) and l / 4 + 8 (c2, c3), columns
// 2 (l % 4) and the next.
template <class T>
DEVICE void multiply_accumulate(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1);
template <>
DEVICE void multiply_accumulate<f16>(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void multiply_accumulate<bf16>(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -- numbers ----------------------------------------------------------------------------------------------------------

DEVICE float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}
DEVICE f16 narrow_f16(float x) {
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    return narrow;
}
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE double bits_double(u64 x) { return __longlong_as_double(x); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }

// e^x in the unit that the machine is fast in: 2^x in float (2 units in the last place, subnormals are 0).
DEVICE float power(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
DEVICE double power(double x) { return exp(x); }
// 1 / x (1 unit in the last place, subnormals are 0).
DEVICE float reciprocal(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float tangent(float x) { return tanhf(x); }
DEVICE double tangent(double x) { return tanh(x); }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
// NaN yields; and prevails.
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE double larger(double a, double b) { return fmax(a, b); }
DEVICE float smaller(float a, float b) { return fminf(a, b); }
DEVICE double smaller(double a, double b) { return fmin(a, b); }
DEVICE float largest(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}
// Bits that are 1, and the number of the highest; there is one.
DEVICE int ones(u32 x) { return __popc(x); }
DEVICE int highest(u32 x) { return 31 - __clz(x); }
// 16 bits alike in each half: the highest of byte BYTE of `low`, and that of `high`.
template <int BYTE> DEVICE u32 spread_bits(u32 low, u32 high) {
    u32 halves;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(halves) : "r"(low), "r"(high), "n"(0xcc88 + 0x1111 * BYTE));
    return halves;
}

// Two numbers rounded to 16 bits, the first in the low half.
template <class T> DEVICE u32 pack_pair(float low, float high);
template <> DEVICE u32 pack_pair<f16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> DEVICE u32 pack_pair<bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// -- pairs of 16 bits, and what they are made of ----------------------------------------------------------------------

// Four bytes of those of `low` (0 to 3) and of `high` (4 to 7): the lowest is named by the lowest digit.
template <u32 NAMED> DEVICE u32 bytes_of(u32 low, u32 high) { return __byte_perm(low, high, NAMED); }
// Sums of pairs, each rounded; of bf16 from compute capability 8.0 on.
template <class T> DEVICE u32 add_pairs(u32 a, u32 b);
template <> DEVICE u32 add_pairs<f16>(u32 a, u32 b) {
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
template <> DEVICE u32 add_pairs<bf16>(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(0x3f803f80), "r"(b));  // times 1
#endif
    return a;
}
// The e4m3 numbers of four bytes as f16, of the lower two and of the upper two; no number stays none.
DEVICE void widen_e4m3(u32& lower, u32& upper, u32 bytes) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;"
        " cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }" : "=r"(lower), "=r"(upper) : "r"(bytes));
#else
    const auto widen_two = [](u32 high) {  // each in the upper half of its 16 bits
        const u32 size = high >> 1 & 0x3f803f80, none = (size + 0x00800080) >> 14 & 0x00010001;
        u32 wide;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(size), "r"(0x5c005c00));  // exponents are 8 too small
        return wide | none * 0x7fff | (high & 0x80008000);
    };
    lower = widen_two(__byte_perm(bytes, 0, 0x1404)), upper = widen_two(__byte_perm(bytes, 0, 0x3424));
#endif
}

#endif
