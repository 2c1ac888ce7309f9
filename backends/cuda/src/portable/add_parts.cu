// Gradients from the sums that blocks left of them (shares.cuh): of query, or OF_KEYS: of key, then of value.
//
// A thread takes one number and adds its parts in their order, so that bits repeat.
#include "numbers.cuh"

KERNEL add_parts(const Arguments a) {
    const i64 rows = OF_KEYS ? i64(a.batch) * (a.heads / a.group) * a.keys : i64(a.batch) * a.heads * a.queries;
    const i64 first = OF_KEYS && !a.grad_key ? 0 : rows * a.dim, second = OF_KEYS && a.grad_value ? rows * a.dim_v : 0;
    const i64 at = i64(block_index()) * (32 * WARPS) + thread_index();
    if (at >= first + second) return;
    const bool of_value = at >= first;
    const i64 number = of_value ? at - first : at, count = of_value ? second : first;
    const Real* const parts = reinterpret_cast<const Real*>(of_value ? a.sums : a.parts) + number;
    Real sum = 0;
    UNROLL_LITTLE for (int split = 0; split < a.splits; split++) sum += parts[split * count];
    T* const to = reinterpret_cast<T*>(of_value ? a.grad_value : OF_KEYS ? a.grad_key : a.grad_query);
    to[number] = Narrow<T>::of(of_value ? sum : sum * Real(a.scale));
}
