"""Calls of the operators, written to be traced by torch.compile: nothing here depends on sizes or elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnswitch.call.operators import schema
from attnswitch.call.operators.run import signed
from attnswitch.call.operators.schema import USUAL
from attnswitch.call.options import no_name, seed_of, text_of
from attnswitch.call.paged import NO_GRADIENT, Beside, splits_of
from attnswitch.call.per_head import NO_SLOPES_GRADIENT
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients
from attnswitch.problem import GRAD_OPERANDS

__all__ = [
    "as_floats",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "detached",
    "told",
    "told_paged",
    "told_varlen",
]

_ops = torch.ops.attnswitch


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
    """Output, or output and lse; ``given`` are the options in the order of ``Options``."""
    tensors, said = told(query, key, value, attn_mask, key_lengths, alibi_slopes, backend, policy, given)
    return _called(_ops.attention, _ops.attention_forward, tensors, said, seed)


def attention_varlen(
    operands: tuple[Any, Any, Any],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    backend: str | None,
    policy: str | None,
    *given: Any,
    alibi_slopes: Any = None,
) -> Any:
    """The same of sequences one after another."""
    inputs, said = told_varlen(operands, cu_seqlens, alibi_slopes, longest, backend, policy, given)
    return _called(_ops.attention_varlen, _ops.attention_varlen_forward, inputs, said, seed)


def _called(
    plain: Callable[..., Any],
    forward: Callable[..., Any],
    inputs: tuple[Any, ...],
    said: dict[str, Any],
    seed: int | None,
) -> Any:
    """What the call returns, by the operator that keeps no more than it needs."""
    if seed is not None:
        said["seed"] = _signed(seed)
    elif said.get("dropout_p"):
        where = "meta" if inputs[0].is_meta else "cpu"
        inputs = (*inputs, _ops.drawn_seed(torch.empty(1, dtype=torch.int64, device=where)))
    if not ("grads" in said or "return_lse" in said):
        return plain(*inputs, **said)
    out, lse, _ = forward(*inputs, **said)
    return (out, lse) if "return_lse" in said else out


def attention_paged(
    operands: tuple[Any, Any, Any], beside: Beside, backend: str | None, policy: str | None, *given: Any
) -> Any:
    """The same of a cache in pages, which has no gradients. Raises ``InvalidProblem`` where one is asked for."""
    inputs, said = told_paged(operands, beside, backend, policy, given)
    if "return_lse" in said:
        return _ops.attention_paged_forward(*inputs, **said)
    return _ops.attention_paged(*inputs, **said)


def attention_backward(
    upstream: tuple[Any, Any],
    saved: tuple[Any, Any],
    wanted: str,
    operands: tuple[Any, ...],
    seed: int | None,
    backend: str | None,
    policy: str | None,
    *given: Any,
    alibi_slopes: Any = None,
) -> Gradients:
    """Gradients of what ``wanted`` names; those of output and lse come first, and these two, or None."""
    query, key, value, attn_mask, key_lengths = operands
    inputs, said = told(query, key, value, attn_mask, key_lengths, alibi_slopes, backend, policy, given)
    said["grads"] = wanted
    return _gradients(_ops.attention_forward, _ops.attention_backward, upstream, saved, inputs, said, seed)


def attention_varlen_backward(
    upstream: tuple[Any, Any],
    saved: tuple[Any, Any],
    operands: tuple[Any, Any, Any],
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    seed: int | None,
    backend: str | None,
    policy: str | None,
    *given: Any,
    alibi_slopes: Any = None,
) -> Gradients:
    """The same of sequences one after another, of query, key and value."""
    inputs, said = told_varlen(operands, cu_seqlens, alibi_slopes, longest, backend, policy, given)
    said["grads"] = "qkv"
    forward, backward = _ops.attention_varlen_forward, _ops.attention_varlen_backward
    return _gradients(forward, backward, upstream, saved, inputs, said, seed)


def _gradients(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    upstream: tuple[Any, Any],
    saved: tuple[Any, Any],
    inputs: tuple[Any, ...],
    said: dict[str, Any],
    seed: int | None,
) -> Gradients:
    grad_out, grad_lse, out, lse = detached(*upstream, *saved)
    inputs = detached(*inputs)
    if out is None or lse is None:
        out, lse, state = forward(*inputs, **said, seed=_signed(seed))
    elif seed is None:
        state = grad_out.new_empty(0, dtype=torch.float32)
    else:
        state = torch.tensor([_signed(seed)], device="cpu")
    found = backward(grad_out, grad_lse, *inputs, out, lse, state, **said)
    by_name = dict(zip(said["grads"], found, strict=True))
    return Gradients(*[by_name.get(name) for name in GRAD_OPERANDS])


def detached(*given: Any) -> tuple[Any, ...]:
    """``given``, of whose tensors nothing is differentiated.

    In a graph's ``no_grad`` an error leaves gradients disabled behind it.
    """
    return tuple([x.detach() if isinstance(x, torch.Tensor) else x for x in given])


# -- what they are told ------------------------------------------------------------------------------------------------


def _requires_grad(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad  # torch.compile takes NumPy's arrays, too


def _may_require_grad(tensor: Any) -> bool:
    """The same, and of an operand that ``vmap`` maps in a graph, which does not tell what it is of."""
    if _requires_grad(tensor) or not torch.compiler.is_dynamo_compiling():
        return _requires_grad(tensor)
    is_mapped = isinstance(tensor, torch.Tensor) and torch._C._functorch.is_batchedtensor(tensor)
    return is_mapped and tensor.is_floating_point()


def _signed(seed: Any) -> Any:
    schema.check_known("seed", seed)
    return seed if seed is None or isinstance(seed, torch.SymInt) else signed(seed_of(seed))


def told(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    backend: str | None,
    policy: str | None,
    given: Sequence[Any],
    asked: Callable[[Any], bool] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the operators are told of a call: tensors, and all else that is not usual, but the seed.

    ``asked`` says of a tensor whether its gradient may be asked for, where more than the tensor tells.
    """
    if isinstance(key_lengths, torch.Tensor):
        if key_lengths.device.type == "cpu" != query.device.type:  # as without a graph
            key_lengths = key_lengths.to(query.device)
    elif key_lengths is not None:
        key_lengths = _integers(key_lengths, "key_lengths", (0,)).to(query.device)
    operands = query, key, value, attn_mask
    said = _said(operands, backend, policy, given, asked or _may_require_grad)
    return (*operands, key_lengths, _slopes(alibi_slopes, query, asked or _requires_grad)), said


def told_varlen(
    operands: tuple[Any, Any, Any],
    cu_seqlens: tuple[Any, Any],
    alibi_slopes: Any,
    longest: tuple[Any, Any],
    backend: str | None,
    policy: str | None,
    given: Sequence[Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same of sequences one after another. Offsets in a list become a tensor on the CPU, where they are read."""
    beside = [x if x is None or isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu") for x in cu_seqlens]
    most = [x.item() if isinstance(x, torch.Tensor) else x for x in longest]
    slopes = _slopes(alibi_slopes, operands[0], _requires_grad)
    return (*operands, *beside, slopes, *most), _said(operands, backend, policy, given, _requires_grad)


def told_paged(
    operands: tuple[Any, Any, Any], beside: Beside, backend: str | None, policy: str | None, given: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same of a cache in pages. What is a list of integers becomes a tensor on the CPU, where it is read."""
    table, lengths, edges, longest, splits, tree, *scales, heads = beside
    table, lengths = _integers(table, "block_table", (0, 0)), _integers(lengths, "cache_lengths", (0,))
    edges = edges if edges is None else _integers(edges, "cu_seqlens_q", (0,))
    for role, x in zip(("key_scale", "value_scale"), scales, strict=True):
        if not all(abs(number) < math.inf for number in _numbers(x)):  # those of a tensor may be of pages in no use
            raise InvalidProblem(f"{role}={text_of(x)}: expected finite numbers")
    roles = ("key_scale", "value_scale", *heads._fields)
    floats = [
        x if x is None else as_floats(x, role, operands[0]) for role, x in zip(roles, (*scales, *heads), strict=True)
    ]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*operands, *floats)):
        raise InvalidProblem(NO_GRADIENT)
    if splits is not None and (type(splits) is not int or splits < 1):
        splits = splits_of(splits)
    longest = longest.item() if isinstance(longest, torch.Tensor) else longest
    said = _said((), backend, policy, given, _requires_grad)
    said.pop("causal_alignment", None)  # queries are the newest tokens
    if not (tree is None or isinstance(tree, torch.Tensor)):
        raise InvalidProblem(f"tree_mask={text_of(tree)}: expected a tensor of bytes (uint8)")
    return (*operands, table, lengths, edges, longest, splits, tree, *floats), said


def _integers(given: Any, role: str, none: tuple[int, ...]) -> torch.Tensor:
    """A tensor, or one on the CPU of a list, in the shape ``none`` if that is empty. Raises ``InvalidProblem``."""
    if isinstance(given, torch.Tensor):
        return given
    try:
        # No graph before torch 2.12 gets over text.
        tensor = None if _has_text(given) else torch.tensor(given, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        tensor = None
    if tensor is None:
        raise InvalidProblem(f"{role}={text_of(given)}: expected integers")
    return tensor if tensor.numel() else torch.zeros(none, dtype=torch.int64, device="cpu")


def _has_text(given: Any) -> bool:
    return isinstance(given, str) or (isinstance(given, list | tuple) and any(_has_text(part) for part in given))


def _slopes(given: Any, query: Any, asked: Callable[[Any], bool]) -> Any:
    """Slopes of ALiBi as a tensor, or None. Raises ``InvalidProblem`` where their gradient may be asked for."""
    if given is None:
        return None
    slopes = as_floats(given, "alibi_slopes", query)
    if torch.is_grad_enabled() and asked(slopes):
        raise InvalidProblem(NO_SLOPES_GRADIENT)
    return slopes


def as_floats(given: Any, role: str, query: Any) -> Any:
    """``given``, a tensor, a number or a list of such, as a tensor; it is beside query if it is made here.

    Raises ``InvalidProblem`` where it is none of these.
    """
    if isinstance(given, torch.Tensor):
        return given
    numbers = _numbers(given)
    try:
        if not numbers or any(type(number) is not bool for number in numbers):
            return torch.tensor(given, device=query.device, dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError):
        pass
    raise InvalidProblem(f"{role}={text_of(given)}: expected a tensor, or a list of numbers")


def _numbers(given: Any) -> list[Any]:
    """The numbers of a number, or of a list of such or of lists; of all else none."""
    if isinstance(given, list | tuple):
        return [number for part in given for number in _numbers(part)]
    return [given] if isinstance(given, int | float) else []


def _said(
    operands: tuple[Any, ...],
    backend: str | None,
    policy: str | None,
    given: Sequence[Any],
    asked: Callable[[Any], bool],
) -> dict[str, Any]:
    grads = ""
    if torch.is_grad_enabled():
        pairs = zip(GRAD_OPERANDS, operands, strict=False)
        grads = "".join([name for name, x in pairs if x is not None and asked(x)])
    if not (backend is None or isinstance(backend, str)):
        raise no_name(backend)
    read = [schema.told(name, x) for name, x in zip(USUAL, given, strict=True)]
    said = {name: x for (name, usual), x in zip(USUAL.items(), read, strict=True) if x != usual}
    if backend is not None:
        said["backend"] = backend
    if policy is not None:
        said["policy"] = str(policy)
    if grads:
        said["grads"] = grads
    return said
