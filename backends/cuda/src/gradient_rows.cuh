// Where the rows of gradients lie: dense, heads outside of positions or inside, as in their operand.
#pragma once
#include "numbers.cuh"

enum Gradient { OF_QUERY, OF_KEY, OF_VALUE };

// Which row of a gradient is position l of head h of batch entry b.
DEVICE i64 gradient_row(const Arguments& a, Gradient which, i64 b, i64 h, i64 l, i64 heads, i64 length) {
    return a.turned >> which & 1 ? (b * length + l) * heads + h : (b * heads + h) * length + l;
}
