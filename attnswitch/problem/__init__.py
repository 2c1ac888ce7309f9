"""One attention call without its arrays: sizes, options, text form, cost."""

from attnswitch.problem.problem import (
    CACHES,
    CONTIGUOUS,
    DTYPES,
    GRAD_OPERANDS,
    Alignment,
    Mask,
    Memory,
    Problem,
    Window,
)

__all__ = ["CACHES", "CONTIGUOUS", "DTYPES", "GRAD_OPERANDS", "Alignment", "Mask", "Memory", "Problem", "Window"]
