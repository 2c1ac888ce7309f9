"""Calls of any form, one like another: as kernels are given them, and as their callers have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.call import alike, finite, forms
from attnswitch.machine.backend import Inputs, Offsets, Order

__all__ = ["check_known", "given", "inputs_of", "order_of"]


def inputs_of(p: Problem, layout: str = "BLHD", seed: int = 0) -> Inputs:
    """Of a call: packed queries, a cache in pages, whatever the problem has; random, but lengths that it may have."""
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        array = torch.randn(shape, generator=draw).to(getattr(torch, p.dtype))
        return array if layout == "BHLD" else array.swapaxes(1, 2).contiguous().swapaxes(1, 2)

    rows = (p.seq_q * p.batch + 3, p.seq_k * p.batch + 2) if p.varlen else (p.seq_q, p.seq_k)
    entries = 1 if p.varlen else p.batch
    query = made(entries, p.heads_q, rows[0], p.dim_qk)
    offsets = table = None
    scales: list[torch.Tensor | None] = [None, None]
    if p.page:
        columns = p.seq_k // p.page
        cache = made(p.batch * columns + 2, p.heads_kv, p.page, p.dim_qk)
        key, value = cache, cache[..., : p.dim_v]
        if p.dim_v == p.dim_qk:
            value = made(*cache.shape)
        if p.cache:
            key, value = (array.to(getattr(torch, p.cache)) for array in (key, value))
            scales = [torch.rand(len(cache), p.heads_kv, generator=draw) for _ in range(2)]
        table = torch.randint(len(cache), (p.batch, columns), generator=draw, dtype=torch.int32)
    else:
        key, value = (made(entries, p.heads_kv, rows[1], dim) for dim in (p.dim_qk, p.dim_v))
    if p.varlen:
        edges = torch.arange(p.batch + 1, dtype=torch.int32) * p.seq_q
        offsets = Offsets(edges, edges if p.page else torch.arange(p.batch + 1) * p.seq_k)
    mask = None
    if p.mask_shape is not None and p.mask is not None:
        mask = torch.randn(p.mask_shape, generator=draw).to(getattr(torch, p.mask.dtype))
    return Inputs(
        query,
        key,
        value,
        mask,
        torch.randint(1, p.seq_k, (p.batch,), generator=draw, dtype=torch.int32) if p.key_lengths else None,
        None,
        offsets,
        torch.randn(p.heads_q, generator=draw) if p.sinks else None,
        torch.rand(p.batch, p.heads_q, generator=draw) if p.alibi else None,
        table,
        key_scale=scales[0],
        value_scale=scales[1],
        tree_mask=torch.randint(256, (*query.shape[::2][:2], 8), generator=draw, dtype=torch.uint8) if p.tree else None,
    )


def order_of(p: Problem) -> Order:
    return Order(turned=True, packed=p.varlen)


def given(inputs: Inputs) -> list[Any]:
    """The same as a caller has them: with axes in another order."""
    flat = list(inputs.flat())
    if flat[6] is flat[7]:
        flat[7] = None
    turned = [
        x[0].swapaxes(0, 1) if inputs.offsets is not None and x.shape[0] == 1 else x.swapaxes(1, 2) for x in flat[:3]
    ]
    return [*turned, *flat[3:]]


def check_known(calls: Sequence[Callable[[], Any]], expected: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of ``calls``, and on, are asked of nothing; each comes to the bits and strides of ``expected``."""
    monkeypatch.setattr(alike, "knows_again", lambda _: True)
    with finite.checking("never"):
        for turn, (each, right) in enumerate(zip(calls, expected, strict=True)):
            if turn == 2:
                monkeypatch.setattr(forms, "called", None)
            for one, other in zip(each(), right, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
