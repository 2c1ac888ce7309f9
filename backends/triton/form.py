"""Calls of any form whose arrays lie alike: results in the caller's order, and addresses."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.machine.backend import Forward, Order

from ..own.allocating import allocator
from . import launch
from .arguments import alike, dense

__all__ = ["form"]


def form(launched: launch.Forward, query: Any, dim: int, order: Order) -> Forward:
    """What ``launched``, which ran, makes of tensors that lie as then, ``query`` among them; ``dim`` is the output's.

    They are given as ``Inputs.flat`` has them, on the current device, and read where they lie.
    """
    start, merge, lists, apart = launched.launch, launched.merge, launched.lists, (launched.parts, launched.sums)
    (shape, steps), (rows, by_row) = alike(query, dim), dense(*query.shape[:3])
    of_out, of_lse = (order.sizes(shape), order.sizes(steps)), (order.sizes(rows), order.sizes(by_row))
    empty, dtype, real = allocator(query), query.dtype, torch.float32

    def attend(
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        lengths: Any,
        seed: None,
        begin: Any,
        begin_k: Any,
        sinks: Any,
        slopes: Any,
        table: Any,
        key_scale: Any,
        value_scale: Any,
        tree: Any,
    ) -> tuple[Any, Any]:
        if begin_k is None:
            begin_k = begin
        out, lse = empty(*of_out, dtype), empty(*of_lse, real)
        parts, sums = out, lse
        if merge is not None:
            parts, sums = empty(*apart[0], real), empty(*apart[1], real)
        tiles, counts = (None, None) if lists is None else lists(mask, lengths)
        beside = mask, lengths, begin, begin_k, tiles, counts, sinks, slopes, table, key_scale, value_scale, tree
        start(query, key, value, parts, sums, *beside)
        if merge is not None:
            merge(parts, sums, out, lse, begin, sinks)
        return out, lse

    return attend
