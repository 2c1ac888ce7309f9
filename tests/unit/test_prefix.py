"""Sequences that share a prefix: one call for the prefix, one for the rest, merged (cascade attention)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parts import ROLES, Whole, near, placed

from attnswitch import attention, attention_backward, attention_varlen, attention_varlen_backward, merge
from attnswitch.verify import Case
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.launch import sequences
from attnswitch.verify.launch.layouts import host

PREFIX = 37
CASE = Case(batch=3, heads_kv=2, group=2, seq_q=5, dim_qk=16, dim_v=24, lse=True, grads="qkv", alignment="bottom_right")
#: New keys of each sequence. Without a mask one may have none; causal, each has its queries' own.
LENGTHS = {False: (9, 0, 4), True: (9, 5, 7)}
PARTS = slice(PREFIX), slice(PREFIX, PREFIX + 9)


def shared(case: Case) -> Whole:
    """The concatenated problem, whose sequences have one prefix."""
    lengths = LENGTHS[case.causal]
    case = case.replace(seq_k=PREFIX + max(lengths), lengths=tuple(PREFIX + n for n in lengths))
    data = operands(case)
    for role in ("key", "value"):
        data[role][1:, :, :PREFIX] = data[role][:1, :, :PREFIX]
    return Whole(case, data)


def divided(whole: Whole) -> tuple[Any, ...]:
    """Query; key and value of the prefix, (1, Hkv, P, D), and of the rest; the upstream gradients."""
    query, key, value, *upstream = whole.arrays()
    prefix, rest = ([x[:, :, part] for x in (key, value)] for part in PARTS)
    return query, [x[:1] for x in prefix], rest, *upstream


def folded(x: Any) -> Any:
    """The batch as rows: (B, H, L, ...) as (1, H, B * L, ...)."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, *x.shape[3:])


def unfolded(x: Any) -> Any:
    """The reverse."""
    return x.reshape(x.shape[1], CASE.batch, -1, *x.shape[3:]).swapaxes(0, 1)


def expanded(x: Any) -> Any:
    """One entry for all of the batch, without a copy."""
    shape = CASE.batch, *x.shape[1:]
    return x.expand(shape) if hasattr(x, "expand") else np.broadcast_to(x, shape)


def wide(x: Any) -> Any:
    """A result in NumPy and float64."""
    return host(x).astype(np.float64)


def options(whole: Whole) -> dict[str, Any]:
    """Of the rest, in which queries stand as in the whole."""
    causal = whole.case.causal
    return {"is_causal": causal, "causal_alignment": "bottom_right", "key_lengths": LENGTHS[causal]}


def check(whole: Whole, backend: str, results: dict[str, Any], factor: float = 1.0) -> None:
    """Gradients of keys and values are pairs, of the prefix and of the rest."""
    rows = [slice(None)]
    limits = whole.limits(whole.precision(backend), PARTS, rows)
    for name, result in results.items():
        wanted, limit = whole.answer.values[name], factor * limits[name]
        if name not in ("key", "value"):
            near(name, result, wanted, limit)
            continue
        batch = whole.case.batch  # a sum over as many times the rows
        prefix, rest = ([x[:, :, part] for x in (wanted, batch * limit)] for part in PARTS)
        summed = wide(result[0]).sum(0, keepdims=True)  # one gradient, or that of each sequence
        near(f"{name} of the prefix", summed, *(x.sum(0, keepdims=True) for x in prefix))
        near(f"{name} of the rest", result[1], *rest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["folded", "expanded"])
@pytest.mark.parametrize(
    ("library", "backend", "dtype"),
    [
        ("numpy", "reference", "float64"),
        ("numpy", "tiled", "float32"),
        ("numpy", "tiled", "bfloat16"),
        ("torch", "tiled", "float16"),
        ("torch", "sdpa-flash", "float32"),
        ("torch", "sdpa-flash", "bfloat16"),
    ],
)
def test_parts_are_the_concatenated_call(library: str, backend: str, dtype: str, way: str, causal: bool) -> None:
    dim_v, takes_lse = (16, False) if backend == "sdpa-flash" else (24, True)
    whole = shared(CASE.replace(library=library, dtype=dtype, causal=causal, dim_v=dim_v, lse=takes_lse))
    query, prefix, rest, grad_out, grad_lse = divided(whole)
    to, back, keys = folded, unfolded, prefix
    if way == "expanded":
        to, back, keys = _same, _same, tuple(expanded(x) for x in prefix)
    of_prefix = attention(to(query), *keys, return_lse=True, backend=backend)
    of_rest = attention(query, *rest, return_lse=True, backend=backend, **options(whole))
    out, lse = merge(*zip(map(back, of_prefix), of_rest, strict=True))

    given = {"out": out, "lse": lse, "grad_lse": grad_lse if takes_lse else None}
    grads: Any = attention_backward(grad_out, query, rest[0], rest[1], **given, backend=backend, **options(whole))
    given = {name: None if x is None else to(x) for name, x in given.items()}
    others: Any = attention_backward(to(grad_out), to(query), keys[0], keys[1], **given, backend=backend)
    results = {"out": out, "lse": lse, "query": wide(grads.query) + wide(back(others.query))}
    results |= {name: (wide(getattr(others, name)), getattr(grads, name)) for name in ("key", "value")}
    check(whole, backend, results)


def _same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", [None, "tiled"])
def test_torch_differentiates_the_parts(backend: str | None, dtype: str, causal: bool) -> None:
    whole = shared(CASE.replace(dtype=dtype, causal=causal))
    query, prefix, rest, *upstream = divided(whole)
    leaves = [x.contiguous().requires_grad_() for x in (query, *prefix, *rest)]
    parts = (
        attention(leaves[0], *(expanded(x) for x in leaves[1:3]), return_lse=True, backend=backend),
        attention(leaves[0], *leaves[3:], return_lse=True, backend=backend, **options(whole)),
    )
    out, lse = merge(*zip(*parts, strict=True))
    grads = torch.autograd.grad((out, lse), leaves, upstream)
    results = {"out": out, "lse": lse, "query": grads[0], "key": grads[1::2], "value": grads[2::2]}
    check(whole, "tiled", results, factor=2)  # the roundings of the parts' gradients, and of those of merge


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_rest_without_padding(backend: str, causal: bool) -> None:
    """The prefix is then one sequence of keys, and all queries one of queries."""
    whole = shared(CASE.replace(library="numpy", causal=causal, query_lengths=(5, 1, 3)))
    rest = whole.case.replace(seq_k=max(LENGTHS[causal]), lengths=LENGTHS[causal])
    own = {role: x[:, :, PARTS[1]] if role in ("key", "value") else x for role, x in whole.data.items()}
    query, key, value, grad_out, grad_lse = (
        placed(sequences.joined(rest, role, own[role])[0], "float32", "numpy") for role in ROLES
    )
    query, key, value, grad_out = (x.swapaxes(0, 1) for x in (query, key, value, grad_out))
    prefix: Any = [
        placed(whole.data[role][0, :, PARTS[0]], "float32", "numpy").swapaxes(0, 1) for role in ("key", "value")
    ]
    starts: Any = [sequences.offsets(rest, role) for role in ("query", "key")]
    call: Any = {"is_causal": causal, "causal_alignment": "bottom_right", "backend": backend}
    one: Any = ([0, len(query)], [0, PREFIX])
    of_prefix = attention_varlen(query, *prefix, *one, return_lse=True, backend=backend)
    of_rest = attention_varlen(query, key, value, *starts, return_lse=True, **call)
    out, lse = merge(*zip(of_prefix, of_rest, strict=True))

    given = {"out": out, "lse": lse, "grad_lse": grad_lse}
    others: Any = attention_varlen_backward(
        grad_out, query, prefix[0], prefix[1], one[0], one[1], **given, backend=backend
    )
    grads: Any = attention_varlen_backward(grad_out, query, key, value, starts[0], starts[1], **given, **call)
    found = {"out": out, "lse": lse, "query": wide(grads.query) + wide(others.query)}
    results = {name: sequences.padded(rest, name, x) for name, x in found.items()}
    for name in ("key", "value"):
        of_keys = sequences.padded(rest, f"grad {name}", getattr(grads, name))
        results[name] = getattr(others, name).swapaxes(0, 1)[None], of_keys
    check(whole, backend, results)
