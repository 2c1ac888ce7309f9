"""From arrays to launches: strides, tensor descriptors and grids of each kernel; a problem has each of them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own import arithmetic
from ..own.order import Saved
from . import config
from .arguments import (
    alike,
    dense,
    early,
    entries,
    options,
    padded,
    paged_sizes,
    random,
    reach,
    rows,
    scores,
    sizes,
    steps,
    strides,
    unit,
    unseen,
    variant,
    wide,
)
from .config import TritonConfig, block, panelled, panels
from .descriptors import describer, suits
from .kernels import mask_gradient as mask_kernels
from .kernels.forward import forward
from .kernels.key_gradients import key_gradients
from .kernels.merge import merge
from .kernels.parameters import Dims, Splits, Steps, Strides, Visits
from .kernels.prepare import prepare
from .kernels.query_gradient import query_gradient
from .operands import Upstream
from .run import Passed
from .tiles import Listing, Make, listing, overlaps

__all__ = ["Forward", "KeyGradients", "MaskGradient", "Prepare", "QueryGradient"]

_NO_LISTS = None, None
_NO_OFFSETS = None, None
_ALL = Visits(0, 0, 0)


# -- launches ----------------------------------------------------------------------------------------------------------


class Forward:
    """Makes output and lse: one launch, and another that merges them where the keys are split."""

    def __init__(self, make: Make, p: Problem, device: Device, chosen: TritonConfig) -> None:
        tile, splits = chosen.forward, chosen.splits
        self._p, self._device, self._tile, self._splits = p, device, tile, splits
        self._packed = config.packs(p) and not tile.generic
        of_each = p.heads_q // (p.group if self._packed else 1)
        self._heads = (p.batch if splits > 1 else entries(p)) * of_each
        self.lists = None if self._packed or splits > 1 else listing(make, p, device, tile)
        self._overlap = overlaps(device) and (splits > 1 or self.lists is not None)
        #: Whether what it launches knows how arrays lie.
        self.ran = False
        #: Shape and strides of the output, and of what has a number for each row of it, known from the first query.
        self._out: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        programs = self._heads * arithmetic.tiles(config.rows(p) if self._packed else p.seq_q, tile.queries) * splits
        programs *= panels(p, p.dim_v)
        self.launch = make(forward, programs, self._passed)
        self.merge = None
        if splits > 1:
            self.merge = make(merge, entries(p) * p.heads_q * p.seq_q, self._merged)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        lengths: Any = None,
        seed: int | None = None,
        offsets: Offsets | None = None,
        sinks: Any = None,
        slopes: Any = None,
        table: Any = None,
        key_scale: Any = None,
        value_scale: Any = None,
        tree: Any = None,
    ) -> tuple[Any, Any]:
        """Launch it."""
        cu_q, cu_k = offsets or _NO_OFFSETS
        out, lse = self.results(query)
        parts, sums = out, lse
        if self.merge is not None:
            parts, sums = lse.new_empty_strided(*self.parts), lse.new_empty_strided(*self.sums)
        tiles, counts = _NO_LISTS if self.lists is None else self.lists(mask, lengths)
        beside = mask, lengths, cu_q, cu_k, tiles, counts, sinks, slopes, table, key_scale, value_scale, tree
        self.launch(query, key, value, parts, sums, *beside, seed=seed)
        if self.merge is not None:
            self.merge(parts, sums, out, lse, cu_q, sinks)
        self.ran = True
        return out, lse

    def results(self, query: Any) -> tuple[Any, Any]:
        """Output and lse, yet to be written. The output lies in the order of query, heads inside L or L inside."""
        if self._out is None:
            lines = query.shape[:3]
            self._lse = dense(*lines)
            self.parts = dense(self._splits, *lines, self._p.dim_v)
            self.sums = dense(2, self._splits, *lines)
            self._out = alike(query, self._p.dim_v)
        return query.new_empty_strided(*self._out), query.new_empty_strided(*self._lse, dtype=torch.float32)

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, out, _, mask, lengths, cu_q, cu_k, *_, slopes, table, key_scale, value_scale, tree = arrays
        p, tile, splits = self._p, self._tile, self._splits
        rows = steps(out) if p.varlen and splits == 1 else Steps(*out.stride()[-4:])
        by = Strides(steps(query), steps(key), steps(value), rows, steps(mask))
        dealt = p.dropout > 0.0
        tma = suits(p, self._device, key, value, dealt=dealt)
        tma_rows = tma and not self._packed and splits == 1 and suits(p, self._device, query, out)
        described = _described(tile.keys, dealt, K=key, V=value) if tma else {}
        if tma_rows:
            described |= _described(tile.queries, False, Q=query, OUT=out)
        how = variant(
            p,
            tile,
            even_k=p.seq_k % tile.keys == 0,
            packed=self._packed,
            split=splits > 1,
            tma=tma,
            aligned=not tma and unseen(p, by.k, by.v),
            tma_rows=tma_rows,
            wide=wide(tile, by.k, by.v, by.m, page=p.page),
            listed=self.lists is not None,
            overlap=self._overlap,
            sinks=p.sinks and splits == 1,
            paged=p.page > 0,
            scaled=p.cache != "",
            tree=p.tree,
        )
        return Passed(
            values=(
                by,
                _visits(self.lists),
                paged_sizes(p, query, cu_q, table, (key_scale, value_scale), tree)
                if p.page
                else sizes(p, query, key, cu_q, cu_k),
                Dims(p.dim_qk, p.dim_v),
                reach(p, lengths),
                min(arithmetic.heads_a_section(p, packed=self._packed), self._heads),
                Splits(splits, arithmetic.tiles(p.seq_k, splits * tile.keys) * tile.keys),
                scores(p, slopes, generic=tile.generic),
                random(p),
            ),
            flags={"how": how, **options(tile), **early(self._overlap and self.lists is not None)},
            described=described,
            generic=tile.generic,
        )

    def _merged(self, parts: Any, sums: Any, out: Any, _: Any, cu_q: Any, __: Any) -> Passed:
        p = self._p
        at_once = 16 if panelled(p) else min(64, max(16, 1 << (self._splits - 1).bit_length()))
        flags = {
            "BLOCK_S": at_once,
            "BLOCK_DV": block(p.dim_v),
            "OVERLAP": self._overlap,
            "VARLEN": p.varlen,
            "WITH_SINKS": p.sinks,
            "num_warps": 4 if panelled(p) else at_once // 16,
            **early(self._overlap),
        }
        return Passed((Steps(*out.stride()), sizes(p, out, cu_q=cu_q), Dims(p.dim_qk, p.dim_v), self._splits), flags)


class Prepare:
    """D of every row, and its lse as the other kernels want it."""

    def __init__(self, make: Make, p: Problem, chosen: TritonConfig) -> None:
        self._p, self._generic = p, chosen.query_gradient.generic
        self._block = 8 if self._generic or panelled(p) else 32
        programs = arithmetic.tiles(p.batch * p.heads_q * arithmetic.padded(p), self._block)
        self._launch = make(prepare, programs, self._passed)
        self._upstream = Upstream()
        #: Shape and strides of base and delta, known from the first lse.
        self._shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __call__(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
        """Launch it."""
        grad_out = self._upstream(grad_out)
        if self._shape is None:
            batch, heads, rows = lse.shape
            self._shape = dense(batch, heads, padded(self._p, rows))
        base = lse.new_empty_strided(*self._shape, dtype=torch.float32)
        delta = lse.new_empty_strided(*self._shape, dtype=torch.float32)
        cu_q, _ = inputs.offsets or _NO_OFFSETS
        self._launch(out, grad_out, lse, grad_lse, cu_q, delta, base)
        return Saved(grad_out, base, delta)

    def _passed(self, out: Any, grad_out: Any, _: Any, grad_lse: Any, cu_q: Any, *__: Any) -> Passed:
        p, generic = self._p, self._generic
        width = arithmetic.dim_class(p) if generic else block(p.dim_v)
        flags = {
            "WITH_DLSE": grad_lse is not None,
            "EVEN_DV": width == p.dim_v and not generic,
            "BLOCK_M": self._block,
            "BLOCK_DV": width,
            "VARLEN": p.varlen,
            "num_warps": 4,
        }
        dims = Dims(p.dim_qk, p.dim_v)
        factor = float(unit(p, generic=generic))
        batch, heads, rows = out.shape[:3]
        rows = batch * heads * padded(p, rows)
        lie = steps(out), steps(grad_out), sizes(p, out, cu_q=cu_q)
        return Passed((*lie, rows, dims, factor), flags, generic=generic)


class QueryGradient:
    """Gradient of query, (B, Hq, Lq, D), that lies as query does."""

    def __init__(self, make: Make, p: Problem, device: Device, chosen: TritonConfig) -> None:
        self._p, self._device, self._tile = p, device, chosen.query_gradient
        self._lists = listing(make, p, device, self._tile)
        self._grad: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._heads = entries(p) * p.heads_q
        programs = self._heads * arithmetic.tiles(p.seq_q, self._tile.queries) * panels(p, p.dim_qk)
        self._launch = make(query_gradient, programs, self._passed)

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        query, key, value, mask, lengths, seed, offsets, *_ = inputs
        if self._grad is None:
            self._grad = alike(query, self._p.dim_qk)
        grad = query.new_empty_strided(*self._grad)
        lists = _NO_LISTS if self._lists is None else self._lists(mask, lengths)
        beside = mask, lengths, *(offsets or _NO_OFFSETS), *lists, inputs.alibi_slopes
        self._launch(query, key, value, *saved, *beside, grad, seed=seed)
        return grad

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, lengths, cu_q, cu_k, *_, slopes, grad = arrays
        by = strides(query, key, value, grad_out, mask)
        p, tile = self._p, self._tile
        dealt = p.dropout > 0.0
        tma = suits(p, self._device, key, value, dealt=dealt)
        how = variant(
            p,
            tile,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            aligned=not tma and unseen(p, by.k, by.v),
            wide=wide(tile, by.k, by.v, by.m),
            listed=self._lists is not None,
        )
        return Passed(
            values=(
                by,
                rows(grad),
                _visits(self._lists),
                sizes(p, query, key, cu_q, cu_k),
                Dims(p.dim_qk, p.dim_v),
                reach(p, lengths),
                min(arithmetic.heads_a_section(p), self._heads),
                scores(p, slopes, generic=tile.generic),
                random(p),
            ),
            flags={"how": how, **options(tile)},
            described=_described(tile.keys, dealt, K=key, V=value) if tma else {},
            generic=tile.generic,
        )


class KeyGradients:
    """Gradients of key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv), that lie as these do."""

    def __init__(self, make: Make, p: Problem, device: Device, chosen: TritonConfig) -> None:
        self._p, self._device, self._tile = p, device, chosen.key_gradients
        self._lists = listing(make, p, device, self._tile, by_keys=True)
        self._grads: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
        self._heads = entries(p) * p.heads_kv
        programs = self._heads * arithmetic.tiles(p.seq_k, self._tile.keys) * panels(p, max(p.dim_qk, p.dim_v))
        self._launch = make(key_gradients, programs, self._passed)

    def __call__(self, inputs: Inputs, saved: Saved) -> tuple[Any, Any]:
        """Launch it."""
        query, key, value, mask, lengths, seed, offsets, *_ = inputs
        if not self._grads:
            self._grads = alike(key, self._p.dim_qk), alike(value, self._p.dim_v)
        by_key, by_value = (key.new_empty_strided(*grad) for grad in self._grads)
        lists = _NO_LISTS if self._lists is None else self._lists(mask, lengths)
        beside = mask, lengths, *(offsets or _NO_OFFSETS), *lists, inputs.alibi_slopes
        self._launch(query, key, value, *saved, *beside, by_key, by_value, seed=seed)
        return by_key if "k" in self._p.grads else None, by_value if "v" in self._p.grads else None

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, lengths, cu_q, cu_k, *_, slopes, by_key, by_value = arrays
        by = strides(query, key, value, grad_out, mask)
        p, tile = self._p, self._tile
        tma = suits(p, self._device, query, grad_out)
        how = variant(
            p,
            tile,
            even_q=p.seq_q % tile.queries == 0,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            aligned=not tma and unseen(p, by.q, by.o),
            wide=wide(tile, by.q, by.o, by.m),
            listed=self._lists is not None,
        )
        return Passed(
            values=(
                by,
                rows(by_key),
                rows(by_value),
                _visits(self._lists),
                sizes(p, query, key, cu_q, cu_k),
                Dims(p.dim_qk, p.dim_v),
                reach(p, lengths),
                min(arithmetic.heads_a_section(p, queries=True), self._heads),
                scores(p, slopes, generic=tile.generic),
                random(p),
            ),
            flags={"how": how, **options(tile)},
            described=_described(tile.queries, False, Q=query, DO=grad_out) if tma else {},
            generic=tile.generic,
        )


class MaskGradient:
    """Gradient of a float mask, in its shape."""

    def __init__(self, make: Make, p: Problem, chosen: TritonConfig) -> None:
        assert p.mask_shape is not None
        tile = chosen.query_gradient
        self._p, self._tile, self._shape = p, tile, p.mask_shape
        b, h, q, k = p.mask_shape
        programs = (
            b
            * h
            * (arithmetic.tiles(q, tile.queries) if q > 1 else 1)
            * (arithmetic.tiles(k, tile.keys) if k > 1 else 1)
        )
        self._launch = make(mask_kernels.mask_gradient, programs, self._passed)

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        query, key, value, mask, lengths, seed, *_ = inputs
        assert mask is not None
        grad = mask.new_empty(self._shape)
        self._launch(query, key, value, *saved, mask, lengths, inputs.alibi_slopes, grad, seed=seed)
        return grad

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, lengths, slopes, _ = arrays
        p, tile, (b, h, q, k) = self._p, self._tile, self._shape
        over = {"OVER_B": b == 1, "OVER_H": h == 1, "OVER_Q": q == 1, "OVER_K": k == 1}
        return Passed(
            values=(
                strides(query, key, value, grad_out, mask),
                sizes(p),
                Dims(p.dim_qk, p.dim_v),
                reach(p, lengths),
                h,
                scores(p, slopes, generic=tile.generic),
                random(p),
            ),
            flags={**over, "how": variant(p, tile), **options(tile)},
            generic=tile.generic,
        )


# -- arguments that the launches share ---------------------------------------------------------------------------------


def _visits(lists: Listing | None) -> Visits:
    return _ALL if lists is None else lists.visits


def _described(rows: int, dealt: bool, **arrays: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: describer(array, rows, dealt=dealt) for name, array in arrays.items()}
