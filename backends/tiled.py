"""``tiled``: FlashAttention in NumPy. Online softmax over key tiles, backward by recomputation, O(L) extra memory.

Method: Dao, Fu, Ermon, Rudra and Ré, "FlashAttention" (2022), with the lse-only statistics of FlashAttention-2 (2023).
Query tiles run over all batch entries and heads at once, as arrays (B, Hkv, group, rows, columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from attnswitch.machine import trees
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel, Precision
from attnswitch.machine.device import Device
from attnswitch.machine.one_by_one import OneByOne
from attnswitch.machine.pages import Pages
from attnswitch.problem import CACHES, Problem
from attnswitch.problem.philox import keep_mask

#: NumPy arrays; their operators are typed too loosely to say more.
Array = Any
Bool = Any


#: A softcap from here on changes no score that float32 can hold next to it, and would overflow.
_NO_CAP = 1e30
#: From this lse on, what it leaves of log(sum) is renewed in the backward.
_SATURATED = 1024


@dataclass(frozen=True, slots=True)
class TiledConfig(Config):
    """Rows of queries and of keys in a tile."""

    block_q: int = 64
    block_k: int = 64

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k}"


class TiledBackend(Backend):
    """Every feature in float32 (float64 for float64); memory is linear in the length, but for the mask of a tree."""

    name: ClassVar[str] = "tiled"
    library: ClassVar[str] = "numpy"
    varlen: ClassVar[bool] = True
    paged: ClassVar[bool] = True
    caches: ClassVar[tuple[str, ...]] = CACHES
    trees: ClassVar[bool] = True
    splits: ClassVar[bool] = True  # by tiles of one size from the first key on, each sequence alone
    sinks: ClassVar[bool] = True
    alibi: ClassVar[bool] = True

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """Everything on the CPU, but dropout without a seed."""
        if device.kind != "cpu":
            yield f"it runs on the CPU only, and the arrays are on {device.kind}; move them with .cpu()"
        if problem.dropout and not problem.seeded:
            yield f"dropout_p={problem.dropout} without a seed: it has no generator of its own; pass seed"

    def configs(self, problem: Problem, device: Device) -> Iterator[TiledConfig]:
        """Square tiles first; taller ones save passes over the keys where there are many queries.

        Tiles decide the bits, so they are of one size where the call fixes these (``splits``).
        """
        yield TiledConfig()
        if problem.splits:
            return
        for block_q in (16, 32, 64, 128, 256):
            for block_k in (16, 32, 64, 128, 256):
                if (block_q, block_k) != (64, 64):
                    yield TiledConfig(block_q, block_k)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """One arithmetic throughout: the weights are not rounded before the product with the values."""
        return Precision(accumulator="float64" if problem.dtype == "float64" else "float32")

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """That of its tiles, and of a tree the mask of one sequence, a byte for each of its scores."""
        return super().extra_bytes(problem, device) + trees.mask_bytes(problem)

    def compile(self, problem: Problem, device: Device, config: TiledConfig) -> Kernel:
        """The kernel for ``problem``; one for each sequence of its own length."""
        if problem.page:
            return OneByOne(problem, lambda alone, number: TiledKernel(alone, config), paged=True)
        if problem.varlen:
            return OneByOne(problem, lambda alone, number: TiledKernel(alone, config, number))
        return TiledKernel(problem, config)


class _Tile(NamedTuple):
    """Scores of one tile and what its gradient needs."""

    s: Array  # -inf where hidden
    visible: Bool | None  # None: everything is
    tanh: Array | None


@dataclass(frozen=True)
class TiledKernel(Kernel):
    """Loops over query tiles, and within each over the key tiles that it can see.

    Batch entries are numbered from ``first``.
    """

    problem: Problem
    config: TiledConfig
    first: int = 0

    @property
    def _dtype(self) -> type[np.float32] | type[np.float64]:
        return np.float64 if self.problem.dtype == "float64" else np.float32

    @property
    def _range(self) -> tuple[float, float]:
        info = np.finfo(self._dtype)
        return float(info.min), float(info.max)

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        p = self.problem
        grouped = (p.batch, p.heads_kv, p.group)
        out = np.zeros((*grouped, p.seq_q, p.dim_v), inputs.query.dtype)
        lse = np.full((*grouped, p.seq_q), -np.inf, self._dtype)
        with np.errstate(all="ignore"):
            for rows in _tiles(0, p.seq_q, self.config.block_q):
                out[..., rows, :], lse[..., rows] = self._row_tile(inputs, rows)
        flat = (p.batch, p.heads_q, p.seq_q)
        return out.reshape(*flat, p.dim_v), lse.reshape(flat)

    def _row_tile(self, inputs: Inputs, rows: slice) -> tuple[Array, Array]:
        """Output and lse of one query tile."""
        q = self._queries(inputs.query, rows)
        m, total, acc, alive = self._online(inputs, q, rows, inputs.value)
        return acc / np.where(alive, total, 1)[..., None], np.where(alive, m + np.log(total), -np.inf)

    def _online(self, inputs: Inputs, q: Array, rows: slice, value: Any) -> tuple[Array, Array, Array, Bool]:
        """Online softmax of one query tile over its key tiles.

        Returns the maximum, the denominator, the numerator of the output, and which rows see any key. A sink is the
        first key of each. Without ``value`` the numerator stays 0: the statistics alone.
        """
        p = self.problem
        m = np.full(q.shape[:-1], -np.inf, q.dtype)
        if inputs.sinks is not None:
            m[:] = inputs.sinks.reshape(p.heads_kv, p.group, 1)
        alive = m != -np.inf
        total = alive.astype(q.dtype)
        acc = np.zeros((*q.shape[:-1], p.dim_v), q.dtype)
        for columns in self._key_tiles(inputs, rows):
            tile = self._scores(inputs, q, rows, columns)
            alive |= True if tile.visible is None else tile.visible.any(axis=-1)
            top = np.maximum(m, tile.s.max(axis=-1))
            # A row that has seen no key yet keeps -inf; subtracting 0 instead leaves its weights at exp(-inf) = 0.
            base = np.where(top == -np.inf, 0, top)
            weights = np.exp(tile.s - base[..., None])
            if tile.visible is not None:  # a NaN row must not spread to the keys that it does not see
                weights = np.where(tile.visible, weights, 0)
            rescale = np.exp(m - base)
            total = total * rescale + weights.sum(axis=-1)
            if value is not None:
                if p.dropout:
                    weights = weights * self._kept(inputs, rows, columns)
                acc = acc * rescale[..., None] + _product(weights, self._keys(value, columns), tile.visible)
            m = top
        return m, total, acc, alive

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients from P = exp(S - lse), tile by tile; nothing of size Lq x Lk is kept."""
        p = self.problem
        dq = np.zeros((p.batch, p.heads_kv, p.group, p.seq_q, p.dim_qk), self._dtype)
        dk = np.zeros((p.batch, p.heads_kv, p.seq_k, p.dim_qk), self._dtype)
        dv = np.zeros((p.batch, p.heads_kv, p.seq_k, p.dim_v), self._dtype)
        dmask = np.zeros(p.mask_shape, self._dtype) if "m" in p.grads and p.mask_shape else None
        with np.errstate(all="ignore"):
            for rows in _tiles(0, p.seq_q, self.config.block_q):
                q, do, o = (self._queries(array, rows) for array in (inputs.query, grad_out, out))
                row_lse = self._queries(lse, rows)
                centre = np.sum(do * o, axis=-1)
                if grad_lse is not None:
                    centre = centre - self._queries(grad_lse, rows)
                base, log_total = self._statistics(inputs, q, row_lse, rows)
                for columns in self._key_tiles(inputs, rows):
                    tile = self._scores(inputs, q, rows, columns)
                    k, v = (self._keys(array, columns) for array in (inputs.key, inputs.value))
                    weights = np.exp((tile.s - base[..., None]) - log_total[..., None])
                    if tile.visible is not None:
                        weights = np.where(tile.visible, weights, 0)
                    dp = do @ v.swapaxes(-1, -2)
                    kept: Array | int = 1
                    if p.dropout:
                        kept = self._kept(inputs, rows, columns)
                        dp = dp * kept
                    dv[..., columns, :] += _group_product(weights * kept, do, tile.visible)
                    ds = weights * (dp - centre[..., None])
                    if tile.visible is not None:
                        ds = np.where(tile.visible, ds, 0)
                    if dmask is not None:
                        _add_broadcast(dmask, ds, rows, columns)
                    if tile.tanh is not None:
                        ds = ds * (1 - tile.tanh**2)
                        ds = ds if tile.visible is None else np.where(tile.visible, ds, 0)
                    dq[..., rows, :] += _product(ds, k, tile.visible)
                    dk[..., columns, :] += _group_product(ds, q, tile.visible)
            scale = self._dtype(p.softmax_scale)
            dq, dk = dq * scale, dk * scale
            shaped = (dq.reshape(inputs.query.shape), dk, dv, dmask)
            wanted = [
                grad.astype(array.dtype) if letter in p.grads and grad is not None else None
                for letter, grad, array in zip("qkvm", shaped, inputs[:4], strict=True)
            ]
        return Gradients(*wanted)

    def _statistics(self, inputs: Inputs, q: Array, lse: Array, rows: slice) -> tuple[Array, Array]:
        """What to subtract from the scores of a query tile, in two parts, so that exp gives P.

        lse alone does, while it is small. A mask of -1e9 throughout a row leaves no digits in lse = max + log(sum) for
        the sum: then the maximum and the sum are computed again, and stand in for an lse that is theirs to rounding.
        One that is not, because it counts keys that are not here, is taken as it is.
        """
        # Rows that see nothing have lse = -inf; 0 keeps their weights at exp(-inf) = 0.
        base = np.where(lse == -np.inf, 0, lse)
        lost = np.abs(base) > _SATURATED
        if not lost.any():
            return base, np.zeros_like(base)
        m, total, _, _ = self._online(inputs, q, rows, None)
        log_total = np.log(np.where(total == 0, 1, total))
        top = np.where(m == -np.inf, 0, m)
        apart = np.abs(base - (top + log_total)) > 4 * np.finfo(self._dtype).eps * np.abs(base)
        own = lost & ~apart  # and so it is of NaN, which then stays
        # Row by row: the bits of one must not depend on whether another, of another batch entry, needs it.
        return np.where(own, top, base), np.where(own, log_total, 0)

    # -- what a tile is made of ----------------------------------------------------------------------------------------

    def _queries(self, array: Any, rows: slice) -> Array:
        """Rows of a (B, Hq, Lq, ...) array as (B, Hkv, group, rows, ...), in the accumulator's type."""
        p = self.problem
        part = array[:, :, rows].astype(self._dtype, order="C")
        return part.reshape(p.batch, p.heads_kv, p.group, *part.shape[2:])

    def _keys(self, array: Any, columns: slice) -> Array:
        """Columns of key or value as (B, Hkv, 1, columns, D), in the accumulator's type."""
        if isinstance(array, Pages):  # gathered tile by tile
            array, columns = array.rows(columns.start, columns.stop), slice(None)
        return array[:, :, None, columns].astype(self._dtype, order="C")

    def _centre(self, inputs: Inputs) -> Array:
        """Offset of the diagonal for each batch entry: query i stands at key i + offset."""
        p = self.problem
        if not p.bottom_right:
            return np.zeros(1, np.int64)
        if inputs.key_lengths is None:
            return np.full(1, p.seq_k - p.seq_q, np.int64)
        return inputs.key_lengths.astype(np.int64) - p.seq_q

    def _reach(self) -> tuple[int | None, int | None]:
        """How far to the left and right of its position a query sees."""
        left, right = self.problem.window or (None, None)
        if self.problem.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def _key_tiles(self, inputs: Inputs, rows: slice) -> Iterator[slice]:
        """The key tiles that any query of ``rows`` may see; the others are never loaded."""
        p = self.problem
        first, last = 0, p.seq_k
        if inputs.key_lengths is not None:
            last = int(inputs.key_lengths.max(initial=0))
        if p.batch:
            offsets = self._centre(inputs)
            left, right = self._reach()
            if left is not None:
                first = max(first, rows.start + int(offsets.min()) - left)
            if right is not None:
                last = min(last, rows.stop - 1 + int(offsets.max()) + right + 1)
        start = first // self.config.block_k * self.config.block_k
        return _tiles(start, last, self.config.block_k)

    def _scores(self, inputs: Inputs, q: Array, rows: slice, columns: slice) -> _Tile:
        """Scores after scale, softcap, alibi, float mask and hiding."""
        p = self.problem
        s = (q @ self._keys(inputs.key, columns).swapaxes(-1, -2)) * self._dtype(p.softmax_scale)
        tanh = None
        if 0 < p.softcap < _NO_CAP:
            tanh = np.tanh(s / self._dtype(p.softcap))
            s = self._dtype(p.softcap) * tanh
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes.reshape(-1, p.heads_kv, p.group, 1, 1)
            s = s - slopes * self._distance(inputs, rows, columns)
        visible = self._visible(inputs, rows, columns)
        if inputs.attn_mask is not None:
            mask = self._mask_tile(inputs.attn_mask, rows, columns)
            if mask.dtype == np.bool_:
                seen = mask
            else:
                seen = mask != -np.inf
                # A finite number beyond the accumulator's range must not turn into the infinity that hides.
                s = s + np.where(np.isfinite(mask), np.clip(mask, *self._range), mask).astype(self._dtype)
            visible = seen if visible is None else visible & seen
        if visible is None:
            return _Tile(s, None, tanh)
        visible = np.broadcast_to(visible, s.shape)
        return _Tile(np.where(visible, s, -np.inf), visible, tanh)

    def _distance(self, inputs: Inputs, rows: slice, columns: slice) -> Array:
        """How far each key is from where each query stands, (1 or B, 1, 1, rows, columns)."""
        i = np.arange(rows.start, rows.stop)[:, None] + self._centre(inputs)[:, None, None, None, None]
        return np.abs(i - np.arange(columns.start, columns.stop)).astype(self._dtype)

    def _visible(self, inputs: Inputs, rows: slice, columns: slice) -> Bool | None:
        """Causal, window and lengths on one tile, broadcastable to it; None where the tile is wholly visible."""
        left, right = self._reach()
        j = np.arange(columns.start, columns.stop)
        offsets = self._centre(inputs)[:, None, None]
        i = np.arange(rows.start, rows.stop)[None, :, None] + offsets
        visible = np.ones((1, 1, 1), np.bool_)
        if inputs.key_lengths is not None and (inputs.key_lengths < columns.stop).any():
            visible = visible & (j < inputs.key_lengths[:, None, None])
        if left is not None and rows.stop - 1 + int(offsets.max(initial=0)) - left > columns.start:
            visible = visible & (j >= i - left)
        if right is not None and rows.start + int(offsets.min(initial=0)) + right < columns.stop - 1:
            visible = visible & (j <= i + right)
        return None if visible.shape == (1, 1, 1) and visible.all() else visible[:, None, None]

    def _mask_tile(self, mask: Any, rows: slice, columns: slice) -> Array:
        """The mask's part for a tile, its broadcast axes left at length 1, heads split as (Hkv, group)."""
        p = self.problem
        part = mask[:, :, rows if mask.shape[2] > 1 else slice(None), columns if mask.shape[3] > 1 else slice(None)]
        heads = (p.heads_kv, p.group) if mask.shape[1] > 1 else (1, 1)
        return part.reshape(mask.shape[0], *heads, *part.shape[2:])

    def _kept(self, inputs: Inputs, rows: slice, columns: slice) -> Array:
        """Keep / (1 - p) for one tile."""
        p = self.problem
        if p.dropout == 1.0:
            return np.zeros((1, 1, 1, 1, 1), self._dtype)
        b = self.first + np.arange(p.batch)[:, None, None, None]
        h = np.arange(p.heads_q).reshape(p.heads_kv, p.group, 1)
        i = np.arange(rows.start, rows.stop)
        keep = keep_mask(inputs.seed or 0, p.dropout, b, h, i, columns.start, columns.stop - columns.start)
        return keep * self._dtype(1.0 / (1.0 - p.dropout))


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _add_broadcast(dmask: Array, ds: Array, rows: slice, columns: slice) -> None:
    """Add a tile's gradient to the mask's, summing over the axes along which the mask was broadcast."""
    batch, kv, group = ds.shape[:3]
    ds = ds.reshape(batch, kv * group, *ds.shape[3:])
    target = dmask[:, :, rows if dmask.shape[2] > 1 else slice(None), columns if dmask.shape[3] > 1 else slice(None)]
    summed = tuple(axis for axis in range(4) if target.shape[axis] == 1 != ds.shape[axis])
    target += ds.sum(axis=summed, keepdims=True)


def _group_product(weights: Array, rows: Array, visible: Bool | None) -> Array:
    """``weights^T rows`` summed over the query heads that share a key head."""
    hidden = None if visible is None else visible.swapaxes(-1, -2)
    summed: Array = _product(weights.swapaxes(-1, -2), rows, hidden).sum(axis=2)
    return summed


def _product(weights: Array, rows: Array, visible: Bool | None) -> Array:
    """``weights @ rows`` in which hidden positions do not take part, not even as 0 * NaN."""
    if visible is None or np.isfinite(rows).all():
        return weights @ rows
    terms = np.where(visible[..., None], weights[..., None] * rows[..., None, :, :], 0)
    product: Array = terms.sum(axis=-2)
    return product
