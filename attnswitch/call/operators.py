"""``attention`` as operators of torch's, for whatever looks at a program before or while it runs.

torch.compile, torch.export, FakeTensorMode, make_fx, torch.func and tensor subclasses that dispatch see
``torch.ops.attnswitch.attention`` and ``attention_backward``. A graph holds the call, not the choice: a backend is
chosen when the graph runs, by the facts of its tensors there, as it is without a graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from attnswitch import arrays
from attnswitch.call import options as read
from attnswitch.call.attend import attend
from attnswitch.call.backward import gradients, results
from attnswitch.call.describe import check_beside, fitting
from attnswitch.call.options import Options
from attnswitch.call.run import drawn_seed
from attnswitch.errors import Unsupported
from attnswitch.problem import GRAD_OPERANDS

__all__ = ["attention", "signed", "told"]

_TYPES = {
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Alignment": "str",
    "float | None": "float?",
    "bool | None": "bool?",
    "Window | None": "int?[]?",
}
_NAMES = tuple(field.name for field in fields(Options))
#: What the operators are told beside tensors: the options of a call, who computes it, and which gradients are wanted.
_SAID = ", ".join(
    [f"{_TYPES[str(field.type)]} {field.name}" for field in fields(Options)] + ["str? backend, str? policy"]
)
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths"
_NAMESPACE = "attnswitch"
Shape = tuple[int, ...]


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
) -> Any:
    """Output, or output and lse, by the operator; ``given`` are the options in the order of ``Options``.

    It is written to be traced: nothing here depends on sizes or elements.
    """
    tensors, said = told(query, key, value, attn_mask, key_lengths, backend, policy, given)
    out, lse, _ = torch.ops.attnswitch.attention(*tensors, **said, seed=signed(seed))
    return (out, lse) if said["return_lse"] else out


def signed(seed: int | None) -> int | None:
    """A seed as the 64 bits with a sign that a schema has for integers."""
    return seed if seed is None or seed < 2**63 else seed - 2**64


def _requires_grad(tensor: Any) -> bool:
    return bool(tensor.requires_grad)


def told(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    backend: str | None,
    policy: str | None,
    given: Sequence[Any],
    asked: Callable[[Any], bool] = _requires_grad,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both operators are told of a call: tensors, and all else but the seed.

    ``asked`` says of a tensor whether its gradient may be asked for.
    """
    if key_lengths is not None and not isinstance(key_lengths, torch.Tensor):
        key_lengths = torch.tensor(key_lengths, device=query.device)
    grads = ""
    if torch.is_grad_enabled():
        operands = (query, key, value, attn_mask)
        grads = "".join([name for name, x in zip(GRAD_OPERANDS, operands, strict=True) if x is not None and asked(x)])
    said = dict(zip(_NAMES, given, strict=True))
    said |= {"backend": backend, "policy": None if policy is None else str(policy), "grads": grads}
    return (query, key, value, attn_mask, key_lengths), said


# -- what runs ---------------------------------------------------------------------------------------------------------


def _sets() -> tuple[Any, Any]:
    """What a thread that has just begun includes in a call, and leaves out, of torch's dispatch keys."""
    sets: list[Any] = []
    include, exclude = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    thread = threading.Thread(target=lambda: sets.extend((include(), exclude())))
    thread.start()
    thread.join()
    return sets[0], sets[1]


_SETS = _sets()


def _as_without_graph(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as a program without autograd calls it, wherever torch's dispatcher is: so launches know it again."""

    @functools.wraps(run)
    def runs(*operands: Any, **said: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return run(*operands, **said)
        with torch._C._ForceDispatchKeyGuard(*_SETS), torch.no_grad():
            return run(*operands, **said)

    return runs


@_as_without_graph
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any, key_lengths: Any, *, seed: int | None, grads: str, **said: Any
) -> tuple[Any, Any, Any]:
    """Output, lse (of no elements where nobody asks for it), and the seed of a dropout mask that is made again."""
    backend, policy, options = _read(said)
    draws = bool(grads) and options.dropout_p > 0.0
    if seed is None and draws:
        seed = drawn_seed()
    unsigned = None if seed is None else seed % 2**64
    if grads:
        operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        out, lse = results(operands, key_lengths, unsigned, options, backend, policy, grads)
    else:
        out, lse = attend(query, key, value, attn_mask, key_lengths, unsigned, options, backend, policy)
    rows: Any = lse if grads or options.return_lse else _none(query)
    return _laid(out, query, options.layout), rows.contiguous(), _state(query, seed if draws else None)


@_as_without_graph
def _gradients(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    out: Any,
    lse: Any,
    state: Any,
    *,
    grads: str,
    **said: Any,
) -> list[Any]:
    """Gradients of what ``grads`` names, in that order."""
    backend, policy, options = _read(said)
    seed = int(state[0]) % 2**64 if state.numel() else None
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    found = gradients(
        grad_out,
        operands,
        key_lengths,
        seed,
        options,
        backend,
        policy,
        out=out,
        lse=lse,
        grad_lse=grad_lse,
        wanted=grads,
    )
    return [
        _laid(grad, like, options.layout) if name != "m" else grad.contiguous()  # type: ignore[union-attr]
        for name, grad, like in zip(GRAD_OPERANDS, found, (query, key, value, attn_mask), strict=True)
        if name in grads
    ]


def _read(said: dict[str, Any]) -> tuple[str | None, str | None, Options]:
    window = said["window"]
    said["window"] = None if window is None else tuple(window)
    return said["backend"], said["policy"], read.of_call(*[said[name] for name in _NAMES])


def _state(query: Any, seed: int | None) -> Any:
    if seed is None:
        return _none(query)
    return torch.tensor([signed(seed)])


def _none(query: Any) -> Any:
    return query.new_empty(0, dtype=torch.float32)


# -- how results lie, which a graph has to know before anything runs ---------------------------------------------------


def _heads_inside(operand: Any, layout: str) -> bool:
    """Whether heads lie inside L, as a program has them that splits rows into heads."""
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    long = operand.shape[heads] > 1 and operand.shape[length] > 1
    return bool(long and operand.stride(heads) < operand.stride(length))


def _like(operand: Any, columns: Any, layout: str) -> Any:
    """Dense memory for an array as ``operand`` with so many columns: heads inside L, or L inside, as they lie there."""
    b, first, second, _ = operand.shape
    if _heads_inside(operand, layout) == (layout == "BLHD"):
        return operand.new_empty((b, first, second, columns))
    return operand.new_empty((b, second, first, columns)).swapaxes(1, 2)


def _laid(array: Any, operand: Any, layout: str) -> Any:
    """``array`` in such memory, if it is not in it."""
    plain = _heads_inside(operand, layout) == (layout == "BLHD")
    if (array if plain else array.swapaxes(1, 2)).is_contiguous():
        return array
    return _like(operand, array.shape[-1], layout).copy_(array)


def _fake_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    *,
    seed: int | None,
    grads: str,
    **said: Any,
) -> tuple[Any, Any, Any]:
    *_, options = _read(said)
    q, k, v = arrays.outline(query), arrays.outline(key), arrays.outline(value)
    fitting(q, k, v, None if attn_mask is None else arrays.outline(attn_mask), options)
    if key_lengths is not None:
        check_beside(arrays.outline(key_lengths), "key_lengths", q)
    layout = options.layout
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    b, h, length, _ = (query if layout == "BHLD" else query.swapaxes(1, 2)).shape
    lse = query.new_empty((b, h, length), dtype=wide) if grads or options.return_lse else _none(query)
    draws = bool(grads) and options.dropout_p > 0.0
    state = torch.empty(1, dtype=torch.int64, device="cpu") if draws else _none(query)
    return _like(query, value.shape[-1], layout), lse, state


def _fake_gradients(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    *_: Any,
    layout: str,
    grads: str,
    **__: Any,
) -> list[Any]:
    made = [_like(x, x.shape[-1], layout) for name, x in zip("qkv", (query, key, value), strict=True) if name in grads]
    return made + ([attn_mask.new_empty(attn_mask.shape)] if "m" in grads else [])


# -- autograd ----------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    ctx.said = {name: given for name, given in keyword_only_inputs.items() if name != "seed"}
    out, lse, state = output
    ctx.save_for_backward(*inputs, out, lse, state)
    ctx.mark_non_differentiable(*((state,) if ctx.said["return_lse"] else (lse, state)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> tuple[Any, ...]:
    query, key, value, attn_mask, key_lengths, out, lse, state = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    operands = query, key, value, attn_mask, key_lengths
    found = torch.ops.attnswitch.attention_backward(grad_out, grad_lse, *operands, out, lse, state, **ctx.said)
    by_name = dict(zip(ctx.said["grads"], found, strict=True))
    return *(by_name.get(name) for name in GRAD_OPERANDS), None


def _only_once(ctx: Any, *_: Any) -> Any:
    raise Unsupported(
        "double backward of attention in a graph: the operators compute first derivatives only; use"
        " backend='sdpa-math' without torch.compile"
    )


# -- what it costs, as torch.utils.flop_counter counts: hidden scores as well ------------------------------------------


def _forward_flops(query: Shape, key: Shape, value: Shape, *_: Any, layout: str, **__: Any) -> int:
    return 2 * _scores(query, key, layout) * (query[-1] + value[-1])


def _backward_flops(
    _: Shape, __: Any, query: Shape, key: Shape, value: Shape, *___: Any, layout: str, **____: Any
) -> int:
    """Scores again, gradients of weights and value of Dv each, of query and key of D each."""
    return 2 * _scores(query, key, layout) * (3 * query[-1] + 2 * value[-1])


def _scores(query: Shape, key: Shape, layout: str) -> int:
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    return query[0] * query[heads] * query[length] * key[length]


# -- registration ------------------------------------------------------------------------------------------------------


def _define(
    library: torch.library.Library,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., Any] | None = None,
) -> None:
    name = library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=setup, lib=library)


_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_define(
    _library,
    f"attention({_OPERANDS}, *, {_SAID}, SymInt? seed, str grads) -> (Tensor, Tensor, Tensor)",
    _attention,
    _fake_attention,
    _differentiate,
    _save,
)
_define(
    _library,
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, {_OPERANDS}, Tensor out, Tensor lse, Tensor state, *,"
    f" {_SAID}, str grads) -> Tensor[]",
    _gradients,
    _fake_gradients,
    _only_once,
)
register_flop_formula(torch.ops.attnswitch.attention)(_forward_flops)
register_flop_formula(torch.ops.attnswitch.attention_backward)(_backward_flops)
