// The instructions of primitives.cuh on a CPU.
#pragma once
#include <math.h>
#include <string.h>

#include "emulator/shadow.hpp"

#define DEVICE inline
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define KERNEL EXPORTED void
#define UNROLL
#define UNROLL_LITTLE
#define UNROLL_TWICE
#define UNROLL_EIGHT
#define ROLLED
#define INFINITE __builtin_inff()

// Flags are variables here and constants on a GPU: one build serves all problems of a type and tile.
EXPORTED int flags[32];
int flags[32];

DEVICE int thread_index() { return emulator::machine.current; }
DEVICE u32 block_index() { return emulator::machine.block; }
DEVICE u32 blocks() { return emulator::machine.blocks; }

// -- threads together -------------------------------------------------------------------------------------------------

DEVICE void barrier() { emulator::wait_for(emulator::Wait::block); }

DEVICE void warp_barrier() {
    emulator::together([](void**) { emulator::share(emulator::machine.current / 32 * 32, 32); }, nullptr);
}

template <class V> struct Shuffle {
    V value, result;
    int from;  // the lane whose value is asked for
};

template <class V> DEVICE V of_lane(V value, int lane) {
    Shuffle<V> mine = {value, value, lane % 32};
    emulator::together(
        [](void** all) {
            for (int n = 0; n < 32; n++) {
                Shuffle<V>* const at = static_cast<Shuffle<V>*>(all[n]);
                at->result = static_cast<Shuffle<V>*>(all[at->from])->value;
            }
        },
        &mine);
    return mine.result;
}

template <class V> DEVICE V shuffle_xor(V value, int lanes) {
    return of_lane(value, emulator::machine.current % 32 ^ lanes);
}

template <class V> DEVICE V broadcast(V value) { return of_lane(value, 0); }

DEVICE bool all_of_warp(bool it) {
    Shuffle<bool> mine = {it, true, 0};
    emulator::together(
        [](void** all) {
            bool every = true;
            for (int n = 0; n < 32; n++) every &= static_cast<Shuffle<bool>*>(all[n])->value;
            for (int n = 0; n < 32; n++) static_cast<Shuffle<bool>*>(all[n])->result = every;
        },
        &mine);
    return mine.result;
}

DEVICE int largest_of_warp(int x) {
    UNROLL for (int lanes = 16; lanes; lanes /= 2) {
        const int other = shuffle_xor(x, lanes);
        x = x > other ? x : other;
    }
    return x;
}
DEVICE u32 lanes_where(bool it) {
    Shuffle<u32> mine = {u32(it), 0, 0};
    emulator::together(
        [](void** all) {
            u32 lanes = 0;
            for (int n = 0; n < 32; n++) lanes |= static_cast<Shuffle<u32>*>(all[n])->value << n;
            for (int n = 0; n < 32; n++) static_cast<Shuffle<u32>*>(all[n])->result = lanes;
        },
        &mine);
    return mine.result;
}

DEVICE void let_next_begin() {}
DEVICE void await_launch_before() {}
DEVICE void fetch(const void*) {}

// -- from block to block ----------------------------------------------------------------------------------------------

// Blocks run one after another, in their order on the grid.
DEVICE u32 take_number(u32* at) { return (*at)++; }
template <class V> DEVICE V blank(V x) {
    memset(&x, 0xff, sizeof x);
    return x;
}
template <class V> DEVICE bool is_blank(V first, V second) {
    const V nothing = blank(first);
    return memcmp(&first, &nothing, sizeof nothing) == 0 || memcmp(&second, &nothing, sizeof nothing) == 0;
}
template <class V> DEVICE void store_relaxed(V* at, V first, V second) { at[0] = first, at[1] = second; }
template <class V> DEVICE void load_relaxed(V& first, V& second, const V* at) {
    first = at[0], second = at[1];
    if (is_blank(first, second)) emulator::fail("a wait for what no block before this one has left");
}

DEVICE void add_quad(float* to, const float* x) {
    if (reinterpret_cast<size_t>(to) % 16) emulator::fail("numbers are added at an odd address");
    for (int k = 0; k < 4; k++) to[k] += x[k];
}

// -- shared memory ----------------------------------------------------------------------------------------------------

DEVICE u8* shared_memory() { return emulator::shared.memory; }
DEVICE u32 shared_address(const void* at) { return static_cast<const u8*>(at) - emulator::shared.memory; }

template <class V> DEVICE V load_shared(const V* at) {
    emulator::touch(at, sizeof(V), false, thread_index());
    return *at;
}
template <class V> DEVICE void store_shared(V* at, V value) {
    emulator::touch_with(&value, at, sizeof(V), thread_index());
    *at = value;
}

// Copies that a thread has asked for and not waited for. Until then their target holds NaN.
struct Copy {
    u8* to;
    const u8* from;
    int size, bytes, group;
};
struct Copies {
    Copy list[1 << 13];
    int count, group;
};
inline Copies copies[1024];

template <int BYTES> DEVICE void copy_async(void* to, const void* from, int bytes, bool = false) {
    Copies& mine = copies[thread_index()];
    emulator::touch(to, BYTES, true, thread_index());
    memset(to, 0xff, BYTES);
    if (bytes > BYTES || bytes < 0) emulator::fail("a copy of more bytes than it has room for");
    if (bytes && reinterpret_cast<size_t>(from) % BYTES) emulator::fail("a copy from an odd address");
    if (mine.count == sizeof mine.list / sizeof *mine.list) return emulator::fail("too many copies under way");
    mine.list[mine.count++] = Copy{static_cast<u8*>(to), static_cast<const u8*>(from), BYTES, bytes, mine.group};
}
DEVICE void copy_commit() { copies[thread_index()].group++; }

template <int PENDING> DEVICE void copy_wait() {
    Copies& mine = copies[thread_index()];
    int left = 0;
    for (int n = 0; n < mine.count; n++) {
        const Copy copy = mine.list[n];
        if (copy.group >= mine.group - PENDING) {
            mine.list[left++] = copy;
            continue;
        }
        emulator::touch(copy.to, copy.size, true, thread_index());
        if (copy.bytes) memcpy(copy.to, copy.from, copy.bytes);
        memset(copy.to + copy.bytes, 0, copy.size - copy.bytes);
    }
    mine.count = left;
}

// -- numbers ----------------------------------------------------------------------------------------------------------

DEVICE u32 float_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE double bits_double(u64 bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
DEVICE float bits_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
DEVICE u32 multiply_high(u32 a, u32 b) { return u64(a) * b >> 32; }

DEVICE float widen(f16 x) {
    const int sign = x.bits >> 15, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    float size = exponent == 0 ? ldexpf(fraction, -24) : ldexpf(1024 + fraction, exponent - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return sign ? -size : size;
}
DEVICE f16 narrow_f16(float x) {
    const u16 sign = float_bits(x) >> 16 & 0x8000;
    if (x != x) return f16{0x7fff};
    const float size = fabsf(x);
    if (size >= 65520) return f16{u16(sign | 0x7c00)};
    const int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
    const int fraction = int(nearbyintf(ldexpf(size, 10 - exponent)));  // in units of the last place, to even
    return f16{u16(sign | (size < 0x1p-14f ? fraction : (exponent + 15 << 10) + fraction - 1024))};
}

// numbers.cuh has bfloat16, in plain C++.
DEVICE bf16 narrow_bf16(float x);
DEVICE float widen(bf16 x);

template <class T> DEVICE u32 pack_pair(float low, float high);
template <> DEVICE u32 pack_pair<f16>(float low, float high) {
    return narrow_f16(low).bits | u32(narrow_f16(high).bits) << 16;
}
template <> DEVICE u32 pack_pair<bf16>(float low, float high) {
    return narrow_bf16(low).bits | u32(narrow_bf16(high).bits) << 16;
}

template <u32 NAMED> DEVICE u32 bytes_of(u32 low, u32 high) {
    const u64 all = u64(high) << 32 | low;
    u32 bytes = 0;
    for (int n = 0; n < 4; n++) bytes |= u32(all >> 8 * (NAMED >> 4 * n & 7) & 0xff) << 8 * n;
    return bytes;
}
template <class T> DEVICE u32 add_pairs(u32 a, u32 b) {
    return pack_pair<T>(widen(T{u16(a)}) + widen(T{u16(b)}), widen(T{u16(a >> 16)}) + widen(T{u16(b >> 16)}));
}
DEVICE void widen_e4m3(u32& lower, u32& upper, u32 bytes) {
    float wide[4];
    for (int n = 0; n < 4; n++) {
        const int bits = bytes >> 8 * n & 0x7f, exponent = bits >> 3, fraction = bits & 7;
        wide[n] = exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
        if (bits == 0x7f) wide[n] = NAN;
        if (bytes >> 8 * n & 0x80) wide[n] = -wide[n];
    }
    lower = pack_pair<f16>(wide[0], wide[1]), upper = pack_pair<f16>(wide[2], wide[3]);
}

DEVICE float power(float x) { return exp2f(x); }
DEVICE double power(double x) { return exp(x); }
DEVICE float reciprocal(float x) { return 1 / x; }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float tangent(float x) { return tanhf(x); }
DEVICE double tangent(double x) { return tanh(x); }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE double larger(double a, double b) { return fmax(a, b); }
DEVICE float smaller(float a, float b) { return fminf(a, b); }
DEVICE double smaller(double a, double b) { return fmin(a, b); }
DEVICE float largest(float a, float b) { return a != a || a > b ? a : b; }
DEVICE int ones(u32 x) { return __builtin_popcount(x); }
DEVICE int highest(u32 x) { return 31 - __builtin_clz(x); }
template <int BYTE> DEVICE u32 spread_bits(u32 low, u32 high) {
    return (low >> 8 * BYTE >> 7 & 1) * 0xffffu | (high >> 8 * BYTE >> 7 & 1) * 0xffff0000u;
}

// -- tensor cores -----------------------------------------------------------------------------------------------------

struct Matrices {
    u32* to;
    const void* row;
};

template <bool TRANSPOSED> void load_four(void** all) {
    for (int n = 0; n < 32; n++)
        for (int matrix = 0; matrix < 4; matrix++) {
            const int major = n / 4, minor = 2 * (n % 4);
            u16 pair[2];
            for (int k = 0; k < 2; k++) {
                const int row = TRANSPOSED ? minor + k : major, column = TRANSPOSED ? major : minor + k;
                const void* const from = static_cast<Matrices*>(all[8 * matrix + row])->row;
                if (reinterpret_cast<size_t>(from) % 16) return emulator::fail("a row of a matrix at an odd address");
                const u16* const element = static_cast<const u16*>(from) + column;
                if (!emulator::touch(element, 2, false, emulator::machine.current / 32 * 32 + 8 * matrix + row)) return;
                pair[k] = *element;
            }
            static_cast<Matrices*>(all[n])->to[matrix] = pair[0] | u32(pair[1]) << 16;
        }
}

DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    Matrices mine = {to, row};
    emulator::together(load_four<false>, &mine);
}
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
    Matrices mine = {to, row};
    emulator::together(load_four<true>, &mine);
}

struct Multiply {
    float* c[4];
    const u32* a;
    u32 b[2];
};

template <class T> DEVICE float half_of(u32 pair, int which) { return widen(T{u16(pair >> 16 * which)}); }

template <class T>
DEVICE void multiply_accumulate(float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    Multiply mine = {{&c0, &c1, &c2, &c3}, a, {b0, b1}};
    emulator::together(
        [](void** all) {
            Multiply* lanes[32];
            for (int n = 0; n < 32; n++) lanes[n] = static_cast<Multiply*>(all[n]);
            float a[16][16], b[16][8];
            for (int n = 0; n < 32; n++)
                for (int k = 0; k < 2; k++) {
                    for (int quarter = 0; quarter < 4; quarter++)
                        a[n / 4 + 8 * (quarter % 2)][2 * (n % 4) + k + 8 * (quarter / 2)] =
                            half_of<T>(lanes[n]->a[quarter], k);
                    for (int half = 0; half < 2; half++)
                        b[2 * (n % 4) + k + 8 * half][n / 4] = half_of<T>(lanes[n]->b[half], k);
                }
            for (int n = 0; n < 32; n++)
                for (int quarter = 0; quarter < 4; quarter++) {
                    const int row = n / 4 + 8 * (quarter / 2), column = 2 * (n % 4) + quarter % 2;
                    double sum = *lanes[n]->c[quarter];
                    for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[k][column];
                    *lanes[n]->c[quarter] = float(sum);
                }
        },
        &mine);
}
