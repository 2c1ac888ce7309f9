"""From arrays to launches: strides, tensor descriptors and grids of each kernel; a problem has each of them once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own import arithmetic
from . import config
from .arguments import (
    dense,
    dropping,
    early,
    options,
    position,
    scaling,
    strides,
    unit,
    unseen,
    variant,
    wide,
    words,
)
from .config import TritonConfig, block
from .descriptors import describer, suits
from .kernels import backward as backward_kernels
from .kernels import forward as forward_kernels
from .kernels import mask_gradient as mask_kernels
from .run import Launcher, Passed
from .tiles import Listing, listing, overlaps

__all__ = ["Forward", "KeyGradients", "MaskGradient", "Prepare", "QueryGradient", "Saved", "on"]

#: Arrays of the backward that are the caller's.
_FOREIGN = ("Q", "K", "V", "DO", "MASK", "LENGTHS")
_HERE = contextlib.nullcontext()


class Saved(NamedTuple):
    """What the backward works on beside the inputs: dO, and for each row what ``Prepare`` made of lse and dO.

    ``base`` and ``delta`` are (B, Hq, Lq padded to whole tiles).
    """

    grad_out: Any
    base: Any
    delta: Any


def on(tensor: Any) -> Any:
    """The device of ``tensor`` as the current one, which is where Triton launches."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


# -- launches ----------------------------------------------------------------------------------------------------------


class Forward:
    """Writes output and lse: one launch, and another that merges them where the keys are split."""

    def __init__(self, p: Problem, device: Device, chosen: TritonConfig) -> None:
        tile, splits = chosen.forward, chosen.splits
        self._p, self._device, self._tile, self._splits = p, device, tile, splits
        self._packed = config.packs(p)
        self._heads = p.batch * p.heads_q // (p.group if self._packed else 1)
        self._lists = None if self._packed or splits > 1 else listing(p, device, tile)
        self._overlap = overlaps(device) and (splits > 1 or self._lists is not None)
        rows = p.batch, p.heads_q, p.seq_q
        self._parts, self._sums = dense(splits, *rows, p.dim_v), dense(2, splits, *rows)
        programs = self._heads * arithmetic.tiles(config.rows(p), tile.queries) * splits
        foreign = ("Q", "K", "V", "OUT", "MASK", "LENGTHS")
        self._launch = Launcher(forward_kernels.forward, programs, self._passed, foreign)
        self._count = p.batch * p.heads_q * p.seq_q
        self._merge = Launcher(forward_kernels.merge, self._count, self._merged, ("OUT",)) if splits > 1 else None

    def __call__(self, inputs: Inputs, out: Any, lse: Any) -> None:
        """Launch it. ``out`` and ``lse`` are written."""
        query, key, value, mask, lengths, seed = inputs
        parts, sums = out, lse
        if self._merge is not None:
            parts, sums = lse.new_empty_strided(*self._parts), lse.new_empty_strided(*self._sums)
        lists = _visits(self._lists, inputs)
        self._launch(query, key, value, parts, sums, mask, lengths, *lists, seed=words(seed))
        if self._merge is not None:
            self._merge(parts, sums, out, lse)

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, out, _, mask, *_ = arrays
        p, tile, splits = self._p, self._tile, self._splits
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
            aligned=not tma and unseen(key, value),
            tma_rows=tma_rows,
            wide=wide(tile, key, value, mask),
            listed=self._lists is not None,
            overlap=self._overlap,
        )
        return Passed(
            before=(
                *strides(query),
                *strides(key),
                *strides(value),
                *out.stride()[-4:-1],
                *strides(mask),
                *_list_strides(self._lists),
                p.batch,
                p.heads_q,
                p.group,
                p.seq_q,
                p.seq_k,
                p.dim_qk,
                p.dim_v,
                *position(p),
                min(arithmetic.heads_a_section(p, packed=self._packed), self._heads),
                splits,
                arithmetic.tiles(p.seq_k, splits * tile.keys) * tile.keys,
                *scaling(p),
            ),
            after=dropping(p),
            flags={"how": how, **options(tile), **early(self._overlap and self._lists is not None)},
            described=described,
        )

    def _merged(self, parts: Any, sums: Any, out: Any, lse: Any) -> Passed:
        p = self._p
        at_once = min(64, max(16, 1 << (self._splits - 1).bit_length()))
        flags = {
            "BLOCK_S": at_once,
            "BLOCK_DV": block(p.dim_v),
            "OVERLAP": self._overlap,
            "num_warps": at_once // 16,
            **early(self._overlap),
        }
        sizes = p.heads_q, p.seq_q, self._count, self._splits, p.dim_v
        return Passed((*out.stride()[:3], *sizes), (), flags)


class Prepare:
    """D of every row, and its lse as the other kernels want it."""

    def __init__(self, p: Problem) -> None:
        self._p = p
        self._shape = dense(p.batch, p.heads_q, arithmetic.padded(p))
        self._rows, self._block = p.batch * p.heads_q * arithmetic.padded(p), 32
        programs = arithmetic.tiles(self._rows, self._block)
        self._launch = Launcher(backward_kernels.prepare, programs, self._passed, ("OUT", "DO", "LSE", "DLSE"))

    def __call__(self, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
        """Launch it."""
        base, delta = (lse.new_empty_strided(*self._shape, dtype=torch.float32) for _ in range(2))
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        self._launch(out, grad_out, lse.contiguous(), grad_lse, delta, base)
        return Saved(grad_out, base, delta)

    def _passed(self, out: Any, grad_out: Any, _: Any, grad_lse: Any, *__: Any) -> Passed:
        p, width = self._p, block(self._p.dim_v)
        flags = {
            "WITH_DLSE": grad_lse is not None,
            "EVEN_DV": width == p.dim_v,
            "BLOCK_M": self._block,
            "BLOCK_DV": width,
            "num_warps": 4,
        }
        sizes = p.heads_q, p.seq_q, arithmetic.padded(p), self._rows, p.dim_v
        return Passed((*strides(out), *strides(grad_out), *sizes, unit(p)), (), flags)


class QueryGradient:
    """Gradient of query, (B, Hq, Lq, D)."""

    def __init__(self, p: Problem, device: Device, chosen: TritonConfig) -> None:
        self._p, self._device, self._tile = p, device, chosen.query_gradient
        self._lists = listing(p, device, self._tile)
        self._shape = dense(p.batch, p.heads_q, p.seq_q, p.dim_qk)
        self._heads = p.batch * p.heads_q
        programs = self._heads * arithmetic.tiles(p.seq_q, self._tile.queries)
        self._launch = Launcher(backward_kernels.query_gradient, programs, self._passed, _FOREIGN)

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        query, key, value, mask, lengths, seed = inputs
        grad = query.new_empty_strided(*self._shape)
        lists = _visits(self._lists, inputs)
        self._launch(query, key, value, *saved, mask, lengths, *lists, grad, seed=words(seed))
        return grad

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, *_ = arrays
        p, tile = self._p, self._tile
        dealt = p.dropout > 0.0
        tma = suits(p, self._device, key, value, dealt=dealt)
        how = variant(
            p,
            tile,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            aligned=not tma and unseen(key, value),
            wide=wide(tile, key, value, mask),
            listed=self._lists is not None,
        )
        return Passed(
            before=(
                *_operand_strides(query, key, value, grad_out, mask),
                *_list_strides(self._lists),
                *_sizes(p),
                min(arithmetic.heads_a_section(p), self._heads),
                float(p.softmax_scale),
                *scaling(p),
            ),
            after=dropping(p),
            flags={"how": how, **options(tile)},
            described=_described(tile.keys, dealt, K=key, V=value) if tma else {},
        )


class KeyGradients:
    """Gradients of key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv)."""

    def __init__(self, p: Problem, device: Device, chosen: TritonConfig) -> None:
        self._p, self._device, self._tile = p, device, chosen.key_gradients
        self._lists = listing(p, device, self._tile, by_keys=True)
        rows = p.batch, p.heads_kv, p.seq_k
        self._key, self._value = dense(*rows, p.dim_qk), dense(*rows, p.dim_v)
        self._heads = p.batch * p.heads_kv
        programs = self._heads * arithmetic.tiles(p.seq_k, self._tile.keys)
        self._launch = Launcher(backward_kernels.key_gradients, programs, self._passed, _FOREIGN)

    def __call__(self, inputs: Inputs, saved: Saved) -> tuple[Any, Any]:
        """Launch it."""
        query, key, value, mask, lengths, seed = inputs
        grads = key.new_empty_strided(*self._key), key.new_empty_strided(*self._value)
        lists = _visits(self._lists, inputs)
        self._launch(query, key, value, *saved, mask, lengths, *lists, *grads, seed=words(seed))
        return grads

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, *_ = arrays
        p, tile = self._p, self._tile
        tma = suits(p, self._device, query, grad_out)
        how = variant(
            p,
            tile,
            even_q=p.seq_q % tile.queries == 0,
            even_k=p.seq_k % tile.keys == 0,
            tma=tma,
            aligned=not tma and unseen(query, grad_out),
            wide=wide(tile, query, grad_out, mask),
            listed=self._lists is not None,
        )
        return Passed(
            before=(
                *_operand_strides(query, key, value, grad_out, mask),
                *_list_strides(self._lists),
                *_sizes(p),
                min(arithmetic.heads_a_section(p, queries=True), self._heads),
                float(p.softmax_scale),
                *scaling(p),
            ),
            after=dropping(p),
            flags={"how": how, **options(tile)},
            described=_described(tile.queries, False, Q=query, DO=grad_out) if tma else {},
        )


class MaskGradient:
    """Gradient of a float mask, in its shape."""

    def __init__(self, p: Problem, chosen: TritonConfig) -> None:
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
        self._launch = Launcher(mask_kernels.mask_gradient, programs, self._passed, _FOREIGN)

    def __call__(self, inputs: Inputs, saved: Saved) -> Any:
        """Launch it."""
        query, key, value, mask, lengths, seed = inputs
        assert mask is not None
        grad = mask.new_empty(self._shape)
        self._launch(query, key, value, *saved, mask, lengths, grad, seed=words(seed))
        return grad

    def _passed(self, *arrays: Any) -> Passed:
        query, key, value, grad_out, _, _, mask, *_ = arrays
        p, tile, (b, h, q, k) = self._p, self._tile, self._shape
        over = {"OVER_B": b == 1, "OVER_H": h == 1, "OVER_Q": q == 1, "OVER_K": k == 1}
        return Passed(
            before=(*_operand_strides(query, key, value, grad_out, mask), *_sizes(p), h, *scaling(p)),
            after=dropping(p),
            flags={**over, "how": variant(p, tile), **options(tile)},
        )


# -- arguments that the launches share ---------------------------------------------------------------------------------


def _sizes(p: Problem) -> tuple[int, ...]:
    return (p.batch, p.heads_q, p.group, p.seq_q, arithmetic.padded(p), p.seq_k, p.dim_qk, p.dim_v, *position(p))


def _operand_strides(query: Any, key: Any, value: Any, grad_out: Any, mask: Any) -> tuple[int, ...]:
    return (*strides(query), *strides(key), *strides(value), *strides(grad_out), *strides(mask))


def _visits(lists: Listing | None, inputs: Inputs) -> tuple[Any, Any]:
    return (None, None) if lists is None else lists(inputs.attn_mask, inputs.key_lengths)


def _list_strides(lists: Listing | None) -> tuple[int, int, int]:
    return (0, 0, 0) if lists is None else lists.strides


def _described(rows: int, dealt: bool, **arrays: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: describer(array, rows, dealt=dealt) for name, array in arrays.items()}
