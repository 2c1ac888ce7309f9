"""From arrays to launches: arguments, grids, and the flags that a kernel is compiled for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attnswitch.backend import Inputs
from attnswitch.philox import BITS
from attnswitch.problem import DTYPES, Memory, Problem

from . import config, memory, run
from .arguments import Arguments, Operand
from .config import ROWS_A_BLOCK, CudaConfig, Tile, block
from .variant import Variant

__all__ = ["Saved", "forward", "key_gradients", "mask_gradient", "prepare", "query_gradient"]

_LOG2E = 1.4426950408889634
#: A softcap from here on changes no score that float32 can hold next to it, and would overflow.
_NO_CAP = 1e30
#: Rows of the largest tile: what the backward reads row by row is padded to it, and read without a test.
_PADDING = 128
_MASK_KINDS = {"bool": 1, "float16": 2, "bfloat16": 3, "float32": 4, "float64": 5}


class Saved(NamedTuple):
    """What the backward works on beside the inputs: dO, and for each row what ``prepare`` made of lse and dO.

    ``base`` and ``delta`` are (B, Hq, Lq padded to whole tiles).
    """

    grad_out: Any
    base: Any
    delta: Any


# -- launches ----------------------------------------------------------------------------------------------------------


def forward(p: Problem, chosen: CudaConfig, inputs: Inputs, out: Any, lse: Any) -> None:
    """Write output and lse."""
    tile, splits = chosen.forward, chosen.splits
    a = _arguments(p, inputs)
    a.out, a.lse = _operand(out), memory.address(lse)
    a.pack = p.group if config.packs(p) else 1
    heads = p.heads_q // a.pack
    a.section = min(config.heads_a_section(p, queries=False), max(1, p.batch * heads))
    a.splits, a.chunk = splits, _tiles(p.seq_k, splits * tile.keys) * tile.keys
    if splits > 1:
        parts = memory.empty((splits, p.batch, p.heads_q, p.seq_q, p.dim_v), lse)
        sums = memory.empty((2, splits, p.batch, p.heads_q, p.seq_q), lse)
        a.parts, a.sums = memory.address(parts), memory.address(sums)
    flags = {**_flags(p, inputs), "SPLIT": int(splits > 1)}
    blocks = p.batch * heads * _tiles(config.rows(p), tile.queries) * splits
    run.start(_variant("forward", p, tile, flags), blocks, a, out)
    if splits > 1:
        lines = p.batch * p.heads_q * p.seq_q
        run.start(_of_rows("merge", p, {}), _tiles(lines, ROWS_A_BLOCK), a, out)


def prepare(p: Problem, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Saved:
    """D of every row, and its lse as the other kernels want it."""
    padded = _tiles(p.seq_q, _PADDING) * _PADDING
    base, delta = (memory.empty((p.batch, p.heads_q, padded), lse) for _ in range(2))
    saved = Saved(grad_out, base, delta)
    a = _arguments(p, inputs, saved)
    lse, grad_lse = _contiguous(lse), _contiguous(grad_lse)
    a.out, a.lse = _operand(out), memory.address(lse)
    a.grad_lse = None if grad_lse is None else memory.address(grad_lse)
    blocks = _tiles(p.batch * p.heads_q * padded, ROWS_A_BLOCK)
    run.start(_of_rows("prepare", p, {"FOLD": int(_folds(p))}), blocks, a, lse)
    return saved


def query_gradient(p: Problem, chosen: CudaConfig, inputs: Inputs, saved: Saved) -> Any:
    """Gradient of query, (B, Hq, Lq, D)."""
    tile = chosen.query_gradient
    grad = memory.empty((p.batch, p.heads_q, p.seq_q, p.dim_qk), inputs.query)
    a = _arguments(p, inputs, saved)
    a.grad_query = memory.address(grad)
    heads = p.batch * p.heads_q
    a.section = min(config.heads_a_section(p, queries=False), max(1, heads))
    flags = _flags(p, inputs, saved)
    run.start(_variant("query_gradient", p, tile, flags), heads * _tiles(p.seq_q, tile.queries), a, grad)
    return grad


def key_gradients(p: Problem, chosen: CudaConfig, inputs: Inputs, saved: Saved, wanted: str) -> tuple[Any, Any]:
    """Gradients of key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv), those of the letters "k" and "v" in ``wanted``."""
    tile = chosen.key_gradients
    a = _arguments(p, inputs, saved)
    key = value = None
    if "k" in wanted:
        key = memory.empty((p.batch, p.heads_kv, p.seq_k, p.dim_qk), inputs.key)
        a.grad_key = memory.address(key)
    if "v" in wanted:
        value = memory.empty((p.batch, p.heads_kv, p.seq_k, p.dim_v), inputs.key)
        a.grad_value = memory.address(value)
    heads = p.batch * p.heads_kv
    a.section = min(config.heads_a_section(p, queries=True), max(1, heads))
    for together in (wanted,) if chosen.key_and_value else wanted:
        flags = {
            **_flags(p, inputs, saved),
            "WITH_KEY": int("k" in together),
            "WITH_VALUE": int("v" in together),
        }
        variant = _variant("key_gradients", p, tile, flags)
        run.start(variant, heads * _tiles(p.seq_k, tile.keys), a, inputs.key)
    return key, value


def mask_gradient(p: Problem, chosen: CudaConfig, inputs: Inputs, saved: Saved) -> Any:
    """Gradient of a float mask, in its shape."""
    mask, tile = inputs.attn_mask, chosen.mask_gradient
    assert mask is not None
    b, h, q, k = mask.shape
    grad = memory.empty((b, h, q, k), mask)
    a = _arguments(p, inputs, saved)
    a.grad_mask = memory.address(grad)
    a.mask_batch, a.mask_heads, a.mask_rows, a.mask_columns = b, h, q, k
    blocks = b * h * (_tiles(p.seq_q, tile.queries) if q != 1 else 1) * (_tiles(p.seq_k, tile.keys) if k != 1 else 1)
    run.start(_variant("mask_gradient", p, tile, _flags(p, inputs, saved)), blocks, a, grad)
    return grad


# -- what a kernel is compiled for -------------------------------------------------------------------------------------


def _variant(kernel: str, p: Problem, tile: Tile, flags: dict[str, int]) -> Variant:
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    return Variant(
        kernel,
        p.dtype,
        rows,
        columns,
        block(p.dim_qk, p),
        block(p.dim_v, p),
        tile.warps,
        tile.stages,
        tile.resident,
        config.shared(kernel, tile, p),
        tuple(flags.items()),
    )


def _of_rows(kernel: str, p: Problem, flags: dict[str, int]) -> Variant:
    """A kernel that has no tiles."""
    return Variant(kernel, p.dtype, warps=ROWS_A_BLOCK, flags=tuple(flags.items()))


def _flags(p: Problem, inputs: Inputs, saved: Saved | None = None) -> dict[str, int]:
    flags = {
        "FOLD": int(_folds(p)),
        "SOFTCAP": int(_capped(p)),
        "MASK_KIND": 0 if p.mask is None else _MASK_KINDS[p.mask.dtype],
        "DROPOUT": int(p.dropout > 0.0),
        "QUERY_BYTES": _copied(p.query, p.dtype),
        "KEY_BYTES": _copied(p.key, p.dtype),
        "VALUE_BYTES": _copied(p.value, p.dtype),
    }
    if saved is not None:  # dO is no part of the problem
        flags["GRAD_OUT_BYTES"] = _copied(_memory(saved.grad_out), p.dtype)
    return flags


def _copied(operand: Memory, dtype: str) -> int:
    """Bytes that one copy may move."""
    return DTYPES[dtype] if operand.strided else max(operand.align, DTYPES[dtype])


def _memory(array: Any) -> Memory:
    """How ``array`` lies, as far as copies care."""
    steps, size = memory.strides(array), DTYPES[memory.dtype_name(array)]
    strided = array.shape[3] > 1 and steps[3] != 1
    align = math.gcd(16, memory.address(array), *(stride * size for stride in steps[:3]))
    return Memory(align=align, strided=strided)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _arguments(p: Problem, inputs: Inputs, saved: Saved | None = None) -> Arguments:
    """What every launch of a call passes."""
    a = Arguments()
    a.query, a.key, a.value = _operand(inputs.query), _operand(inputs.key), _operand(inputs.value)
    if inputs.attn_mask is not None:
        a.mask = _operand(inputs.attn_mask)
    lengths = inputs.key_lengths
    if lengths is not None:
        name = memory.dtype_name(lengths)
        a.lengths, a.length_stride = memory.address(lengths), memory.step(lengths)
        a.length_bytes = int(lengths.itemsize) if name.startswith("u") else -int(lengths.itemsize)
    if saved is not None:
        a.grad_out = _operand(saved.grad_out)
        a.base, a.delta, a.padded = memory.address(saved.base), memory.address(saved.delta), saved.base.shape[2]
    a.scale, a.factor, a.cap = p.softmax_scale, p.softmax_scale, 0.0
    if _capped(p):
        a.factor, a.cap = p.softmax_scale / p.softcap, p.softcap
    elif _folds(p) and p.dtype != "float64":
        a.factor *= _LOG2E
    a.keep_scale = 1.0 if not p.dropout else 0.0 if p.dropout == 1.0 else 1.0 / (1.0 - p.dropout)
    seed = inputs.seed or 0
    a.seed_low, a.seed_high = seed & 0xFFFFFFFF, seed >> 32
    a.threshold = min(round(p.dropout * 2**BITS) << 32 - BITS, 2**32 - 1)  # of a whole word
    a.batch, a.heads, a.group, a.pack = p.batch, p.heads_q, p.group, 1
    a.queries, a.keys, a.dim, a.dim_v = p.seq_q, p.seq_k, p.dim_qk, p.dim_v
    a.left, a.right = _sight(p)
    a.bottom_right, a.splits = int(p.bottom_right), 1
    return a


def _sight(p: Problem) -> tuple[int, int]:
    """Keys that a query sees before and after its own; more than there are, where nothing limits them."""
    unlimited = p.seq_q + p.seq_k
    left, right = p.window or (None, None)
    right = unlimited if right is None else right
    return unlimited if left is None else left, min(right, 0) if p.causal else right


def _operand(array: Any) -> Operand:
    return Operand(memory.address(array), *memory.strides(array))


def _contiguous(array: Any) -> Any:
    """(B, H, L) without gaps, as the kernels read it."""
    if array is None:
        return None
    _, h, length = array.shape
    wanted = (h * length, length, 1)
    as_wanted = all(s == w for n, s, w in zip(array.shape, memory.strides(array), wanted, strict=True) if n > 1)
    return array if as_wanted else array.contiguous() if hasattr(array, "contiguous") else array.copy(order="C")


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _capped(p: Problem) -> bool:
    return 0.0 < p.softcap < _NO_CAP


def _folds(p: Problem) -> bool:
    """Whether a score is q . k times a positive factor, which then becomes a part of the exponential."""
    plain_mask = p.mask is None or p.mask.is_bool
    return plain_mask and not _capped(p) and p.softmax_scale > 0.0
