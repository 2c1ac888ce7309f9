"""Reasons to refuse that several of torch's operators share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.attention

from attnswitch.machine.device import Device, release
from attnswitch.problem import Problem

from ..own.through_torch import readable

__all__ = [
    "ATOMIC",
    "common",
    "mask_loses_bits",
    "needs_cuda",
    "needs_half",
    "stands_aside",
    "usual",
    "version",
]

#: Stands for a version that is not known: nothing that was fixed is held against it.
NEWEST = (9999,)
#: Why a backward with atomic additions is not deterministic.
ATOMIC = "deterministic=True: the backward adds to dQ atomically, unless torch.use_deterministic_algorithms is on"


def usual(problem: Problem) -> bool:
    """Whether nothing about ``problem`` is such that ``common`` could have a reason."""
    p = problem
    if p.softcap or p.seeded or p.lse or p.query.align + p.key.align + p.value.align + p.attn_mask.align < 64:
        return False
    return not (p.query.negative or p.key.negative or p.value.negative or p.attn_mask.negative)


def common(problem: Problem, *, has_lse: bool) -> Iterator[str]:
    """Those of all four operators, of which some return no lse."""
    if problem.softcap:
        yield f"softcap={problem.softcap}: torch's attention has none"
    if problem.dropout and problem.seeded:
        yield "a dropout seed was given: torch draws from its own generator only; leave seed out"
    if problem.lse and not has_lse:
        yield "return_lse: this operator returns none"
    if problem.lse and problem.grads and has_lse:
        yield f"return_lse with gradients (grad={problem.grads}): the operator's lse is not differentiable"
    yield from readable(problem)


def version(device: Device, software: str) -> tuple[int, ...]:
    """Version of ``software`` on ``device``, the newest where it is not known."""
    for name, text in device.versions:
        if name == software:
            return _numbers(text) or NEWEST
    return NEWEST


_numbers = functools.lru_cache(maxsize=64)(release)


def needs_cuda(device: Device, least: tuple[int, int]) -> str | None:
    """It runs on NVIDIA GPUs from a compute capability on, with a torch built for CUDA."""
    if device.kind != "cuda":
        return f"it runs on NVIDIA GPUs, and the arrays are on {device.kind}"
    if device.capability is not None and device.capability < least:
        return f"{device}: needs compute capability {least[0]}.{least[1]} or later"
    if "+cpu" in (pytorch := dict(device.versions).get("torch", "")):
        return f"torch {pytorch} was built without CUDA; install a CUDA build"
    return None


def stands_aside() -> str | None:
    """Its operators are another implementation's, until ``torch.nn.attention.restore_flash_attention_impl``."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    name = current and current()
    return f"torch's flash attention is {name} now, by activate_flash_attention_impl" if name else None


def needs_half(problem: Problem) -> Iterator[str]:
    """It exists for the 16-bit types only."""
    if problem.dtype not in ("float16", "bfloat16"):
        yield f"dtype {problem.dtype}: the kernel exists for float16 and bfloat16"


def mask_loses_bits(problem: Problem) -> Iterator[str]:
    """The bias must have the operands' type, and rounding a finer mask to it would change the problem."""
    if problem.mask and not problem.mask.is_bool and problem.mask.dtype != problem.dtype:
        exact = problem.mask.dtype in ("float16", "bfloat16") and problem.dtype == "float32"
        if not exact:
            yield (
                f"attn_mask is {problem.mask.dtype} and the operands {problem.dtype}: the kernel's bias has their type,"
                " and rounding the mask to it would change the problem"
            )
