"""The least that every kernel here asks of Triton's interpreter: a loop to a number that is an argument."""

import torch
import triton
import triton.language as tl


@triton.jit
def _count(found, upto):
    total = 0
    for _ in range(0, upto):
        total += 1
    tl.store(found, total)


def interpreter_fault() -> str | None:
    """What the interpreter raises, or None. Before Triton 3.9 it may not know the NumPy that is here."""
    found = torch.zeros(1, dtype=torch.int32)
    try:
        _count[(1,)](found, 3)
    except Exception as error:  # its own, around any
        return f"{type(error).__name__}: {error}"
    return None if int(found) == 3 else f"it counted to {int(found)} and not to 3"
