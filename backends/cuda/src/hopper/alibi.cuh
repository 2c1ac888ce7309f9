// Scores that fall with the distance from query to key (ALIBI; Press et al. 2022), by a slope of the head.
#pragma once
#include "numbers.cuh"

// In units of the exponential.
DEVICE float slope_of(const Arguments& a, i64 batch, i64 head) {
    return reinterpret_cast<const float*>(a.slopes)[batch * a.slope_batch + head * a.slope_head] * UNIT;
}
