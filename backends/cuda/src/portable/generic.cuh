// The flags of generic kernels, which serve every tiny problem of a type and class of head dimensions: what others are
// compiled for is read from the arguments here, or left out where it only saves time.
#pragma once
#include "numbers.cuh"
#if GENERIC

// How much one copy may move of an operand: 16 bytes, or one element.
template <class V> DEVICE int copied(const Operand& x) {
    const u64 steps = u64(x.at) | u64(x.batch | x.head | x.row) * sizeof(V);
    return x.column == 1 && steps % 16 == 0 ? 16 : sizeof(V);
}

#define SOFTCAP (a.cap > 0)
#define DROPOUT (a.keep_scale != 1)
#define MASK_KIND a.mask_kind
#define QUERY_BYTES copied<T>(a.query)
#define KEY_BYTES copied<Stored>(a.key)
#define VALUE_BYTES copied<Stored>(a.value)
#define GRAD_OUT_BYTES copied<T>(a.grad_out)
#define LENGTHS 1
#define FOLD 0
#define MASK_PAIRS 0
#define SPLIT 0
#define ONCE 0

#endif
