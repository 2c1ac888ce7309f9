"""The public functions on batches, and plans. Each reads what it was told, and hands it on to ``attnswitch.call``.

Calls of dense operands go by ``attend`` there; those with sinks or slopes by ``headwise``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Never, overload

from attnswitch.arrays import Array, Intercepted
from attnswitch.call import like_torch
from attnswitch.call import options as read
from attnswitch.call.attend import problem_of
from attnswitch.call.backward import gradients
from attnswitch.call.entry import call, compiled_gradients, is_traced, run_plan
from attnswitch.call.measuring import at_sight
from attnswitch.call.options import Options, seed_of
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.backend import Gradients
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy, effective
from attnswitch.problem import Alignment, Problem, Window

__all__ = ["attention", "attention_backward", "backends", "explain", "plan", "scaled_dot_product_attention"]


#: How a message about a keyword of ``attention_backward`` begins.
_BACKWARD = "attention_backward: there is"


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    causal_alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    key_lengths: Array | Sequence[int] | None = None,
    return_lse: bool = False,
    layout: str = "BHLD",
    deterministic: bool = False,
    seed: int | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **unknown: Never,
) -> Any:
    """Exact attention, ``softmax(scale * Q K^T + ...) V``, by the best backend that takes the call.

    Args:
        query: (B, Hq, Lq, D), any library with DLPack; float16, bfloat16, float32 or float64; any strides.
        key: (B, Hkv, Lk, D) with Hq a multiple of Hkv; same library, device and dtype as query.
        value: (B, Hkv, Lk, Dv).
        attn_mask: bool (True = attend) or float (added to the scores), broadcastable to (B, Hq, Lq, Lk).
            A float mask hides a position where it is -inf.
        dropout_p: probability of dropping a softmax weight; kept ones are divided by 1 - dropout_p.
        is_causal: query i sees key j when j <= i + offset; see causal_alignment.
        scale: factor on the scores, 1/sqrt(D) by default; any finite number.
        enable_gqa: unequal head counts need no flag; False forbids them.
        causal_alignment: offset 0 for "top_left" (torch); (key length - Lq) for "bottom_right" (flash-attn).
        window: (left, right) keys around position i + offset, None for unlimited.
        softcap: if positive, scores become softcap * tanh(scores / softcap) before any mask.
        key_lengths: (B,) integers; keys at or past the length do not exist.
        return_lse: also return the natural log of each row's softmax denominator, (B, Hq, Lq), float32
            (float64 for float64). Differentiable.
        layout: "BHLD", or "BLHD" for arrays (B, L, H, D), the output included: contiguous, unless
            query lies in memory as (B, H, L, D), which it then does too.
        deterministic: only backends whose results, gradients included, are bitwise repeatable; so too where
            ``torch.use_deterministic_algorithms`` is on.
        seed: makes the dropout mask a function of (seed, batch, head, i, j), the same on every backend.
        sinks: (Hq,) of any float dtype: one more key for every row, whose score is sinks[h] as it is, and whose value
            is 0. lse counts it; a row that sees nothing else has output 0 and lse sinks[h]. -inf means none.
        alibi_slopes: (Hq,) or (B, Hq) of any float dtype: slope * abs(i + offset - j) is taken from the scores after
            softcap. No gradient.
        backend: use this one or raise; default is the planner's choice (see ``explain``).
        policy: what that choice may rest on: "estimate", "measure", "learn" or "wisdom-only" (see ``Policy``).
            Default is that of ``using``, then of ATTNSWITCH_POLICY, then "estimate".
        **unknown: refused, with the name that may have been meant.

    Returns:
        The output (B, Hq, Lq, Dv), or (output, lse), in the library, device and dtype of query. A row that sees no key
        has output 0 and lse -inf. torch tensors that require gradients get them, a float attn_mask and sinks included.

    Raises:
        InvalidProblem: the arguments make no sense together, or there is no such argument.
        Unsupported: no backend, or not the one named, takes the problem; the message holds every reason.
        BackendUnavailable: the backend named cannot run on this machine.
    """
    if unknown:
        raise read.unknown(next(iter(unknown)), "attention: there is", attention)
    numbers = dropout_p, is_causal, scale, enable_gqa
    rest = causal_alignment, window, softcap, return_lse, layout, deterministic
    if sinks is not None or alibi_slopes is not None:
        from attnswitch.call import headwise  # which programs without such calls do not wait for

        heads, said = PerHead(sinks, alibi_slopes), (*numbers, *rest)
        return headwise.attend(query, key, value, attn_mask, key_lengths, seed, backend, policy, *said, heads=heads)
    return call(query, key, value, attn_mask, key_lengths, seed, backend, policy, *numbers, *rest)


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``attention`` as ``torch.nn.functional.scaled_dot_product_attention`` has it.

    Args:
        query: (..., Hq, Lq, D), two axes at least. Leading axes of query, key and value broadcast. Tensors of torch may
            be nested; under autocast they are cast as torch casts them, float64 never.
        key: (..., Hkv, Lk, D); see query.
        value: (..., Hkv, Lk, Dv); see query.
        attn_mask: as for ``attention``, broadcastable to (..., Hq, Lq, Lk), or a ``CausalBias`` of torch's. Together
            with ``is_causal``, which torch refuses, both hide.
        dropout_p: as for ``attention``, like is_causal and scale.
        is_causal: see dropout_p.
        scale: see dropout_p.
        enable_gqa: needed for head counts of key and value that divide the query's; a single head needs none.

    Returns:
        The output (..., Hq, Lq, Dv); nested for nested tensors.

    Raises what ``attention`` raises.
    """
    numbers = dropout_p, is_causal, scale, enable_gqa
    function = scaled_dot_product_attention
    return like_torch.scaled_dot_product_attention(query, key, value, attn_mask, *numbers, function=function)


def attention_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    grad_lse: Array | None = None,
    attn_mask: Array | None = None,
    mask_grad: bool = False,
    key_lengths: Array | Sequence[int] | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    sinks_grad: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of ``attention`` for libraries without autograd, and of parts of the keys.

    With ``out`` and ``lse`` of more keys than are given (``merge``), these are a part's gradients: those of its keys
    and values, and what it adds to that of the query, which over all parts is the whole's. ``grad_out`` and
    ``grad_lse`` are the whole's as well, the same for each part.

    Args:
        grad_out: upstream gradient of the output, (B, Hq, Lq, Dv).
        query: as given to ``attention``, like key, value, attn_mask, key_lengths and backend.
        key: see query.
        value: see query.
        out: what ``attention(..., return_lse=True)`` or ``merge`` returned; computed again where one is left out.
        lse: see out.
        grad_lse: upstream gradient of lse, (B, Hq, Lq); None means zero.
        attn_mask: see query.
        mask_grad: also return the gradient of a float attn_mask, in its shape.
        key_lengths: see query.
        sinks: see query.
        alibi_slopes: see query.
        sinks_grad: also return the gradient of sinks.
        backend: see query.
        policy: see query.
        **options: the other keywords of ``attention``; dropout needs a seed, since the mask must be the same again.

    Returns:
        Gradients of query, key, value and attn_mask (None unless ``mask_grad``), like their operands. With
        ``sinks_grad`` it has an attribute ``sinks`` besides, (Hq,); it unpacks into the same four.

    Raises:
        InvalidProblem, Unsupported, BackendUnavailable: as ``attention``.
    """
    if grad_out is None:
        raise InvalidProblem("grad_out is None: expected the upstream gradient of the output, (B, Hq, Lq, Dv)")
    traced = is_traced(query)
    heads = PerHead(sinks, alibi_slopes)
    mask_grad, sinks_grad = read.flag("mask_grad", mask_grad), read.flag("sinks_grad", sinks_grad)
    seed = options.pop("seed", None)
    asked = options | {"return_lse": options.get("return_lse", grad_lse is not None)}
    given = read.in_order(asked, _BACKWARD, attention_backward)
    if not traced:
        said = read.of_call(*given)
    if "return_lse" in options:
        raise InvalidProblem("attention_backward returns gradients only: leave return_lse out")
    if sinks_grad and sinks is None:
        raise InvalidProblem("a gradient of sinks was asked for, but there are none")
    wanted = "qkvm" if mask_grad else "qkv"
    if traced:
        call = (grad_out, grad_lse), (out, lse), wanted, (query, key, value, attn_mask, key_lengths)
        return compiled_gradients(*call, seed, backend, policy, *given, heads=heads, sinks_grad=sinks_grad)
    seed = seed_of(seed)
    read.check_remembered("attention", said.dropout_p, seed)
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    upstream = {"out": out, "lse": lse, "grad_lse": grad_lse}
    way: Any = gradients
    if sinks is not None or alibi_slopes is not None:
        from attnswitch.call import headwise

        way = functools.partial(headwise.gradients, heads=heads, sinks_grad=sinks_grad)
    try:
        found: Gradients = way(grad_out, operands, key_lengths, seed, said, backend, policy, **upstream, wanted=wanted)
    except Intercepted:
        raise InvalidProblem(
            "attention_backward of tensors that only torch can read (of a mode, torch.func, or a subclass): call"
            " attention, and let torch differentiate it"
        ) from None
    return found


@overload
def plan(
    query: Problem | str, *, device: Device | str = ..., backend: str | None = ..., policy: Policy | str | None = ...
) -> Plan: ...
@overload
def plan(
    query: Array,
    key: Array,
    value: Array,
    *,
    backend: str | None = ...,
    policy: Policy | str | None = ...,
    **options: Any,
) -> Plan: ...
def plan(
    query: Any,
    key: Array = None,
    value: Array = None,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Plan:
    """The plan for a call (``plan(query, key, value, is_causal=True)``) or a described problem (``plan(problem)``).

    Called with arrays of its problem, it is the attention: ``plan(query, key, value)(query, key, value)``. With
    ``cu_seqlens_q`` among the keywords the call is ``attention_varlen``, and with ``block_table`` it is
    ``attention_paged``, key and value being the caches.

    Args:
        query: the array, or a ``Problem`` or its text form, which then stands alone.
        key: as for ``attention``, like value and the options.
        value: see key.
        **options: see key.
        device: for a described problem: a ``Device``, or text such as "cpu" (the default), "cuda:0" or "h200", here or
            not. Arrays bring their own.
        backend: as for ``attention``.
        policy: as for ``attention``.

    Raises:
        InvalidProblem, Unsupported, BackendUnavailable: as ``attention``.
    """
    return planner.require(explain(query, key, value, device=device, backend=backend, policy=policy, **options))


def explain(
    query: Any,
    key: Array = None,
    value: Array = None,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    attn_mask: Array | None = None,
    key_lengths: Array | Sequence[int] | None = None,
    seed: int | None = None,
    cu_seqlens_q: Array | Sequence[int] | None = None,
    cu_seqlens_k: Array | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Array | Sequence[Sequence[int]] | None = None,
    cache_lengths: Array | Sequence[int] | None = None,
    num_splits: int | None = None,
    tree_mask: Array | None = None,
    key_scale: Array | Sequence[float] | float | None = None,
    value_scale: Array | Sequence[float] | float | None = None,
    sinks: Array | Sequence[float] | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    **options: Any,
) -> Plan:
    """As ``plan``, but where nothing fits it returns the plan that says so. Print it to read every reason."""
    policy = effective(policy)
    cache = block_table, cache_lengths, num_splits, tree_mask, key_scale, value_scale
    if isinstance(query, (Problem, str)):
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        beside = key, value, attn_mask, key_lengths, seed, *sequences, *cache, sinks, alibi_slopes
        if any(given is not None for given in beside) or options:
            raise InvalidProblem("a described problem stands alone: put options such as causal into the problem")
        problem = Problem.parse(query) if isinstance(query, str) else query
        return _made(problem, _device(device), backend, policy)
    if device is not None:
        raise InvalidProblem(
            f"device={device!r} with arrays: they are planned for where they are; describe the problem"
        )
    if key is None or value is None:
        raise InvalidProblem("query stands without key and value; a problem without arrays is a Problem or its text")
    if any(given is not None for given in cache):
        from attnswitch.call import paged

        others = {"attn_mask": attn_mask, "key_lengths": key_lengths, "seed": seed, "cu_seqlens_k": cu_seqlens_k}
        options |= {name: given for name, given in others.items() if given is not None}
        queries, heads = (cu_seqlens_q, max_seqlen_q, num_splits, tree_mask), PerHead(sinks, alibi_slopes)
        where = paged.Beside(block_table, cache_lengths, *queries, key_scale, value_scale, heads)
        return _made(*paged.problem_of((query, key, value), where, options, explain), backend, policy)
    said: Options = read.of_keywords(options, "the call has", explain)
    seed = seed_of(seed)
    heads = PerHead(sinks, alibi_slopes)
    if cu_seqlens_q is not None:
        if attn_mask is not None or key_lengths is not None or "layout" in options:
            raise InvalidProblem(
                "cu_seqlens_q with attn_mask, key_lengths or layout: sequences without padding take none of them"
            )
        from attnswitch.call import varlen

        cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return _made(*varlen.problem_of((query, key, value), cu_seqlens, longest, seed, said, heads), backend, policy)
    if any(given is not None for given in (cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
        raise InvalidProblem("cu_seqlens_k or max_seqlen without cu_seqlens_q, which says where sequences begin")
    if sinks is not None or alibi_slopes is not None:
        from attnswitch.call import headwise

        asked = headwise.problem_of(query, key, value, attn_mask, key_lengths, said, seed, heads)
    else:
        asked = problem_of(query, key, value, attn_mask, key_lengths, said, seed)
    return _made(*asked, backend, policy)


def _device(device: Device | str | None) -> Device:
    if device is not None and not isinstance(device, (Device, str)):
        raise InvalidProblem(f"device={device!r}: expected a Device or text such as cpu, cuda:0 or h200")
    return device if isinstance(device, Device) else Device.parse(device or "cpu")


def _made(problem: Problem, device: Device, backend: str | None, policy: Policy) -> Plan:
    """The plan; under MEASURE, after what it lacks was measured, and under LEARN after that was asked for."""
    at_sight(problem, device, backend, policy)
    return planner.make_plan(problem, device, backend, policy, run_plan)


def backends() -> dict[str, str | None]:
    """Every backend by name, in order of preference, with why it cannot run on this machine (None if it can)."""
    return {name: _absence(registry.load(name)) for name in registry.names()}


def _absence(backend: Any) -> str | None:
    if isinstance(backend, Missing):
        return backend.reason
    try:
        absence: str | None = backend.unavailable()
    except Exception as error:  # a plug-in may fail in any way; that is a fact about it
        return f"{type(error).__name__}: {error}"
    return absence
