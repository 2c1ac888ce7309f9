// The types of a kernel: T is what arrays hold, Real what sums are in.
#pragma once
#include "primitives.cuh"

template <class V> struct RealOf { typedef float type; };
template <> struct RealOf<double> { typedef double type; };

typedef STORAGE T;
typedef RealOf<T>::type Real;

// Scores are measured in this unit within `power`: log2(e) where that is 2^x.
constexpr Real UNIT = sizeof(Real) == 4 ? 1.4426950408889634 : 1.0;
constexpr Real LOWEST = sizeof(Real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308;

DEVICE float widen(bf16 x) { return bits_float(u32(x.bits) << 16); }
DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

DEVICE bf16 narrow_bf16(float x) {
    const u32 bits = float_bits(x);
    if (x != x) return bf16{u16(bits >> 16 | 0x40)};
    return bf16{u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// To the nearest, ties to even.
template <class V> struct Narrow;
template <> struct Narrow<f16> { static DEVICE f16 of(float x) { return narrow_f16(x); } };
template <> struct Narrow<bf16> { static DEVICE bf16 of(float x) { return narrow_bf16(x); } };
template <> struct Narrow<float> { static DEVICE float of(double x) { return float(x); } };
template <> struct Narrow<double> { static DEVICE double of(double x) { return x; } };

template <class V> DEVICE V larger(V a, V b) { return a > b ? a : b; }
template <class V> DEVICE V smaller(V a, V b) { return a < b ? a : b; }
// n / by, for n below 2^31.
DEVICE u32 quotient(u32 n, Divisor by) { return u64(n) * by.multiplier >> by.shift; }
// n / by, of which 64 bits are rarely needed, and take far longer.
DEVICE i64 divided(i64 n, i64 by) { return (n | by) >> 32 ? n / by : i64(u32(n) / u32(by)); }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
// a b, rounded before it is used: what was summed relative to a product has to be rescaled by that very number.
DEVICE float rounded(float a, float b) { return multiply_add(a, b, 0.0f); }
DEVICE double rounded(double a, double b) { return multiply_add(a, b, 0.0); }
