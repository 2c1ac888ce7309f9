"""What backends share that are called through torch: reasons against problems and machines, and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .requirements import aligned

__all__ = ["fits_grid", "no_gpu", "readable", "with_sign", "without_padding"]


def readable(problem: Problem) -> Iterator[str]:
    """A tensor can stand for every operand."""
    for role in ("query", "key", "value", "attn_mask"):
        if getattr(problem, role).negative:
            yield f"{role} runs backwards in memory: torch has no negative strides; pass a copy"
        elif reason := aligned(problem, role):
            yield reason


def fits_grid(problem: Problem) -> Iterator[str]:
    """Batch and heads are axes of the launch grid."""
    if max(problem.batch, problem.heads_q) > 65535:
        yield f"batch {problem.batch}, heads {problem.heads_q}: each at most 65535, the limit of a CUDA launch grid"


def no_gpu() -> str | None:
    """Why torch cannot use an NVIDIA GPU on this machine."""
    import torch  # slow to import

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU; it needs one, with a driver for CUDA " + torch.version.cuda
    return None


def with_sign(integers: Any) -> Any:
    """Integers of 32 or 64 bits with a sign, which differences of them do not leave; torch computes with few others."""
    import torch  # slow to import

    return integers if integers.dtype in (torch.int32, torch.int64) else integers.long()


def without_padding(inputs: Inputs) -> Inputs:
    """Keys and values past the lengths zeroed in a copy: what lies there does not exist, NaN included.

    On the CPU NaN there is seen, and such a call does not come here.
    """
    if inputs.key_lengths is None or inputs.query.device.type == "cpu":
        return inputs
    import torch  # slow to import

    past = torch.arange(inputs.key.shape[2], device=inputs.key.device) >= with_sign(inputs.key_lengths)[:, None]
    past = past[:, None, :, None]
    return inputs._replace(key=inputs.key.masked_fill(past, 0.0), value=inputs.value.masked_fill(past, 0.0))
