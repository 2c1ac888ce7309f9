"""The tensors of a row: the same for every call, or new for each, made before the clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from attnswitch.bench import workload
from attnswitch.bench.overhead.rows import Row

__all__ = ["Feed", "Operands", "Source"]

#: Share of the keys that a mask of keys alone leaves visible, from the first on: the rest is padding.
_REAL = 0.9


class Operands(NamedTuple):
    """What one call is given: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), attn_mask."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None


class Source(Protocol):
    """Where the tensors of calls come from; what ``ways`` are given."""

    @property
    def first(self) -> Any:
        """Those of the row's own problem."""

    def take(self, calls: int, way: int = 0, ways: int = 1) -> Sequence[Any]:
        """Those of ``calls`` calls of one of ``ways`` ways to call that take turns."""


class Feed:
    """Operands for batches of calls: no number of keys comes twice where ``row.new`` says so, whoever is called."""

    def __init__(self, row: Row, device: str, most: int = 0) -> None:
        """``most`` is how many numbers of keys are asked for."""
        p = row.problem
        self._row, self._used = row, 0
        self._long = p.seq_k + most + 1 if row.new == "length" else 2 * p.seq_k if row.keys == "slice" else p.seq_k
        made = workload.of(p, device)
        key, value, mask = made.key, made.value, made.attn_mask
        if self._long > p.seq_k:
            cache = workload.of(p.replace(seq_k=self._long, grads="", mask=None), device)
            key, value = (
                whole.requires_grad_(like.requires_grad) for whole, like in ((cache.key, key), (cache.value, value))
            )
        if p.mask is not None and p.mask.is_bool and p.mask.axes == "k":
            real = torch.tensor([int(_REAL * p.seq_k)], device=device)
            mask = workload.padding(real, self._long if row.new == "length" else p.seq_k)
        self._whole = Operands(made.query, key, value, mask)
        self._same = self._cut(p.seq_k)
        self.grad_out = made.grad_out
        asked = zip("qkvm", self._whole, strict=True)
        self.leaves = tuple(tensor for letter, tensor in asked if letter in p.grads and tensor is not None)

    @property
    def first(self) -> Operands:
        """The operands of the row's own problem."""
        return self._same

    def take(self, calls: int, way: int = 0, ways: int = 1) -> list[Operands]:
        """Operands for ``calls`` calls of one of ``ways`` ways to call that take turns.

        Numbers of keys are dealt out one by one, so that in one round each way has about as many keys as another.
        """
        if self._row.new == "length":
            start = self._row.problem.seq_k + 1 + self._used + way
            if way == ways - 1:
                self._used += calls * ways
            return [self._cut(start + ways * call) for call in range(calls)]
        if self._row.new == "mask" and self._same.attn_mask is not None:
            return [self._same._replace(attn_mask=self._same.attn_mask.clone()) for _ in range(calls)]
        return [self._same] * calls

    def _cut(self, length: int) -> Operands:
        """The first ``length`` keys; what is that long already is left as it is."""
        query, key, value, mask = self._whole
        key, value = (whole if whole.shape[2] == length else whole[:, :, :length] for whole in (key, value))
        if mask is not None and mask.shape[-1] not in (1, length):
            mask = mask[..., :length]
        return Operands(query, key, value, mask)
