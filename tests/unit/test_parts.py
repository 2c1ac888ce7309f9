"""Odd parts: of no keys, that rows see nothing of, that hardly weigh, of scores far from 0; and many of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from parts import Whole

from attnswitch import attention, attention_backward, merge
from attnswitch.verify import Case, MaskRecipe
from attnswitch.verify.launch.layouts import host

CASE = Case(batch=2, heads_kv=2, group=2, seq_q=7, seq_k=40, dim_qk=16, dim_v=16, lse=True, grads="qkv")
#: Who computes the parts of a library's arrays, forward and backward.
BACKENDS = {
    "reference": ("numpy", "reference", "reference"),
    "tiled": ("numpy", "tiled", "tiled"),
    "flash": ("torch", "sdpa-flash", "sdpa-flash"),
    "math": ("torch", "tiled", "sdpa-math"),
}
every_backend = pytest.mark.parametrize("name", BACKENDS)


def whole_of(name: str, **changes: Any) -> Whole:
    """Its lse has a gradient where the backward takes one."""
    library, _, backward = BACKENDS[name]
    return Whole.of(CASE.replace(library=library, lse=not backward.startswith("sdpa"), **changes))


def cut(length: int, *edges: int) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise((0, *edges, length))]


def in_parts(whole: Whole, name: str, keys: Sequence[slice]) -> dict[str, Any]:
    """Results of the whole by a call for each of ``keys``."""
    _, forward, backward = BACKENDS[name]
    query, key, value, grad_out, grad_lse = whole.arrays()
    mask = whole.data.get("attn_mask")
    mask = mask if mask is None or whole.case.library == "numpy" else torch.from_numpy(mask)
    calls: list[dict[str, Any]] = [
        {"key": key[:, :, part], "value": value[:, :, part], "attn_mask": None if mask is None else mask[..., part]}
        for part in keys
    ]
    pairs = [attention(query, **call, return_lse=True, backend=forward) for call in calls]
    out, lse = merge(*zip(*pairs, strict=True))
    given: dict[str, Any] = {"out": out, "lse": lse, "grad_lse": grad_lse if whole.case.lse else None}
    found: Any = [attention_backward(grad_out, query, **call, **given, backend=backward) for call in calls]
    grads = [[host(part[n]).astype(np.float64) for part in found] for n in range(3)]
    keyed = {role: np.concatenate(grads[n], 2) for n, role in enumerate(("query", "key", "value")) if n}
    return {"out": out, "lse": lse, "query": sum(grads[0]), **keyed}


def check(whole: Whole, name: str, keys: Sequence[slice]) -> dict[str, Any]:
    results = in_parts(whole, name, keys)
    whole.check(results, whole.precision(BACKENDS[name][2]), keys, [slice(None)])
    return results


@every_backend
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_many_parts_some_of_no_keys(name: str, dtype: str) -> None:
    whole = whole_of(name, dtype=dtype)
    check(whole, name, cut(40, 0, 1, 1, 9, 20, 33, 40))


@every_backend
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_see_nothing_of_a_part_or_of_any(name: str, dtype: str) -> None:
    whole = whole_of(name, dtype=dtype, mask=MaskRecipe("bool", "bhqk"))
    mask = whole.data["attn_mask"]
    mask[:, :, 0] = mask[0, 1] = False
    mask[:, :, 1, :20] = mask[:, :, 2, 20:] = False
    results = check(whole, name, cut(40, 20))
    assert host(results["lse"])[:, :, 0].max() == -np.inf
    for result in ("out", "query"):
        assert not host(results[result])[:, :, 0].any()


@every_backend
def test_no_part_has_keys(name: str) -> None:
    check(whole_of(name, seq_k=0), name, cut(0, 0))


@every_backend
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("apart", [0.0, 7.0, 18.0])
def test_scores_far_from_zero_and_from_each_other(name: str, dtype: str, shift: float, apart: float) -> None:
    """A part that hardly weighs leaves an lse to the other that is nearly the whole's."""
    whole = whole_of(name, dtype=dtype)
    query, key = whole.data["query"], whole.data["key"]
    query[..., :2] = 128.0, 1.0
    key[..., 0] = np.float32(shift * 4 / 128)
    key[:, :, :20, 1], key[:, :, 20:, 1] = 0.0, -4 * apart
    check(whole, name, cut(40, 20))


# -- merge alone -------------------------------------------------------------------------------------------------------


def results(count: int, rows: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outs and lses of parts, of which each row is seen by some and not by others."""
    torch.manual_seed(0)
    outs = [torch.randn(1, 2, rows, 4, dtype=torch.float64) for _ in range(count)]
    lses = [3 * torch.randn(1, 2, rows, dtype=torch.float64) for _ in range(count)]
    for n in range(count):
        lses[n][:, :, n % rows] = -torch.inf
        outs[n][:, :, n % rows] = 0.0
    return outs, lses


@pytest.mark.parametrize("count", [2, 8])
def test_gradients_of_merge_through_output_and_lse(count: int) -> None:
    outs, lses = results(count)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]

    def merged(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return merge(leaves[:count], leaves[count:])

    assert torch.autograd.gradcheck(merged, leaves)


@pytest.mark.parametrize("count", [2, 8])
def test_merged_results_are_merged_again(count: int) -> None:
    outs, lses = results(count)
    running = outs[0], lses[0]
    for pair in zip(outs[1:], lses[1:], strict=True):
        running = merge(*zip(running, pair, strict=True))
    for found, wanted in zip(running, merge(outs, lses), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_is_not_finite_stays_in_its_row(library: str) -> None:
    """NumPy warns of inf - inf, which here is what the whole would come to."""
    outs, lses = results(2)
    right = merge(outs, lses)
    lses[0][0, 0, 1], outs[0][0, 1, 2] = torch.inf, torch.nan
    parts: list[Any] = [[x.numpy() if library == "numpy" else x for x in group] for group in (outs, lses)]
    out, lse = (torch.as_tensor(x) for x in merge(*parts))
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert out[0, 1, 2].isnan().all()
    out[0, 0, 1], lse[0, 0, 1], out[0, 1, 2] = right[0][0, 0, 1], right[1][0, 0, 1], right[0][0, 1, 2]
    torch.testing.assert_close((out, lse), right, rtol=0, atol=0)
