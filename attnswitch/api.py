"""The public calls: arrays -> facts -> problem -> plan -> kernel, each step in a file of its own."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from attnswitch.arrays import Array
from attnswitch.call import call as calls
from attnswitch.call import recording
from attnswitch.call.call import Call
from attnswitch.choice import plan_of
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients
from attnswitch.planning import planner
from attnswitch.planning.planner import Plan
from attnswitch.planning.policy import Policy, effective
from attnswitch.problem import Alignment, Problem, Window
from attnswitch.problem.options import Options
from attnswitch.problem.options import of as options_of
from attnswitch.problem.options import of_few as options_of_few

__all__ = ["attention", "attention_backward", "run_plan", "scaled_dot_product_attention"]


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
    backend: str | None = None,
    policy: Policy | str | None = None,
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
        layout: "BHLD", or "BLHD" for arrays (B, L, H, D), the output included.
        deterministic: only backends whose results, gradients included, are bitwise repeatable.
        seed: makes the dropout mask a function of (seed, batch, head, i, j), the same on every backend.
        backend: use this one or raise; default is the planner's choice (see ``explain``).
        policy: what that choice may rest on: "estimate", "measure" or "wisdom-only" (see ``Policy``). Default is that
            of ``using``, then of ATTNSWITCH_POLICY, then "estimate".

    Returns:
        The output (B, Hq, Lq, Dv), or (output, lse), in the library, device and dtype of query. A row that sees no key
        has output 0 and lse -inf. torch tensors that require gradients get them, a float attn_mask included.

    Raises:
        InvalidProblem: the arguments make no sense together.
        Unsupported: no backend, or not the one named, takes the problem; the message holds every reason.
        BackendUnavailable: the backend named cannot run on this machine.
    """
    traced = "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling()
    # Most calls say little beside arrays: that is seen faster than all that they could say is looked up.
    if (
        window is None
        and key_lengths is None
        and enable_gqa is None
        and seed is None
        and return_lse is deterministic is traced is False
        and type(dropout_p) is type(softcap) is float
        and dropout_p == 0.0 == softcap
        and type(is_causal) is bool
        and (scale is None or type(scale) is float)
        and layout == "BHLD"
        and causal_alignment == "top_left"
        and (hot := sys.modules.get("attnswitch.call.hot")) is not None
    ):
        options = options_of_few(is_causal, scale)
        found = hot.attend(query, key, value, attn_mask, options, backend, policy)
        if found is None:
            found = _by_every_step(query, key, value, attn_mask, None, options, backend, policy)
        return found[0]
    attend = _untraced(_attend) if traced else _attend
    positions = causal_alignment, window, softcap
    rest = dropout_p, is_causal, scale, enable_gqa, *positions, return_lse, layout, deterministic, seed
    out, lse = attend(query, key, value, attn_mask, key_lengths, backend, policy, *rest)
    return (out, lse) if return_lse else out


def _attend(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    key_lengths: Any,
    backend: str | None,
    policy: Policy | str | None,
    *rest: Any,
) -> tuple[Array, Array | None]:
    """Output and lse; ``rest`` are the options in the order of ``options.of``."""
    options = options_of(*rest)
    if key_lengths is None and (hot := sys.modules.get("attnswitch.call.hot")) is not None:
        found = hot.attend(query, key, value, attn_mask, options, backend, policy)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return _by_every_step(query, key, value, attn_mask, key_lengths, options, backend, policy)


def _by_every_step(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    key_lengths: Any,
    options: Options,
    backend: str | None,
    policy: Policy | str | None,
) -> tuple[Array, Array | None]:
    """The same for a call that is not like one before."""
    policy = effective(policy)
    call = calls.read(query, key, value, attn_mask, key_lengths, options)
    recording.note(call.problem)
    if call.library == "torch":
        importlib.import_module("attnswitch.call.hot")  # for the next one
    return _run(call, plan_of(call, backend, policy))


def _untraced(call: Callable[..., Any]) -> Any:
    """``call`` as torch.compile leaves it alone: one break in the graph, and what runs is what runs without."""
    if call not in _UNTRACED:
        _UNTRACED[call] = sys.modules["torch"].compiler.disable(call, reason="attnswitch chooses a backend in Python")
    return _UNTRACED[call]


_UNTRACED: dict[Callable[..., Any], Any] = {}  # a cache decorator would be traced


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
    """``attention`` with exactly the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    As in torch, unequal head counts need ``enable_gqa=True``. Raises what ``attention`` raises.
    """
    return attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


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
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of ``attention`` for libraries without autograd.

    Args:
        grad_out: upstream gradient of the output, (B, Hq, Lq, Dv).
        query: as given to ``attention``, like key, value, attn_mask, key_lengths and backend.
        key: see query.
        value: see query.
        out: what ``attention(..., return_lse=True)`` returned; computed again where out or lse is left out.
        lse: see out.
        grad_lse: upstream gradient of lse, (B, Hq, Lq); None means zero.
        attn_mask: see query.
        mask_grad: also return the gradient of a float attn_mask, in its shape.
        key_lengths: see query.
        backend: see query.
        policy: see query.
        **options: the other keywords of ``attention``; dropout needs a seed, since the mask must be the same again.

    Returns:
        Gradients of query, key, value and attn_mask (None unless ``mask_grad``), like their operands.

    Raises:
        InvalidProblem, Unsupported, BackendUnavailable: as ``attention``.
    """
    try:
        read = replace(Options(**options), return_lse=grad_lse is not None)
    except TypeError as error:
        raise InvalidProblem(f"attention_backward: {error}; the keywords are those of attention") from None
    if "return_lse" in options:
        raise InvalidProblem("attention_backward returns gradients only: leave return_lse out")
    if read.dropout_p and read.seed is None:
        raise InvalidProblem("attention_backward with dropout needs the seed that attention was given")
    call = calls.read(query, key, value, attn_mask, key_lengths, read, grads="qkvm" if mask_grad else "qkv")
    recording.note(call.problem)
    chosen, kernel = planner.compiled(plan_of(call, backend, policy))
    library = chosen.native(call.library)
    inputs = call.to_backend(library)
    shape = (call.problem.batch, call.problem.heads_q, call.problem.seq_q)
    gradient = calls.beside(grad_out, "grad_out", call, (*shape, call.problem.dim_v), library)
    lse_gradient = calls.beside(grad_lse, "grad_lse", call, shape, library)
    saved_out, saved_lse = None, None
    if chosen.autograd:  # torch keeps what it needs while the backward runs the forward again
        pass
    elif out is None or lse is None:
        saved_out, saved_lse = kernel.forward(inputs)
    else:
        saved_out = calls.beside(out, "out", call, (*shape, call.problem.dim_v), library)
        saved_lse = calls.beside(lse, "lse", call, shape, library)
    grads = kernel.backward(inputs, saved_out, saved_lse, gradient, lse_gradient)
    q, k, v = (call.to_caller(grad, library) for grad in grads[:3])
    mask = grads.attn_mask
    if mask is not None:  # four axes here, and as many as the caller gave there
        mask = mask[(0,) * (4 - calls.rank(attn_mask))]
    mask = call.to_caller(mask, library, heads=False)
    return Gradients(q, k, v, mask)


def run_plan(
    plan: Plan, query: Array, key: Array, value: Array, attn_mask: Any, key_lengths: Any, seed: int | None, layout: str
) -> Any:
    """What calling ``plan`` does; raises as ``Plan.__call__`` says."""
    if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
        return _untraced(run_plan)(plan, query, key, value, attn_mask, key_lengths, seed, layout)
    p = plan.problem
    options = _of_plan(plan, layout) if seed is None and type(layout) is str else _of_plan_with(plan, layout, seed)
    found = None
    if key_lengths is None and (hot := sys.modules.get("attnswitch.call.hot")) is not None:
        found = hot.attend(query, key, value, attn_mask, options, plan.backend, Policy.ESTIMATE, plan)
    if found is None:
        call = calls.read(query, key, value, attn_mask, key_lengths, options)
        planner.require(plan, None)
        if call.problem != p:
            raise InvalidProblem(_not_planned(plan, call.problem))
        recording.note(p)
        found = _run(call, plan)
    out, lse = found
    return (out, lse) if p.lse else out


def _not_planned(plan: Plan, called: Problem) -> str:
    """Why ``plan`` is not for the problem ``called``."""
    if called == plan.problem.replace(nonfinite=True):
        return (
            f"query, key or value holds NaN or inf, and the plan chose {plan.backend} for operands without:"
            " attention chooses for such a call, or make a plan for it"
        )
    return f"the plan is for {plan.problem}, and the call is {called}: make a plan for it"


def _of_plan_with(plan: Plan, layout: str, seed: int | None) -> Options:
    """What the problem of ``plan`` says beside arrays, with what it leaves open."""
    p = plan.problem
    positions = p.alignment, p.window, p.softcap
    return options_of(p.dropout, p.causal, p.scale, None, *positions, p.lse, layout, p.deterministic, seed)


@functools.lru_cache(maxsize=1024)
def _of_plan(plan: Plan, layout: str) -> Options:
    """The same for a plan that is called again and again."""
    return _of_plan_with(plan, layout, None)


def _run(call: Call, plan: Plan) -> tuple[Array, Array | None]:
    """Output and lse in the caller's library and layout, differentiable where torch asks for it."""
    backend, kernel = planner.compiled(plan)
    if call.problem.dropout and call.inputs.seed is None and backend.wants_seed:
        call = calls.with_drawn_seed(call)
    library = backend.native(call.library)
    if call.problem.grads and not backend.autograd:
        from attnswitch.call import torch_op

        out, lse = torch_op.differentiable(call, kernel, library)
        return (calls.swap_heads(out) if call.layout == "BLHD" else out), lse
    out, lse = kernel.forward(call.to_backend(library))
    return call.to_caller(out, library), call.to_caller(lse, library, heads=False)
