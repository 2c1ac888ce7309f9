"""The Triton kernel that writes a bias, and its launch. Imported where it is first needed."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Triton's language has no types for mypy.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["started"]


@triton.jit  # type: ignore[untyped-decorator]
def _compose(
    mask,
    lengths,
    bias,
    dead,
    lift,
    queries,
    keys,
    width,
    heads,
    rows,
    left,
    right,
    step_b,
    step_h,
    step_q,
    step_k,
    step_length,
    KIND: tl.constexpr,  # noqa: N803 - capitals are what a kernel is compiled for
    LENGTHS: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
    BOTTOM: tl.constexpr,  # noqa: N803
    FAR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LIFT: tl.constexpr,  # noqa: N803
):
    """A row of the bias a program: its maximum in one pass over the keys, what is written in another.

    mask: bool as bytes (KIND 1), float (2), or none (0), with four strides; lengths (B,). bias (B, H, rows, width).
    """
    row = tl.program_id(0).to(tl.int64)
    query, head, batch = row % rows, row // rows % heads, row // rows // heads
    length = keys
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + batch * step_length), keys).to(tl.int32)
    centre = query.to(tl.int32)
    if BOTTOM:
        centre += length - queries
    start = mask + batch * step_b + head * step_h + query * step_q
    top = tl.full((), float("-inf"), tl.float32)
    sees = tl.full((), 0, tl.int32)
    for first in range(0, keys, BLOCK):
        j = first + tl.arange(0, BLOCK)
        added = _added(start, j, length, centre, left, right, step_k, KIND, LEFT, RIGHT)
        sees = tl.maximum(sees, tl.max(tl.where(added != float("-inf"), 1, 0), 0))  # NaN is seen
        top = tl.maximum(top, tl.max(tl.where(added == added, added, float("-inf")), 0))
    shift = tl.where((sees > 0) & (tl.abs(top) > FAR) & (top != float("-inf")), top, 0.0)
    for first in range(0, width, BLOCK):
        j = first + tl.arange(0, BLOCK)
        added = _added(start, j, length, centre, left, right, step_k, KIND, LEFT, RIGHT)
        shown = tl.where(sees > 0, added - shift, 0.0)
        tl.store(bias + row * width + j, shown.to(bias.dtype.element_ty), mask=j < width)
    tl.store(dead + row, tl.where(sees == 0, 1, 0).to(tl.uint8))
    if LIFT:
        tl.store(lift + row, tl.where(sees > 0, shift, float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    start,
    j,
    length,
    centre,
    left,
    right,
    step_k,
    KIND: tl.constexpr,  # noqa: N803
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
):
    """What is added to the scores of keys ``j`` of a row: the mask, -inf where they are hidden."""
    seen = j < length
    if LEFT:
        seen = seen & (j >= centre - left)
    if RIGHT:
        seen = seen & (j <= centre + right)
    added = tl.zeros_like(j).to(tl.float32)
    if KIND == 1:
        seen = seen & (tl.load(start + j.to(tl.int64) * step_k, mask=seen, other=0) != 0)
    if KIND == 2:
        added = tl.load(start + j.to(tl.int64) * step_k, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, added, float("-inf"))


def started(
    programs: int, arrays: Sequence[Any], passed: tuple[int, ...], flags: dict[str, Any]
) -> Callable[[Sequence[int]], None] | None:
    """Launch it; and how to launch it again on arrays that lie alike, given their addresses. None if interpreted."""
    tensors = [_bytes(x) for x in arrays]
    compiled = _compose[(programs,)](*tensors, *passed, **flags, num_warps=4)
    if type(_compose).__name__ != "JITFunction":
        return None
    from triton import knobs
    from triton.runtime import driver

    constants = tuple(flags[name] for name in _compose.arg_names[len(tensors) + len(passed) :])
    rest = (*passed, *constants)
    device, stream = torch.cuda.current_device(), driver.active.get_current_stream
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return lambda addresses: compiled[(programs, 1, 1)](*addresses, *rest)

    def launch(addresses: Sequence[int]) -> None:
        if _set(knobs.runtime.launch_enter_hook) or _set(knobs.runtime.launch_exit_hook):  # by a profiler
            compiled[(programs, 1, 1)](*addresses, *rest)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *addresses, *rest)

    return launch


def _bytes(array: Any) -> Any:
    """An array as the kernel takes it: bool as bytes; 0 for none."""
    if array is None:
        return 0
    return array.view(torch.uint8) if array.dtype == torch.bool else array.detach()


def _set(hook: Any) -> Any:
    return getattr(hook, "calls", hook)
