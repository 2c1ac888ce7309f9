"""The first launch of a backward where a float mask is added: it may look at the keys again."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from ..own import arithmetic
from ..own.order import Saved
from .arguments import dense, reach, scores, sizes, steps, strides, variant
from .config import Tile, TritonConfig
from .kernels.parameters import Dims
from .kernels.prepare_added import prepare_added
from .operands import Upstream
from .run import Passed
from .tiles import Make

__all__ = ["PrepareAdded"]

#: Rows of a tile, as many as a product takes or twice that; and keys at most: rows are rarely far from 0.
_ROWS, _GENERIC_ROWS, _KEYS = 32, 16, 32


class PrepareAdded:
    """D of every row, and what stands for its lse in the other kernels: base and, behind it, rest."""

    def __init__(self, make: Make, p: Problem, chosen: TritonConfig) -> None:
        tile = chosen.query_gradient
        rows = _GENERIC_ROWS if tile.generic else _ROWS
        self._p, self._tile = p, Tile(rows, min(tile.keys, _KEYS), 4, 1, generic=tile.generic)
        lines = p.batch, p.heads_q, arithmetic.padded(p)
        self._bases, self._deltas = dense(2, *lines), dense(*lines)
        programs = p.batch * p.heads_q * arithmetic.padded(p) // rows
        self._launch = make(prepare_added, programs, self._passed)
        self._upstream = Upstream()

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
        """Launch it."""
        query, key, _, mask, lengths, *_ = inputs
        sinks, slopes = inputs.sinks, inputs.alibi_slopes
        grad_out = self._upstream(grad_out)
        base = lse.new_empty_strided(*self._bases, dtype=torch.float32)
        delta = lse.new_empty_strided(*self._deltas, dtype=torch.float32)
        self._launch(query, key, out, grad_out, mask, lengths, lse, grad_lse, sinks, slopes, delta, base)
        return Saved(grad_out, base, delta)

    def _passed(self, *arrays: Any) -> Passed:
        query, key, out, grad_out, mask, lengths, _, grad_lse, _, slopes, *_ = arrays
        p, tile = self._p, self._tile
        by = strides(query, key, key, grad_out, mask)
        return Passed(
            values=(
                by,
                steps(out),
                sizes(p),
                Dims(p.dim_qk, p.dim_v),
                reach(p, lengths),
                scores(p, slopes, generic=tile.generic),
            ),
            flags={
                "WITH_DLSE": grad_lse is not None,
                "how": variant(p, tile, sinks=p.sinks)._replace(dropout=False),  # which comes after the sum
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
            generic=tile.generic,
        )
