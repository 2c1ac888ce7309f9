"""The text form of a ``Problem``: ``str(p)`` and ``Problem.parse`` are inverse.

Parts are joined by dots (a dot before a letter; decimals are followed by digits) or by spaces. Shape parts come
first and are required; the others appear only when they differ from the default.

    b2                    batch                             softcap=30.0       softcap
    h16  h16/4            query heads / key heads           dropout=0.1        dropout_p
    s128  s128x256        queries x keys                    seeded             a dropout seed is given
    d64  d192/128         query and key / value head dim    lse                return_lse
    fp16 bf16 fp32 fp64   dtype                             grad  grad=qkm     gradients (grad alone: q, k and v)
    causal  causal-br     top-left / bottom-right           deterministic      deterministic
    window=1024,0         left,right; * is unlimited        k=expanded,align2  memory of q, k, v or m
    mask=bool  mask=fp16:bhqk   dtype and axes (qk)         nonfinite          NaN, inf or what overflows
    lengths               key_lengths                       scale=0.125        scale
    cache=fp8e4m3         type of the pages: fp8e4m3 (float8_e4m3fn), fp8e5m2 (float8_e5m2) or int8
    varlen                attention_varlen: s128x256 are the most queries and keys of any of its sequences
    page=16               attention_paged: rows of a page   splits=4           its num_splits
    sinks  alibi          sinks and alibi_slopes are given  tree               tree_mask, with page
    bottom-right          alignment of a window or of alibi that is not causal, and of a tree
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attnswitch.errors import InvalidProblem
from attnswitch.names import meant, shown
from attnswitch.problem import CACHES, CONTIGUOUS, Mask, Memory, Problem, Window

__all__ = ["format_problem", "parse_problem"]

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "bool"}
_LONG = {short: long for long, short in _SHORT.items()} | {long: long for long in _SHORT}
_CACHES = {"fp8e4m3": "float8_e4m3fn", "fp8e5m2": "float8_e5m2", "int8": "int8"}
_LONG |= {"f16": "float16", "f32": "float32", "f64": "float64"}
_OPERANDS = {"q": "query", "k": "key", "v": "value", "m": "attn_mask"}
_MEMORY = ("strided", "expanded", "negative")
_SEPARATOR = re.compile(r"\.(?=[A-Za-z])|\s+")


def format_problem(p: Problem) -> str:
    """Text of ``p``; only what differs from the defaults is written."""
    parts = [
        f"b{p.batch}",
        f"h{p.heads_q}" + (f"/{p.heads_kv}" if p.heads_kv != p.heads_q else ""),
        f"s{p.seq_q}" + (f"x{p.seq_k}" if p.seq_k != p.seq_q else ""),
        f"d{p.dim_qk}" + (f"/{p.dim_v}" if p.dim_v != p.dim_qk else ""),
        _SHORT[p.dtype],
    ]
    if p.causal:
        parts.append("causal-br" if p.bottom_right else "causal")
    elif p.bottom_right:
        parts.append("bottom-right")
    if p.window:
        parts.append("window=" + ",".join("*" if side is None else str(side) for side in p.window))
    if p.mask:
        parts.append(f"mask={_SHORT[p.mask.dtype]}" + (f":{p.mask.axes}" if p.mask.axes != "qk" else ""))
    parts += [name for name, said in (("lengths", p.key_lengths), ("varlen", p.varlen)) if said]
    parts += [f"{name}={number}" for name in ("page", "splits") if (number := getattr(p, name))]
    parts += [f"cache={short}" for short, long in _CACHES.items() if long == p.cache]
    parts += [name for name in ("tree", "sinks", "alibi") if getattr(p, name)]
    if p.scale is not None:
        parts.append(f"scale={float(p.scale)!r}")
    parts += [f"{name}={float(number)!r}" for name in ("softcap", "dropout") if (number := getattr(p, name))]
    parts += [name for name in ("seeded", "lse") if getattr(p, name)]
    if p.grads:
        parts.append("grad" if p.grads == "qkv" else f"grad={p.grads}")
    if p.deterministic:
        parts.append("deterministic")
    for letter, name in _OPERANDS.items():
        memory: Memory = getattr(p, name)
        if memory != CONTIGUOUS:
            flags = [flag for flag in _MEMORY if getattr(memory, flag)]
            flags += [f"align{memory.align}"] if memory.align != 16 else []
            parts.append(f"{letter}={','.join(flags)}")
    if p.nonfinite:
        parts.append("nonfinite")
    return ".".join(parts)


def _window(text: str) -> Window:
    left, right = (None if side == "*" else int(side) for side in text.split(","))
    return left, right


def _mask(text: str) -> Mask:
    dtype, _, axes = text.partition(":")
    return Mask(_LONG[dtype], axes if ":" in text else "qk")


def _memory(text: str) -> Memory:
    fields: dict[str, Any] = {}
    for flag in text.split(","):
        if flag.startswith("align"):
            fields["align"] = int(flag.removeprefix("align"))
        elif flag in _MEMORY:
            fields[flag] = True
        else:
            raise ValueError(flag)
    return Memory(**fields)


def _count(name: str, without: str) -> Callable[[str], int]:
    """Reads a number whose 0 a ``Problem`` has for none, which a text leaves out."""

    def read(text: str) -> int:
        number = int(text)
        if not number:
            raise InvalidProblem(f"{name}={text}: expected 1 or more; leave {name} out {without}")
        return number

    return read


def _grads(text: str) -> str:
    if not text:
        raise InvalidProblem(
            "grad= names no operand: expected some of qkvm, as in grad=qk, or grad alone for q, k and v"
        )
    return text


_SHAPES = {
    "b": ("batch", "", ""),
    "h": ("heads_q", "/", "heads_kv"),
    "s": ("seq_q", "x", "seq_k"),
    "d": ("dim_qk", "/", "dim_v"),
}
_FLAGS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal-br": {"causal": True, "alignment": "bottom_right"},
    "bottom-right": {"alignment": "bottom_right"},
    "lengths": {"key_lengths": True},
    "grad": {"grads": "qkv"},
    **{name: {name: True} for name in ("varlen", "tree", "sinks", "alibi")},
    **{name: {name: True} for name in ("seeded", "lse", "deterministic", "nonfinite")},
    **{short: {"dtype": long} for short, long in _LONG.items() if long != "bool"},
}
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "window": ("window", _window),
    "mask": ("mask", _mask),
    "page": ("page", _count("page", "where there are no pages")),
    "splits": ("splits", _count("splits", "to leave the parts open")),
    "cache": ("cache", lambda text: _CACHES.get(text) or {long: long for long in CACHES}[text]),
    "scale": ("scale", float),
    "softcap": ("softcap", float),
    "dropout": ("dropout", float),
    "grad": ("grads", _grads),
    **{letter: (name, _memory) for letter, name in _OPERANDS.items()},
}


def _part(part: str) -> dict[str, Any]:
    """The fields that one part of the text sets. Raises ``ValueError`` or ``KeyError`` for what it cannot read."""
    if part in _FLAGS:
        return _FLAGS[part]
    name, equals, text = part.partition("=")
    if equals:
        field, read = _VALUES[name]
        return {field: read(text)}
    field, separator, second = _SHAPES[part[:1]]
    if not second:
        return {field: int(part[1:])}
    one, separated, two = part[1:].partition(separator)
    return {field: int(one), second: int(two if separated else one)}


def _meant(part: str) -> str:
    """What a part that is not understood may have been meant to be, for the end of the message."""
    name, equals, text = part.partition("=")
    if not equals:
        return meant(name, _FLAGS)
    if name not in _VALUES:
        return meant(name, _VALUES)
    if name == "mask":
        return meant(text.partition(":")[0], _LONG)
    if name == "cache":
        return meant(text, _CACHES)
    return meant(text, _MEMORY) if name in _OPERANDS else ""


def parse_problem(text: str) -> Problem:
    """Read a problem from its text form.

    Raises:
        InvalidProblem: a part is unknown, stands twice, is missing, or the whole makes no sense.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, _SEPARATOR.split(text.strip())):
        try:
            read = _part(part)
        except InvalidProblem:
            raise
        except (KeyError, ValueError):
            raise InvalidProblem(
                f"problem {shown(text)}: part {shown(part)} is not understood; a problem looks like"
                " b2.h16/4.s1024x4096.d128.bf16.causal: batch, heads, lengths, head dimension, dtype (fp16, bf16, fp32,"
                " fp64), then options such as causal-br, window=128,0, mask=bool, lengths, page=16, cache=fp8e4m3,"
                " sinks, lse, grad"
                f"{_meant(part)}"
            ) from None
        if twice := fields.keys() & read.keys():
            again = ", ".join(sorted(twice))
            raise InvalidProblem(f"problem {shown(text)}: part {shown(part)} sets {again} a second time")
        fields |= read
    wanted = {"b": "batch", "h": "heads_q", "s": "seq_q", "d": "dim_qk", "a dtype such as bf16": "dtype"}
    if missing := [part for part, name in wanted.items() if name not in fields]:
        raise InvalidProblem(f"problem {shown(text)}: missing {', '.join(missing)}, as in b1.h8.s1024.d64.bf16")
    return Problem(**fields)
