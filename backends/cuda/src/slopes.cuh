// By how much scores fall with the distance from query to key (ALIBI; Press et al. 2022): a number of the head.
#pragma once
#include "numbers.cuh"

DEVICE Real slope_of(const Arguments& a, i64 batch, i64 head) {
    return reinterpret_cast<const Real*>(a.slopes)[batch * a.slope_batch + head * a.slope_head];
}
