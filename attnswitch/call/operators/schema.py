"""What the operators are told of a call, as torch's schemas write it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from attnswitch.call import options as read
from attnswitch.call.options import Options

__all__ = ["BACKWARD", "FORWARD", "PLAIN", "USUAL", "read_said"]

_TYPES = {
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Alignment": "str",
    "float | None": "float?",
    "bool | None": "bool?",
    "Window | None": "int?[]?",
}
#: What a call that says nothing says. It is each argument's default, since all that is given is parsed in every call.
USUAL = {field.name: field.default for field in fields(Options)}
_SAID = ", ".join(
    [f"{_TYPES[str(field.type)]} {field.name}={field.default!r}" for field in fields(Options)]
    + ["str? backend=None", "str? policy=None"]
)
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths"

#: The output of a call without gradients and lse, of which nothing is kept.
PLAIN = f"attention({_OPERANDS}, *, {_SAID}, SymInt? seed=None) -> Tensor"
#: Output, lse, and the seed of a dropout mask that is made again; ``grads`` names the operands with gradients.
FORWARD = f"attention_forward({_OPERANDS}, *, {_SAID}, str grads='', SymInt? seed=None) -> (Tensor, Tensor, Tensor)"
#: Gradients of what ``grads`` names, in that order.
BACKWARD = (
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, {_OPERANDS}, Tensor out, Tensor lse, Tensor state, *,"
    f" {_SAID}, str grads='') -> Tensor[]"
)


def read_said(said: dict[str, Any]) -> tuple[str | None, str | None, Options]:
    """Backend, policy and options."""
    if said.get("window") is not None:
        said["window"] = tuple(said["window"])
    options = read.of_call(*[said.get(name, usual) for name, usual in USUAL.items()])
    return said.get("backend"), said.get("policy"), options
