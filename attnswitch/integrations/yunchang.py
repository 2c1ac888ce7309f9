"""attnswitch as a kernel of yunchang, which spreads a sequence over processes by ring, by Ulysses or both (USP).

After ``register()``, ``AttnType("attnswitch")`` selects it in ``LongContextAttention``, ``UlyssesAttention`` and the
functions of the rings. yunchang asks one function for the kernel of an ``AttnType``, once for each part. A ring calls
that for the output and lse of a part, merges these, and calls for the gradients of each part with output and lse of all
keys. What is right in yunchang stays as it is; where its rings make something wrong of a call, that is refused.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import yunchang

from attnswitch import api
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.integrations.members import member
from attnswitch.machine import registry
from attnswitch.names import one_of
from attnswitch.planning import policy as policies
from attnswitch.planning.policy import Policy

__all__ = ["NAME", "register"]

#: The value of ``yunchang.kernels.AttnType`` that means attnswitch.
NAME = "attnswitch"
_KERNELS, _ULYSSES = "yunchang.kernels", "yunchang.ulysses.attn_layer"
#: The rings, and the types whose gradients their backward keeps.
_RINGS = {
    "yunchang.ring.ring_flash_attn": (torch.bfloat16,),
    "yunchang.ring.zigzag_ring_flash_attn": (torch.bfloat16, torch.float16),
    "yunchang.ring.stripe_flash_attn": (torch.bfloat16, torch.float16),
}
_SELECT, _ASKED = "select_flash_attn_impl", ["impl_type", "stage", "attn_processor"]
#: Rings with a kernel of their own, whatever ``attn_type`` says.
_FIXED = ("basic_pytorch", "basic_npu")
_HEADS = "UlyssesAttention, which has the whole sequence of its heads in one process"
_REMEDY = f"use {_HEADS}"
#: What the latest ``register`` says of every call.
_said: dict[str, Any] = {}


def register(backend: str | None = None, policy: Policy | str | None = None) -> None:
    """Make ``AttnType("attnswitch")`` a kernel of yunchang's, for the whole process (tried: 0.6.4).

    ``yunchang.kernels.AttnType`` gets one more member, and the function that finds a kernel is wrapped in each module
    that calls it. Other members pass through. What is registered again changes what the member means.

    Args:
        backend: as for ``attention``: this one or an error; the planner's choice if None.
        policy: as for ``attention``.

    Raises:
        InvalidProblem: the backend or the policy is not known.
        Unsupported: this version of yunchang finds its kernels in another way.
    """
    modules = _modules()
    if backend is not None:
        registry.load(backend)
    said = {"backend": backend, "policy": None if policy is None else str(policies.effective(policy))}
    ours = member(modules[_KERNELS].AttnType, NAME)
    _said.clear()
    _said.update({name: given for name, given in said.items() if given is not None})
    for name, module in modules.items():
        select = getattr(module, _SELECT)
        if not hasattr(select, "_attnswitch"):
            setattr(module, _SELECT, _selecting(select, ours, _RINGS.get(name)))
    rings = importlib.import_module("yunchang.hybrid.utils").RING_IMPL_DICT
    for name in _FIXED:
        if name in rings and not hasattr(rings[name], "_attnswitch"):
            rings[name] = _refusing(name, rings[name], ours)


# -- where yunchang finds its kernels ----------------------------------------------------------------------------------


def _modules() -> dict[str, ModuleType]:
    """The modules that ask for a kernel. Raises ``Unsupported`` where they are not as they are known here."""
    found = f"yunchang {getattr(yunchang, '__version__', 'of no version')} cannot take attnswitch as a kernel"
    remedy = "use yunchang 0.6.4"
    modules = {}
    for name in (_KERNELS, _ULYSSES, *_RINGS):
        try:
            modules[name] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise Unsupported(f"{found}: {error}; {remedy}") from error
        select = getattr(modules[name], _SELECT, None)
        if not callable(select) or list(inspect.signature(select).parameters) != _ASKED:
            raise Unsupported(f"{found}: {name} has no {_SELECT}({', '.join(_ASKED)}); {remedy}")
    names = getattr(modules[_KERNELS], "AttnType", None)
    if not (isinstance(names, type) and issubclass(names, enum.Enum)):
        raise Unsupported(f"{found}: {_KERNELS} has no enumeration AttnType; {remedy}")
    return modules


def _selecting(select: Callable[..., Any], ours: enum.Enum, kept: tuple[torch.dtype, ...] | None) -> Callable[..., Any]:
    """``select`` of one module, which knows attnswitch as well."""

    @functools.wraps(select)
    def select_flash_attn_impl(impl_type: Any, stage: str = "fwd-bwd", attn_processor: Any = None) -> Any:
        if impl_type is not ours:
            return select(impl_type, stage, attn_processor)
        if attn_processor is not None:
            raise Unsupported("attn_processor beside AttnType('attnswitch'): it is a kernel of its own; leave one out")
        stages = {
            "fwd-only": _part,
            "bwd-only": functools.partial(_gradients_of_part, kept),
            "fwd-bwd": _whole,
        }
        if stage not in stages:
            raise InvalidProblem(f"stage={stage!r}: {one_of(stage, stages)}")
        return stages[stage]

    select_flash_attn_impl._attnswitch = True  # type: ignore[attr-defined]
    return select_flash_attn_impl


def _refusing(name: str, ring: Callable[..., Any], ours: enum.Enum) -> Callable[..., Any]:
    """A ring that would compute by another kernel than the one asked for, without a word."""

    @functools.wraps(ring)
    def refusing(*args: Any, **options: Any) -> Any:
        if options.get("attn_type") is ours:
            raise Unsupported(f"ring_impl_type={name!r} has a kernel of its own; use 'basic', 'zigzag' or 'strip'")
        return ring(*args, **options)

    refusing._attnswitch = True  # type: ignore[attr-defined]
    return refusing


# -- the kernels -------------------------------------------------------------------------------------------------------


def _whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """All of a sequence for some heads: output (B, Lq, Hq, Dv), differentiable, by flash-attn's arguments.

    query is (B, Lq, Hq, D), key (B, Lk, Hkv, D), value (B, Lk, Hkv, Dv). ``alibi_slopes`` are of the heads that are
    here, (Hq,) or (B, Hq).
    """
    if return_attn_probs:
        raise Unsupported("return_attn_probs: attnswitch gives no attention weights")
    left, right = window_size
    given: dict[str, Any] = {
        "window": None if left < 0 and right < 0 else (None if left < 0 else left, None if right < 0 else right),
        "softcap": softcap or 0.0,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "dropout_p": dropout_p,
    }
    return api.attention(query, key, value, **_as_flash(softmax_scale, causal), **given)


def _part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Lq, Hq, Dv) and lse (B, Hq, Lq) of some of the keys, which the ring merges."""
    _refuse(dropout_p, window_size, alibi_slopes)
    if query.dtype == torch.float64:
        raise Unsupported(f"float64: yunchang's rings merge their parts in float32; {_REMEDY}")
    said = _as_flash(softmax_scale, causal)
    found: tuple[torch.Tensor, torch.Tensor] = api.attention(
        query, key, value, softcap=softcap or 0.0, return_lse=True, **said
    )
    return found


def _gradients_of_part(
    kept: tuple[torch.dtype, ...] | None,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    rng_state: Any = None,
) -> None:
    """Gradients of the operands into three buffers like them, from output and lse of all keys."""
    *buffers, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic = rest
    _refuse(dropout_p, window_size, alibi_slopes)
    if deterministic:
        raise Unsupported(f"deterministic=True: yunchang's rings do not tell their forward; {_REMEDY}")
    if kept is not None and query.dtype not in kept:
        fault = (
            "rounds that of the query to bfloat16"
            if query.dtype == torch.float16
            else "writes each part's over the sum of those before"
        )
        raise Unsupported(f"gradients in {query.dtype}: this ring of yunchang {fault}; use bfloat16, or {_HEADS}")
    results: dict[str, Any] = {"out": out, "lse": lse, "softcap": softcap or 0.0}
    found = api.attention_backward(grad_out, query, key, value, **results, **_as_flash(softmax_scale, causal))
    for buffer, gradient in zip(buffers, found[:3], strict=True):
        buffer.copy_(gradient)


def _as_flash(softmax_scale: float | None, causal: bool) -> dict[str, Any]:
    """Keywords of ``attention`` for what every kernel is told."""
    return {"scale": softmax_scale, "is_causal": causal, "causal_alignment": "bottom_right", "layout": "BLHD", **_said}


def _refuse(dropout_p: float, window_size: tuple[int, int], alibi_slopes: torch.Tensor | None) -> None:
    """What means something else in a part than it does in the whole."""
    if dropout_p:
        raise Unsupported(f"dropout_p={dropout_p}: yunchang's rings keep no state for the backward to drop the same")
    if tuple(window_size) != (-1, -1):
        raise Unsupported(
            f"window_size={tuple(window_size)}: in yunchang's rings it counts from the corner of each part, not of the"
            f" sequence; {_REMEDY}"
        )
    if alibi_slopes is not None:
        raise Unsupported(f"alibi_slopes: in yunchang's rings distances count within each part; {_REMEDY}")
