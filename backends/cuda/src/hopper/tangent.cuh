// tanh for a softcap, to 4e-7 of its value: by a polynomial where it is small, else by an exponential and a reciprocal.
#pragma once
#include "numbers.cuh"

// Up to here the polynomial does, with an error of 1.3e-7. Most scores are that small, and most warps hold no others.
constexpr float SMALL = 0.625f;

// x (1 + z p(z)) with z = x^2, and p of degree 3 whose greatest relative error is the least (Remez).
DEVICE float tangent_of_small(float x) {
    const float z = x * x;
    float p = multiply_add(0.015195373f, z, -0.051947904f);
    p = multiply_add(p, z, 0.13308175f);
    p = multiply_add(p, z, -0.33332341f);
    return multiply_add(x * z, p, x);
}

// 1 - 2 / (1 + e^2|x|), with the sign of x.
DEVICE float tangent_of_large(float x) {
    const float size = multiply_add(-2, reciprocal(1 + power(fabsf(x) * 2 * UNIT)), 1);
    return copysignf(size, x);
}
