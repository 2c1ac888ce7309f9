"""What the launches of a problem have in common: its facts as the numbers and flags that the kernels take."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.problem import Problem
from attnswitch.problem.philox import BITS

from ..own import arithmetic
from .config import MOST_COLUMNS, Tile, panelled, width
from .kernels.parameters import (
    PagedSizes,
    Random,
    Reach,
    Rows,
    Scores,
    Sizes,
    SlopedScores,
    Steps,
    Strides,
    VarlenSizes,
)
from .kernels.variant import Variant

__all__ = [
    "alike",
    "as_bytes",
    "dense",
    "early",
    "entries",
    "options",
    "padded",
    "paged_sizes",
    "random",
    "reach",
    "rows",
    "scores",
    "sizes",
    "steps",
    "strides",
    "unit",
    "unseen",
    "variant",
    "wide",
    "words",
]

_NO_STEPS = Steps(0, 0, 0, 0)
#: What generic kernels are compiled for beside tiles and head dimensions.
_KNOWN = "mask_kind", "dropout", "has_lengths", "wide", "varlen", "sinks", "alibi", "paged", "scaled", "tree"


def variant(p: Problem, tile: Tile, **more: bool) -> Variant:
    """What a kernel is compiled for, to take ``p`` in tiles of ``tile``; ``more`` is what only some kernels ask."""
    left, right = p.reach
    how = Variant(
        block_m=tile.queries,
        block_n=tile.keys,
        block_d=width(p, p.dim_qk),
        block_dv=width(p, p.dim_v),
        even_d=p.dim_qk % width(p, p.dim_qk) == 0,
        even_dv=p.dim_v % width(p, p.dim_v) == 0,
        fold=arithmetic.folds(p),
        softcap=arithmetic.capped(p),
        mask_kind=0 if p.mask is None else 1 if p.mask.is_bool else 2,
        dropout=p.dropout > 0.0,
        has_lengths=p.key_lengths,
        has_left=left is not None,
        has_right=right is not None,
        panelled=panelled(p),
        varlen=p.varlen,
        alibi=p.alibi,
        **more,
    )
    if p.varlen:  # whose lengths nobody here knows
        how = how._replace(even_q=False, even_k=False)
    if not tile.generic:
        return how
    dim = arithmetic.dim_class(p)
    known = {name: getattr(how, name) for name in _KNOWN}
    asked = {"has_left": True, "has_right": True, "aligned": True, "generic": True}
    return Variant(tile.queries, tile.keys, dim, dim, **known, **asked)


def unseen(p: Problem, *arrays: Steps) -> bool:
    """Whether Triton has to be told that rows are aligned: by itself it sees multiples of 16 elements only.

    It may be told, as ``operands`` has seen to it that they are.
    """
    return p.dim_qk % 16 > 0 or p.dim_v % 16 > 0 or any(n % 16 for by in arrays for n in by[:3])


def options(tile: Tile) -> dict[str, Any]:
    """Triton's own options."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers or None}


def early(overlap: bool) -> dict[str, Any]:
    """The option of a kernel that begins, where kernels overlap, before the one that it waits for has ended."""
    return {"launch_pdl": True} if overlap else {}


def reach(p: Problem, lengths: Any) -> Reach:
    """Which keys a query sees by position: all, as far as there are any, where nothing limits them."""
    unlimited = p.seq_q + p.seq_k
    left, right = (unlimited if side is None else side for side in p.reach)
    return Reach(int(p.bottom_right), left, right, _words_of(lengths))


def scores(p: Problem, slopes: Any = None, *, generic: bool = False) -> Scores | SlopedScores:
    """How products q . k become scores, of which ``slopes`` (1 or B, Hq) times a distance are taken."""
    factor, cap = arithmetic.factors(p)
    said = Scores(float(p.softmax_scale), factor * unit(p, generic=generic), cap)
    if slopes is None:
        return said
    by_b, by_h = (0 if size == 1 else step for size, step in zip(slopes.shape, slopes.stride(), strict=True))
    return SlopedScores(*said, by_b, by_h)


def random(p: Problem) -> Random:
    """The dropout, but for its seed."""
    return Random(0, 0, round(p.dropout * 2**BITS), arithmetic.keep_scale(p))


def sizes(p: Problem, query: Any = None, key: Any = None, cu_q: Any = None, cu_k: Any = None) -> Sizes | VarlenSizes:
    """Its lengths and numbers of heads; with ``varlen`` also the rows that query, and key if it is read, have."""
    if not p.varlen:
        return Sizes(p.batch, p.heads_q, p.group, p.seq_q, arithmetic.padded(p), p.seq_k)
    rows_q, rows_k = (0 if array is None else array.shape[2] for array in (query, key))
    whole = p.batch, p.heads_q, p.group, p.seq_q, padded(p, rows_q), p.seq_k
    return VarlenSizes(*whole, rows_q, rows_k, _words_of(cu_q), _words_of(cu_k))


def paged_sizes(p: Problem, query: Any, cu_q: Any, table: Any, scales: tuple[Any, Any], tree: Any) -> PagedSizes:
    """The same of keys in pages, for what reads them: of ``scales`` of keys and of values, and bits of a ``tree``."""
    rows = query.shape[2] if p.varlen else 0
    apart = [step for scale in scales for step in ((0, 0) if scale is None else scale.stride())]
    of_tree = () if tree is None else (0 if p.varlen else tree.stride(0), tree.stride(1))
    whole = p.batch, p.heads_q, p.group, p.seq_q, padded(p, rows), p.seq_k
    return PagedSizes(*whole, rows, _words_of(cu_q), p.page, table.stride(0), *apart, *of_tree)


def padded(p: Problem, rows: int) -> int:
    """Rows of each head in what the backward reads row by row, for ``rows`` of queries of all sequences."""
    if not p.varlen:
        return arithmetic.padded(p)
    return (rows // arithmetic.PADDING + p.batch) * arithmetic.PADDING


def entries(p: Problem) -> int:
    """Batch entries of a grid: one more where rows may be past the last sequence."""
    return p.batch + p.varlen


def words(seed: int) -> tuple[int, int]:
    """A seed as two words of 32 bits."""
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def unit(p: Problem, *, generic: bool = False) -> float:
    """What a natural lse is multiplied by to be one for the kernels' scores."""
    return arithmetic.LOG2E if arithmetic.folds(p) and not generic else 1.0


def dense(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and its strides for ``new_empty_strided``, which is a third faster than ``new_empty``."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n or 1
    return shape, tuple(steps[::-1])


def alike(array: Any, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same for (B, H, L, dim) that lies in the order of ``array``, heads inside L or L inside."""
    b, h, length, _ = array.shape
    shape, strides = dense(b, h, length, dim)
    if h > 1 and length > 1 and array.stride(1) < array.stride(2):
        _, (by_b, by_l, by_h, by_d) = dense(b, length, h, dim)
        strides = by_b, by_h, by_l, by_d
    return shape, strides


def as_bytes(mask: Any) -> Any:
    """A bool mask as bytes: the same memory, in a type whose loads mean the same in every version of Triton."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def steps(array: Any) -> Steps:
    """Strides of an array of four axes, 0 for none; 0 along an axis of length 1, whose own may be any number."""
    if array is None:
        return _NO_STEPS
    if 1 not in array.shape:
        return Steps(*array.stride())
    return Steps(*[0 if size == 1 else stride for size, stride in zip(array.shape, array.stride(), strict=True)])


def rows(grad: Any) -> Rows:
    """Those of a gradient whose rows are whole: of one that ``alike`` describes."""
    _, head, row, _ = grad.stride()
    return Rows(head // grad.shape[3], row // grad.shape[3])


def strides(query: Any, key: Any, value: Any, other: Any, mask: Any) -> Strides:
    """Those of the operands; ``other`` is the output or its gradient."""
    return Strides(steps(query), steps(key), steps(value), steps(other), steps(mask))


def wide(tile: Tile, *arrays: Steps, page: int = 0) -> bool:
    """Whether an offset within one tile, or one ``page``, of any of the arrays may not fit 32 bits."""
    rows = max(tile.queries, tile.keys, page)
    return any(rows * row + MOST_COLUMNS * step >= 2**31 for _, _, row, step in arrays)


def _words_of(integers: Any) -> int:
    """Words of 32 bits that each of ``integers`` takes; 0 for none."""
    return 0 if integers is None else integers.element_size() // 4


def _signed(word: int) -> int:
    """32 bits as the integer that Triton takes for an int32; the kernels read them as unsigned."""
    return word - 2**32 if word >= 2**31 else word
