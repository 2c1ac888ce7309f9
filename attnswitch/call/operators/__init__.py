"""``attention`` as operators of torch's, for whatever looks at a program before or while it runs.

torch.compile, torch.export, FakeTensorMode, make_fx, torch.func and tensor subclasses that dispatch see
``torch.ops.attnswitch``: ``attention``, and with lse or gradients ``attention_forward`` and ``attention_backward``. A
graph holds the call, not the choice: a backend is chosen when the graph runs, by the facts of its tensors there, as it
is without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from attnswitch.call.operators import again, autograd, direct, fake, flops, run, schema
from attnswitch.call.operators.run import signed
from attnswitch.problem import GRAD_OPERANDS

__all__ = ["attention", "signed", "told"]

_NAMESPACE = "attnswitch"


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
    """Output, or output and lse, by the operators; ``given`` are the options in the order of ``Options``.

    It is written to be traced: nothing here depends on sizes or elements.
    """
    tensors, said = told(query, key, value, attn_mask, key_lengths, backend, policy, given)
    if seed is not None:
        said["seed"] = signed(seed)
    if not ("grads" in said or "return_lse" in said):
        return torch.ops.attnswitch.attention(*tensors, **said)
    out, lse, _ = torch.ops.attnswitch.attention_forward(*tensors, **said)
    return (out, lse) if "return_lse" in said else out


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
    """What the operators are told of a call: tensors, and all else that is not usual, but the seed.

    ``asked`` says of a tensor whether its gradient may be asked for.
    """
    if key_lengths is not None and not isinstance(key_lengths, torch.Tensor):
        key_lengths = torch.tensor(key_lengths, device=query.device)
    grads = ""
    if torch.is_grad_enabled():
        operands = (query, key, value, attn_mask)
        grads = "".join([name for name, x in zip(GRAD_OPERANDS, operands, strict=True) if x is not None and asked(x)])
    said = {name: x for (name, usual), x in zip(schema.USUAL.items(), given, strict=True) if x != usual}
    if backend is not None:
        said["backend"] = backend
    if policy is not None:
        said["policy"] = str(policy)
    if grads:
        said["grads"] = grads
    return (query, key, value, attn_mask, key_lengths), said


def _define(library: torch.library.Library, form: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    name = library.define(form, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    return f"{_NAMESPACE}::{name}"


_library = direct.Library(_NAMESPACE, "DEF")
_define(_library, schema.PLAIN, run.plain, fake.plain)
_forward = _define(_library, schema.FORWARD, run.forward, fake.forward)
_backward = _define(_library, schema.BACKWARD, run.backward, fake.backward)
torch.library.register_autograd(_forward, autograd.differentiate, setup_context=autograd.save, lib=_library)
torch.library.register_autograd(_backward, autograd.only_once, lib=_library)
for _operator, _again in (
    (torch.ops.attnswitch.attention_forward.default, again.forward),
    (torch.ops.attnswitch.attention_backward.default, again.backward),
):
    _operator._op = _again(_operator._op)
register_flop_formula([torch.ops.attnswitch.attention, torch.ops.attnswitch.attention_forward])(flops.forward)
register_flop_formula(torch.ops.attnswitch.attention_backward)(flops.backward)
