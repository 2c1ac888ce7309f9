"""``attention`` within torch.func and forward mode: by the operators, or by a composite that torch differentiates.

Under ``vmap`` the mapped axis becomes part of the batch; with dropout, whose mask counts batch entries, examples are
called one by one. Under ``grad`` the operators give first derivatives. Forward mode, and derivatives of derivatives,
are torch's own of ``sdpa-math``, whose memory is O(Lq * Lk).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from attnswitch import arrays
from attnswitch.call import options as read
from attnswitch.call.describe import describe
from attnswitch.call.launch import straight
from attnswitch.call.operators import told
from attnswitch.call.operators.run import signed
from attnswitch.call.seeds import drawn_seed
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.machine.device import Device
from attnswitch.machine.inputs import heads_last
from attnswitch.planning import planner
from attnswitch.problem import GRAD_OPERANDS
from attnswitch.transformed import is_dual

__all__ = [
    "active",
    "attention",
    "differentiates",
    "looks",
    "refuse",
    "refuse_gradients",
    "refuse_paged",
    "refuse_varlen",
]

_COMPOSITE = "sdpa-math"
_JVP = torch._C._functorch.TransformType.Jvp
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, _JVP)


def looks(*tensors: Any) -> bool:
    """Whether a function transform is active, or one of these carries a tangent."""
    return bool(torch._C._functorch.peek_interpreter_stack()) or _dual(tensors)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    seed: int | None,
    backend: str | None,
    policy: str | None,
    *given: Any,
    alibi_slopes: Any = None,
) -> Any:
    """What ``operators.attention`` returns. Raises ``Unsupported`` for another backend in forward mode."""
    forward_mode = _dual((query, key, value, attn_mask, alibi_slopes)) or any(
        level.key() == _JVP for level in torch._C._functorch.get_interpreter_stack() or ()
    )
    if forward_mode and backend not in (None, _COMPOSITE):
        raise Unsupported(
            f"forward mode through backend={backend!r}: it has no such derivatives; leave backend out, or use"
            f" {_COMPOSITE!r}"
        )
    if forward_mode or backend == _COMPOSITE:
        return _composite(query, key, value, attn_mask, key_lengths, alibi_slopes, seed, given)
    tensors, said = told(query, key, value, attn_mask, key_lengths, alibi_slopes, backend, policy, given, _asked)
    said["seed"] = signed(seed)
    if not ("grads" in said or "return_lse" in said):
        return torch.ops.attnswitch.attention(*tensors, **said)
    out, lse, _ = _Transformed.apply(*tensors, _Said(said))
    return (out, lse) if "return_lse" in said else out


def _asked(tensor: Any) -> bool:
    """Whether any of the transforms that wrap a tensor, one in the other, may ask for its gradient."""
    while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return bool(tensor.requires_grad)


def _dual(tensors: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and is_dual(x) for x in tensors)


def _composite(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    seed: int | None,
    given: Sequence[Any],
) -> Any:
    options = read.of_call(*given)
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    facts = [arrays.outline(x)._replace(grad=False) for x in operands]
    whole = facts if len(facts) == 4 else [*facts, None]
    problem = describe(whole, options, lengths=key_lengths is not None, seeded=seed is not None)
    if alibi_slopes is not None:  # which it refuses, with its reason
        problem = problem.replace(alibi=True, alignment=options.causal_alignment)
    device = Device.of(*facts[0].device)
    plan = planner.make_plan(problem, device, _COMPOSITE)
    if plan.backend is None:
        reasons = "; ".join(reason for one in plan.candidates if one.backend == _COMPOSITE for reason in one.reasons)
        hint = " (which sinks are put in by)" * problem.lse
        raise Unsupported(
            f"forward mode and second derivatives are torch's own, of {_COMPOSITE}, which does not take {problem}:"
            f" {reasons}{hint}",
            plan,
        )
    _, kernel = planner.kernel(_COMPOSITE, problem, device)
    if key_lengths is not None and not isinstance(key_lengths, torch.Tensor):
        key_lengths = torch.tensor(key_lengths, device=query.device)
    turned = options.layout == "BLHD"
    inputs = straight(operands, turned)._replace(key_lengths=key_lengths)
    out, _ = kernel.forward(inputs)
    return heads_last(out, inputs.query) if turned else out


# -- under torch.compile -----------------------------------------------------------------------------------------------

#: torch before 2.15 says nothing, and gives a gradient of 0.
_REFUSED = (
    "attention within torch.func.grad, or another that differentiates, within torch.compile: torch has no gradient of"
    " an operator there; leave torch.compile out, or let backward() differentiate what is compiled"
)
_REFUSED_GRADIENTS = (
    "attention_backward within torch.func or of DTensors, within torch.compile: call attention, and let torch"
    " differentiate it"
)
_REFUSED_VARLEN = (
    "attention_varlen within torch.func or forward mode, or of DTensors or nested tensors: pass padded ones and"
    " key_lengths to attnswitch.attention, or nested ones to attnswitch.scaled_dot_product_attention"
)
_REFUSED_PAGED = (
    "attention_paged within torch.func or forward mode, or of DTensors or nested tensors: call it with tensors of their"
    " own, for every example and on every process"
)


def _active() -> bool:
    return bool(torch._C._functorch.peek_interpreter_stack())


def _differentiates() -> bool:
    return any(level.key() in _DIFFERENTIATING for level in torch._C._functorch.get_interpreter_stack() or ())


def _refusal(reason: str) -> Callable[[], None]:
    """What raises ``Unsupported``, where torch.compile breaks its graph; with ``fullgraph`` that gives the reason."""

    def refuse() -> None:
        raise Unsupported(reason)

    return torch.compiler.disable(refuse, reason=reason)  # type: ignore[no-any-return, no-untyped-call]


#: Whether a transform is active now, and whether it gives derivatives; torch.compile asks when it traces, under the
#: same.
active = torch.compiler.assume_constant_result(_active)  # type: ignore[no-untyped-call]
differentiates = torch.compiler.assume_constant_result(_differentiates)  # type: ignore[no-untyped-call]
refuse, refuse_gradients, refuse_varlen, refuse_paged = map(
    _refusal, (_REFUSED, _REFUSED_GRADIENTS, _REFUSED_VARLEN, _REFUSED_PAGED)
)


# -- reverse mode ------------------------------------------------------------------------------------------------------


class _Said(NamedTuple):
    """What the operators are told, as one thing that transforms leave alone."""

    by_name: Any


class _Transformed(torch.autograd.Function):
    """The operator, in the form that function transforms take; they have none for those of ``torch.library``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        *tensors, said = args
        return torch.ops.attnswitch.attention_forward(*tensors, **said.by_name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, said = inputs
        ctx.said = _Said({name: x for name, x in said.by_name.items() if name != "seed"})
        out, lse, state = output
        ctx.save_for_backward(*tensors, out, lse, state)
        ctx.mark_non_differentiable(*((state,) if "return_lse" in said.by_name else (lse, state)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> Any:
        tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(tensors[-3])
        found = _TransformedBackward.apply(grad_out, grad_lse, *tensors, ctx.said)
        by_name = dict(zip(ctx.said.by_name["grads"], found, strict=True))
        return *(by_name.get(name) for name in GRAD_OPERANDS), None, None, None


class _TransformedBackward(torch.autograd.Function):
    """Its backward, which has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        *tensors, said = args
        return tuple(torch.ops.attnswitch.attention_backward(*tensors, **said.by_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "a derivative of a derivative of attention: this backend computes first ones only; use"
            " backend='sdpa-math' of attnswitch.attention"
        )


# -- vmap --------------------------------------------------------------------------------------------------------------


def _batched(tensor: Any, axis: int | None, size: int, batch: int | None = None) -> Any:
    """(B, ...) of every example as (N * B, ...); an axis B of length 1 is expanded to ``batch`` if that is given."""
    if tensor is None:
        return None
    tensor = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    if batch is not None:
        tensor = tensor.expand(size, batch, *tensor.shape[2:])
    return tensor.flatten(0, 1)


def _mask(mask: Any, axis: int | None, size: int, batch: int, *, own: bool) -> Any:
    """The mask beside such operands, with four axes; one that all examples share stays one, unless each has its own."""
    if mask is None:
        return None
    mask = mask[None] if axis is None else mask.movedim(axis, 0)
    mask = mask.reshape(mask.shape[0], *(1,) * (5 - mask.dim()), *mask.shape[1:])
    if axis is None and mask.shape[1] == 1 and not own:
        return mask[0]
    return mask.expand(size, batch, *mask.shape[2:]).flatten(0, 1)


def _slopes(slopes: Any, axis: int | None, size: int, batch: int) -> Any:
    """Slopes beside such operands, (Hq,) if all examples share them, else (N * B, Hq)."""
    if slopes is None or (axis is None and slopes.dim() == 1):
        return slopes
    slopes = slopes[None] if axis is None else slopes.movedim(axis, 0)
    wide = slopes[:, None] if slopes.dim() == 2 else slopes
    return wide.expand(size, batch, wide.shape[-1]).flatten(0, 1)


def _map_attention(info: Any, in_dims: tuple[Any, ...], *tensors: Any, **said: Any) -> Any:
    tensors, in_dims = tensors[:6], in_dims[:6]  # without a seed that was drawn: vmap's randomness says of whom it is
    if said.get("dropout_p") and info.batch_size:
        said = _seeded(info, said, tensors[0])
        return _one_by_one(lambda *x: (torch.ops.attnswitch.attention(*x, **said),), info, in_dims, tensors)[0], 0
    out = torch.ops.attnswitch.attention(*_folded(info.batch_size, in_dims, tensors), **said)
    return _apart((out,), info.batch_size, _batch(tensors[0], in_dims[0]))[0], 0


def _map_forward(info: Any, in_dims: tuple[Any, ...], *tensors: Any, **said: Any) -> Any:
    tensors, in_dims = tensors[:6], in_dims[:6]  # the same
    if said.get("dropout_p") and info.batch_size:
        operator = functools.partial(torch.ops.attnswitch.attention_forward, **_seeded(info, said, tensors[0]))
        return _one_by_one(operator, info, in_dims, tensors), (0, 0, 0)
    results = torch.ops.attnswitch.attention_forward(*_folded(info.batch_size, in_dims, tensors), **said)
    parts = _apart(results, info.batch_size, _batch(tensors[0], in_dims[0]))
    return parts, tuple(None if x.dim() < 3 else 0 for x in results)


def _seeded(info: Any, said: dict[str, Any], beside: Any) -> dict[str, Any]:
    """What examples are told of dropout without a seed: one drawn for all, or none, as ``vmap``'s randomness says."""
    if said.get("seed") is not None or info.randomness == "different":
        return said
    if info.randomness == "error":
        raise InvalidProblem(
            "dropout under vmap: say randomness='same' or 'different' to it, or give a seed, which is the same for all"
        )
    return {**said, "seed": signed(drawn_seed(beside))}


def _one_by_one(
    operator: Callable[..., Sequence[Any]], info: Any, in_dims: tuple[Any, ...], tensors: Sequence[Any]
) -> tuple[Any, ...]:
    """Results of a call for each example, stacked."""
    results = [
        operator(*(x if axis is None else x.select(axis, n) for x, axis in zip(tensors, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _folded(n: int, in_dims: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """What both operators are given of ``n`` examples at once."""
    query, key, value, mask, lengths, slopes = tensors
    q, k, v = (_batched(x, axis, n) for x, axis in zip((query, key, value), in_dims, strict=False))
    batch = _batch(query, in_dims[0])
    wide = _mask(mask, in_dims[3], n, batch, own=False)
    return q, k, v, wide, _batched(lengths, in_dims[4], n), _slopes(slopes, in_dims[5], n, batch)


def _map_gradients(info: Any, in_dims: tuple[Any, ...], *tensors: Any, **said: Any) -> Any:
    if said.get("dropout_p") and info.batch_size:
        operator = functools.partial(torch.ops.attnswitch.attention_backward, **said)
        grads = _one_by_one(operator, info, in_dims, tensors)
        return list(grads), [0] * len(grads)
    n = info.batch_size
    grad_out, grad_lse, q, k, v, mask, lengths, slopes, out, lse, state = (
        x if role in (5, 7, 10) else _batched(x, axis, n)
        for role, (x, axis) in enumerate(zip(tensors, in_dims, strict=True))
    )
    batch, own = _batch(tensors[2], in_dims[2]), "m" in said["grads"]
    wide = _mask(mask, in_dims[5], n, batch, own=own)
    beside = wide, lengths, _slopes(slopes, in_dims[7], n, batch)
    found = torch.ops.attnswitch.attention_backward(grad_out, grad_lse, q, k, v, *beside, out, lse, state, **said)
    found = list(_apart(found, n, batch))
    if own:  # of a mask that an example's batch shares, the sum
        shape = mask.shape if in_dims[5] is None else mask.movedim(in_dims[5], 0).shape[1:]
        found[-1] = found[-1].sum_to_size(n, *(1,) * (4 - len(shape)), *shape).reshape(n, *shape)
    return found, [0] * len(found)


def _batch(tensor: Any, axis: int | None) -> int:
    """Batch entries of an example."""
    return int(tensor.shape[0 if axis is None or axis > 0 else 1])


def _apart(results: Sequence[Any], size: int, batch: int) -> tuple[Any, ...]:
    return tuple(x if x.dim() < 3 else x.unflatten(0, (size, batch)) for x in results)


def _map_absent(info: Any, in_dims: tuple[Any, ...], sinks: Any) -> Any:
    return torch.ops.attnswitch.absent_sinks(sinks), in_dims[0]


torch.library.register_vmap("attnswitch::attention", _map_attention)
torch.library.register_vmap("attnswitch::attention_forward", _map_forward)
torch.library.register_vmap("attnswitch::attention_backward", _map_gradients)
torch.library.register_vmap("attnswitch::absent_sinks", _map_absent)
