"""The tensors of a problem, such as that of a row in one direction, and the keywords of the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import attnswitch
from attnswitch.bench.record import Direction
from attnswitch.bench.suites import Row
from attnswitch.machine import trees
from attnswitch.machine.pages import Pages
from attnswitch.problem import Problem, cost

__all__ = ["SEED", "Workload", "asked", "make", "of", "padding"]

#: Of the tensors, and of dropout where the problem has a seed.
SEED = 20251120
#: Share of the positions that a bool mask leaves visible, where no lengths say which.
_VISIBLE = 0.9


@dataclass(frozen=True, slots=True)
class Workload:
    """Tensors on the device: N(0,1), from a fixed seed, contiguous.

    query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), attn_mask with four axes, key_lengths (B,),
    grad_out (B, Hq, Lq, Dv). With ``problem.varlen`` sequences lie one after another, (T, H, D), and ``offsets`` says
    where those of queries and of keys begin. With ``problem.page`` key and value are caches (P, page, Hkv, D or Dv), of
    whose pages ``block_table`` names those of each sequence in no order, and query is (B, Lq, Hq, D), or (T, Hq, D).
    With ``problem.cache`` these are stored in 8 bits, with ``scales`` of keys and of values, (P, Hkv).
    With ``problem.tree`` the queries of each sequence are a binary tree, level after level, whose bits are tree_mask.
    sinks are (Hq,), and alibi_slopes those of the paper, (Hq,), in float32. ``problem.grads`` names those that require
    gradients: none for the forward.
    """

    problem: Problem
    device: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    key_lengths: torch.Tensor | None
    grad_out: torch.Tensor | None
    offsets: tuple[torch.Tensor, torch.Tensor] | None = None
    block_table: torch.Tensor | None = None
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The public call that it is."""
        called: Callable[..., Any] = attnswitch.attention
        if self.block_table is not None:
            return attnswitch.attention_paged
        return called if self.offsets is None else attnswitch.attention_varlen

    def entry(self, tensor: torch.Tensor, b: int, role: str) -> torch.Tensor:
        """Batch entry ``b``, (H, L, D), of an operand or a result with the rows of query, key or value (``role``)."""
        if self.block_table is not None and role != "query":
            assert self.key_lengths is not None
            pages = Pages(tensor.transpose(1, 2), self.block_table[b], self.scales[role != "key"])
            rows = pages.rows(0, int(self.key_lengths[b]))
            return rows[0]  # type: ignore[no-any-return]
        if self.offsets is None:
            return tensor[b] if self.block_table is None else tensor[b].transpose(0, 1)
        begin, end = self.offsets[role != "query"][b : b + 2].tolist()
        return tensor[begin:end].transpose(0, 1)

    def seen(self, b: int) -> torch.Tensor | None:
        """Which keys of sequence ``b`` each of its queries sees by its tree, (L, keys); None where there is none."""
        if self.tree_mask is None:
            return None
        assert self.key_lengths is not None
        begin, end = (b, b + 1) if self.offsets is None else self.offsets[0][b : b + 2].tolist()
        bits = self.tree_mask[begin:end] if self.offsets is None else self.tree_mask[None, begin:end]
        return trees.as_mask(bits, int(self.key_lengths[b]))[0, 0]  # type: ignore[no-any-return]

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The operands that gradients are taken of, in the order q, k, v, m."""
        operands = zip("qkvm", (self.query, self.key, self.value, self.attn_mask), strict=True)
        return tuple(tensor for letter, tensor in operands if letter in self.problem.grads and tensor is not None)

    def arrays(self) -> dict[str, Any]:
        """What a plan is called with beside query, key and value."""
        heads = {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        beside: dict[str, Any] = {name: tensor for name, tensor in heads.items() if tensor is not None}
        if self.block_table is not None:
            starts = None if self.offsets is None else self.offsets[0]
            cache = {"block_table": self.block_table, "cache_lengths": self.key_lengths, "cu_seqlens_q": starts}
            some = {"tree_mask": self.tree_mask, "key_scale": self.scales[0], "value_scale": self.scales[1]}
            return beside | cache | {name: tensor for name, tensor in some.items() if tensor is not None}
        beside["seed"] = SEED if self.problem.seeded else None
        if self.offsets is not None:
            return beside | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.offsets, strict=True))
        return beside | {"attn_mask": self.attn_mask, "key_lengths": self.key_lengths}

    @property
    def kept(self) -> float:
        """The share of the batch's B * Lk keys that its sequences have."""
        p = self.problem
        if p.varlen and not p.page:
            return self.key.shape[0] / (p.batch * p.seq_k)
        return 1.0 if self.key_lengths is None else float(self.key_lengths.sum()) / (p.batch * p.seq_k)

    def keywords(self) -> dict[str, Any]:
        """What ``function`` is given beside query, key and value."""
        p, beside = self.problem, self.arrays()
        if p.varlen:
            beside["max_seqlen_q"] = p.seq_q
        if p.page:
            beside |= {"is_causal": p.causal, "scale": p.scale, "window": p.window, "softcap": p.softcap}
            return beside | {"return_lse": p.lse, "num_splits": p.splits or None, "deterministic": p.deterministic}
        if p.varlen:
            beside["max_seqlen_k"] = p.seq_k
        return beside | {
            "dropout_p": p.dropout,
            "is_causal": p.causal,
            "scale": p.scale,
            "causal_alignment": p.alignment,
            "window": p.window,
            "softcap": p.softcap,
            "return_lse": p.lse,
            "deterministic": p.deterministic,
        }


def asked(row: Row, direction: Direction) -> Problem:
    """The problem of ``row`` in ``direction``: gradients are of q, k and v, unless it names its own."""
    return row.problem.replace(grads=(row.problem.grads or "qkv") if direction != "forward" else "")


def make(row: Row, direction: Direction, device: str) -> Workload:
    """The tensors of ``row``, of the problem that is ``asked``."""
    return of(asked(row, direction), device, row.lengths)


def of(p: Problem, device: str, lengths: tuple[int, ...] | None = None, seed: int = SEED) -> Workload:
    """The tensors of ``p``, contiguous and finite; ``lengths`` are its own, or those of its padding mask.

    Without any they are evenly spread, the first sequence whole; queries are as many as keys where the longest are. Of
    latent heads the values are a view of the keys.
    """
    dtype = getattr(torch, p.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = dtype, letter: str = "") -> torch.Tensor:
        tensor = torch.randn(shape, device=device, dtype=of, generator=generator)
        return tensor.requires_grad_(letter != "" and letter in p.grads)

    latent = cost.is_latent(p)
    queries, keys = (tuple(n * (p.batch - b) // p.batch for b in range(p.batch)) for n in (p.seq_q, p.seq_k))
    if p.page:
        return _paged(p, device, lengths or keys, queries, normal, generator)
    if p.varlen:
        keys = lengths or keys
        queries = keys if p.seq_q == p.seq_k else queries
        query = normal(sum(queries), p.heads_q, p.dim_qk, letter="q")
        key = normal(sum(keys), p.heads_kv, p.dim_qk, letter="k")
        value = key[..., : p.dim_v] if latent else normal(sum(keys), p.heads_kv, p.dim_v, letter="v")
        grad_out = normal(sum(queries), p.heads_q, p.dim_v) if p.grads else None
        offsets = _offsets(queries, device), _offsets(keys, device)
        return Workload(p, device, query, key, value, None, None, grad_out, offsets, **_heads(p, device))
    query = normal(p.batch, p.heads_q, p.seq_q, p.dim_qk, letter="q")
    key = normal(p.batch, p.heads_kv, p.seq_k, p.dim_qk, letter="k")
    value = key[..., : p.dim_v] if latent else normal(p.batch, p.heads_kv, p.seq_k, p.dim_v, letter="v")
    mask = None
    if p.mask is not None and p.mask_shape is not None:
        if not p.mask.is_bool:
            mask = normal(*p.mask_shape, of=getattr(torch, p.mask.dtype), letter="m")
        elif lengths is not None and not p.key_lengths:
            mask = padding(torch.tensor(lengths, device=device), p.seq_k).expand(p.mask_shape).contiguous()
        else:
            mask = torch.rand(p.mask_shape, device=device, generator=generator) < _VISIBLE
    key_lengths = None
    if p.key_lengths:
        key_lengths = torch.tensor(lengths or keys, device=device, dtype=torch.int32)
    grad_out = normal(p.batch, p.heads_q, p.seq_q, p.dim_v) if p.grads else None
    return Workload(p, device, query, key, value, mask, key_lengths, grad_out, **_heads(p, device))


def _heads(p: Problem, device: str) -> dict[str, Any]:
    """Sinks of N(0,1), and slopes, where the problem has them, by their names in ``Workload``."""
    dtype = torch.float64 if p.dtype == "float64" else torch.float32
    generator = torch.Generator(device).manual_seed(SEED)
    sinks = torch.randn(p.heads_q, device=device, dtype=dtype, generator=generator) if p.sinks else None
    slopes = torch.arange(1, p.heads_q + 1, device=device, dtype=dtype).mul(-8 / p.heads_q).exp2() if p.alibi else None
    return {"sinks": sinks, "alibi_slopes": slopes}


def _paged(
    p: Problem,
    device: str,
    lengths: tuple[int, ...],
    queries: tuple[int, ...],
    normal: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> Workload:
    """The tensors of a cache in pages, as many as sequences of these ``lengths`` use."""
    used = [-(-length // p.page) for length in lengths]
    places = torch.randperm(sum(used), device=device, generator=generator, dtype=torch.int32)
    table = torch.zeros(p.batch, p.seq_k // p.page, device=device, dtype=torch.int32)
    for row, first, count in zip(table, itertools.accumulate(used, initial=0), used, strict=False):
        row[:count] = places[first : first + count]
    query = normal(sum(queries), p.heads_q, p.dim_qk) if p.varlen else normal(p.batch, p.seq_q, p.heads_q, p.dim_qk)
    key = normal(sum(used), p.page, p.heads_kv, p.dim_qk)
    value = key[..., : p.dim_v] if cost.is_latent(p) else normal(sum(used), p.page, p.heads_kv, p.dim_v)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if p.cache:
        (key, of_keys), (value, of_values) = (_stored(cache, p.cache) for cache in (key, value))
        scales = of_keys, of_values
    cache_lengths = torch.tensor(lengths, device=device, dtype=torch.int32)
    offsets = (_offsets(queries, device),) * 2 if p.varlen else None
    tree = _tree(p.seq_q, queries if p.varlen else (p.seq_q,) * p.batch).to(device) if p.tree else None
    if tree is not None and not p.varlen:
        tree = tree.reshape(p.batch, p.seq_q, -1)
    heads = _heads(p, device)
    return Workload(
        p, device, query, key, value, None, cache_lengths, None, offsets, table, scales, tree_mask=tree, **heads
    )


def _tree(most: int, queries: tuple[int, ...]) -> torch.Tensor:
    """The bits of a binary tree of so many queries for each sequence, one after another, (T, W)."""
    seen = np.eye(most, dtype=bool)
    for t in range(1, most):
        seen[t] |= seen[(t - 1) // 2]
    bits = torch.from_numpy(np.packbits(seen, axis=-1, bitorder="little"))
    return torch.cat([bits[:count] for count in queries])


def _stored(cache: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache (P, page, Hkv, D) in 8 bits, and the scales (P, Hkv) by which it fills their range."""
    kind = getattr(torch, dtype)
    most = torch.finfo(kind).max if kind.is_floating_point else torch.iinfo(kind).max
    scales = cache.abs().amax((1, 3)).float() / most
    scaled = cache.float() / scales[:, None, :, None]
    return (scaled if kind.is_floating_point else scaled.round()).to(kind), scales


def _offsets(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)


def padding(lengths: torch.Tensor, seq_k: int) -> torch.Tensor:
    """The bool mask (B, 1, 1, Lk) that is True before each length."""
    return (torch.arange(seq_k, device=lengths.device) < lengths[:, None])[:, None, None, :]
