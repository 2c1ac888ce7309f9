"""What a library's kernel takes, as facts, and the reasons that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.through_torch import fits_grid, readable

__all__ = ["HALF", "Takes", "reasons", "right_is_dropped", "sided"]

#: The 16-bit types.
HALF = ("float16", "bfloat16")
#: The largest head dimension of every library.
_WIDEST = 256


class Takes(NamedTuple):
    """What a kernel takes on NVIDIA GPUs. What is left at its default is refused."""

    #: The library's call, for reasons.
    call: str
    dtypes: tuple[str, ...] = HALF
    #: The least compute capability, and the majors that there are kernels for; empty: all from the least on.
    least: tuple[int, int] = (8, 0)
    majors: tuple[int, ...] = ()
    #: Head dimensions: up to ``_WIDEST``, in steps, or those of ``dims``; whether value may have another.
    step: int = 8
    dims: tuple[int, ...] = ()
    unequal: bool = False
    #: Whether sequences may lie one after another, and whether a dense batch is taken.
    varlen: bool = False
    dense: bool = True
    window: bool = False
    #: Whether positions count from the last query and key ("bottom_right"); else from the first.
    bottom_right: bool = True
    softcap: bool = False
    dropout: bool = False
    #: Whether scale may be 0 or negative.
    any_scale: bool = True
    #: Whether there are gradients of key heads that are shared.
    grouped_grads: bool = True
    grads: bool = True
    #: Whether gradients repeat their bits where they are asked to.
    deterministic: bool = False
    lse: bool = False
    #: Whether the lse has a gradient.
    lse_grads: bool = False


def reasons(takes: Takes, problem: Problem, device: Device) -> Iterator[str]:
    """Why ``problem`` is not taken on ``device``; those that most problems meet come first."""
    yield from _of_device(takes, device)
    yield from _of_form(takes, problem)
    yield from _of_operands(takes, problem)
    yield from _of_positions(takes, problem)
    yield from _of_gradients(takes, problem)


def _of_device(takes: Takes, device: Device) -> Iterator[str]:
    if device.kind != "cuda":
        yield f"it runs on NVIDIA GPUs, and the arrays are on {device.kind}"
    elif device.capability is not None:
        if device.capability < takes.least:
            yield f"{device}: needs compute capability {takes.least[0]}.{takes.least[1]} or later"
        elif takes.majors and device.capability[0] not in takes.majors:
            listed = " and ".join(f"{major}.x" for major in takes.majors)
            yield f"{device}: its kernels are known here for compute capability {listed}"


def _of_form(takes: Takes, problem: Problem) -> Iterator[str]:
    p = problem
    if p.varlen and not takes.varlen:
        yield f"varlen: {takes.call} takes no sequences one after another"
    if not (p.varlen or p.page or takes.dense):
        yield f"a dense batch: {takes.call} takes sequences one after another (attention_varlen)"
    if p.mask is not None:
        yield f"attn_mask ({p.mask.dtype}): {takes.call} has none"
    if p.key_lengths and not p.page:
        yield f"key_lengths: {takes.call} has none for a dense batch"
    if p.softcap and not takes.softcap:
        yield f"softcap={p.softcap}: {takes.call} has none"
    if p.dropout and not takes.dropout:
        yield f"dropout_p={p.dropout}: {takes.call} has none"
    elif p.dropout and p.seeded:
        yield "a dropout seed was given: the library draws from a generator of its own; leave seed out"
    if p.dropout == 1.0 and takes.dropout:
        yield f"dropout_p=1.0: {takes.call} takes less than 1"
    if p.nonfinite:
        yield "NaN, inf or what overflows was seen: hidden positions weigh 0 there, and 0 * NaN is NaN"


def _of_operands(takes: Takes, problem: Problem) -> Iterator[str]:
    p = problem
    if p.dtype not in takes.dtypes:
        yield f"dtype {p.dtype}: {takes.call} takes {' and '.join(takes.dtypes)}"
    if not takes.unequal and p.dim_qk != p.dim_v:
        yield f"dim_qk={p.dim_qk}, dim_v={p.dim_v}: {takes.call} takes value heads as wide as key heads"
    for name, dim in (("dim_qk", p.dim_qk), ("dim_v", p.dim_v)):
        if takes.dims and dim not in takes.dims:
            yield f"{name}={dim}: {takes.call} has kernels for {', '.join(map(str, takes.dims))}"
        elif dim > _WIDEST:
            yield f"{name}={dim}: head dimensions up to {_WIDEST}"
        elif dim % takes.step:
            yield f"{name}={dim}: a multiple of {takes.step} is needed"
    yield from fits_grid(p)
    if not takes.any_scale and p.scale is not None and p.scale <= 0:
        yield f"scale={p.scale}: {takes.call} takes positive ones"
    yield from readable(p)


def _of_positions(takes: Takes, problem: Problem) -> Iterator[str]:
    p = problem
    if p.window is not None and not takes.window:
        yield f"window={p.window}: {takes.call} has none"
    if not (p.positional or p.alibi) or p.bottom_right == takes.bottom_right:
        return
    square = p.seq_q == p.seq_k and not p.key_lengths and not p.page
    if square and not p.varlen:
        return
    if p.sees_all and not p.alibi:
        return
    way = "bottom-right" if takes.bottom_right else "top-left"
    other = "bottom_right" if takes.bottom_right else "top_left"
    yield (
        f"causal_alignment={p.alignment!r}: {takes.call} counts positions {way}; causal_alignment={other!r} says the"
        " same where each sequence has as many queries as keys"
    )


def _of_gradients(takes: Takes, problem: Problem) -> Iterator[str]:
    p = problem
    if p.lse and not takes.lse:
        yield f"return_lse: {takes.call} returns none"
    if not p.grads:
        return
    if not takes.grads:
        yield f"gradients (grad={p.grads}): {takes.call} has none"
        return
    if p.group > 1 and not takes.grouped_grads:
        yield f"gradients of {p.heads_kv} key heads shared by {p.heads_q} query heads: {takes.call} has none"
    if p.deterministic and not takes.deterministic:
        yield f"deterministic=True with gradients: that those of {takes.call} repeat their bits is not known"
    if p.lse and takes.lse and not takes.lse_grads:
        yield f"return_lse with gradients (grad={p.grads}): the lse of {takes.call} is not differentiable"
    if p.sinks:
        yield "sinks with gradients: theirs are left out here"


def sided(problem: Problem, unlimited: int | None) -> tuple[int | None, int | None]:
    """The window as (left, right), causal included, both ends inclusive; ``unlimited`` stands for no limit."""
    left, right = problem.reach if problem.hides_by_position else (None, None)
    return (unlimited if left is None else left), (unlimited if right is None else right)


def right_is_dropped(problem: Problem) -> Iterator[str]:
    """FlashAttention-2 takes a window that reaches as many keys as there are for one that reaches all.

    Counted from the last query and key, the first queries see none of the last keys then if there are more queries.
    """
    p = problem
    left, right = sided(p, None)
    if left is right is None or p.seq_q <= p.seq_k + 1:
        return
    if right is None or right >= p.seq_k:
        yield (
            f"window={p.window} with {p.seq_q} queries and {p.seq_k} keys: a window that reaches {p.seq_k} keys or more"
            " to the right is not kept apart from one without a limit"
        )
