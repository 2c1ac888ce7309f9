"""What the operators are told of a call, as torch's schemas write it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import numpy as np
import torch

from attnswitch.call import options as read
from attnswitch.call.options import Options
from attnswitch.errors import InvalidProblem
from attnswitch.problem import Alignment

__all__ = ["ABSENT", "ATTENTION", "PAGED", "SEED", "USUAL", "VARLEN", "check_known", "read_said", "told"]

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
_FLAGS = frozenset(field.name for field in fields(Options) if str(field.type).startswith("bool"))
_NUMBERS = frozenset(field.name for field in fields(Options) if str(field.type).startswith("float"))
# Tuples, as a graph of torch.compile cannot trace unions.
_INTEGER, _NUMBER = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)
_OF_NUMPY = (np.ndarray, np.generic)
_ARRAY = (torch.Tensor, *_OF_NUMPY)
_OPTIONAL = frozenset(field.name for field in fields(Options) if field.default is None)
_TEXTS = {"causal_alignment": get_args(Alignment), "layout": read.LAYOUTS}
_SAID = {field.name: f"{_TYPES[str(field.type)]} {field.name}={field.default!r}" for field in fields(Options)}
_SAID |= {name: f"str? {name}=None" for name in ("backend", "policy")}


def _forms(name: str, operands: str, *, without: str = "") -> tuple[str, str, str]:
    """The schemas of three operators on ``operands``, told every option but ``without``.

    The first returns the output of a call without gradients and lse, of which nothing is kept; the second output, lse,
    and the seed of a dropout mask that is made again; the third gradients of what ``grads`` names, in that order. A
    seed may have been ``drawn`` before.
    """
    said = ", ".join([each for option, each in _SAID.items() if option != without])
    results = "Tensor out, Tensor lse, Tensor state"
    return (
        f"{name}({operands}, Tensor? drawn=None, *, {said}, SymInt? seed=None) -> Tensor",
        f"{name}_forward({operands}, Tensor? drawn=None, *, {said}, str grads='', SymInt? seed=None)"
        " -> (Tensor, Tensor, Tensor)",
        f"{name}_backward(Tensor grad_out, Tensor? grad_lse, {operands}, {results}, *, {said}, str grads='')"
        " -> Tensor[]",
    )


#: Of ``attention``.
ATTENTION = _forms(
    "attention",
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, Tensor? alibi_slopes",
)
#: Of ``attention_varlen``. The longest may be symbols in a graph; those left out are computed when it runs.
VARLEN = _forms(
    "attention_varlen",
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes,"
    " SymInt? max_seqlen_q, SymInt? max_seqlen_k",
    without="layout",
)


def _of_pages() -> tuple[str, str]:
    """The schemas of both operators on a cache in pages: the second returns the lse as well. It has no gradients."""
    operands = (
        "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor cache_lengths,"
        " Tensor? cu_seqlens_q, SymInt? max_seqlen_q, SymInt? num_splits, Tensor? tree_mask,"
        " Tensor? key_scale, Tensor? value_scale, Tensor? sinks, Tensor? alibi_slopes"
    )
    without = ("dropout_p", "enable_gqa", "causal_alignment", "layout")
    said = ", ".join([each for option, each in _SAID.items() if option not in without])
    return (
        f"attention_paged({operands}, *, {said}) -> Tensor",
        f"attention_paged_forward({operands}, *, {said}) -> (Tensor, Tensor)",
    )


#: Of ``attention_paged``.
PAGED = _of_pages()

#: A seed (1,) of the CPU's generator. In a graph it is drawn apart, so that a forward made again (checkpointing) has it
#: again. ``fresh`` is a tensor of its own for each: torch 2.11 takes two nodes with the same operands for one, unless
#: they are random operators of its own, or ``empty``.
SEED = "drawn_seed(Tensor fresh) -> Tensor"
#: Which heads have no sink. A graph that computes with sinks has it, as their numbers are looked at when it runs.
ABSENT = "absent_sinks(Tensor sinks) -> Tensor"


def told(name: str, value: Any) -> Any:
    """The option ``name`` as a schema takes it; in a graph of torch.compile NumPy's float64 is read.

    Raises ``InvalidProblem`` where it makes no sense, and for what a schema takes for something else, 1 for True.
    """
    if name in _NUMBERS and torch.compiler.is_dynamo_compiling() and isinstance(value, _OF_NUMPY):
        number = torch.as_tensor(value)
        if number.dtype is torch.float64 and number.ndim == 0:
            return float(value)
    for each in value if name == "window" and isinstance(value, (tuple, list)) else (value,):
        check_known(name, each)
    return value if _is_plain(name, value) else read.check(name, value)


def check_known(name: str, value: Any) -> None:
    """Raises ``InvalidProblem`` for a tensor, whose number no graph knows; in one NumPy's numbers are tensors."""
    if torch.compiler.is_dynamo_compiling() and isinstance(value, _ARRAY):
        hint = ", or multiply query by it" if name == "scale" else ""
        raise InvalidProblem(f"{name} is a tensor, whose number is not known in a graph: give a number{hint}")


def _is_plain(name: str, value: Any) -> bool:
    """Whether ``value`` is of the type that a schema has for an option, so that its operator can say what is wrong.

    Numbers may be symbols in a graph.
    """
    if value is None:
        return name in _OPTIONAL
    if name in _FLAGS:
        return isinstance(value, bool)
    if name in _NUMBERS:
        return isinstance(value, _NUMBER) and not isinstance(value, bool)
    if name == "window":
        return isinstance(value, (tuple, list)) and len(value) == 2 and _is_side(value[0]) and _is_side(value[1])
    return isinstance(value, str) and value in _TEXTS[name]


def _is_side(value: Any) -> bool:
    return value is None or (isinstance(value, _INTEGER) and not isinstance(value, bool))


def read_said(said: dict[str, Any]) -> tuple[str | None, str | None, Options]:
    """Backend, policy and options."""
    if said.get("window") is not None:
        said["window"] = tuple(said["window"])
    options = read.of_call(*[said.get(name, usual) for name, usual in USUAL.items()])
    return said.get("backend"), said.get("policy"), options
