"""What a portable kernel is compiled for: its tile, and the features of its problem."""

from __future__ import annotations

import math

from attnswitch.problem import DTYPES, Problem

from ...own import arithmetic
from ..classes import per_class
from ..compiling.variant import Variant
from ..launching import arguments, memory
from . import tiles
from .tiles import ROWS_A_BLOCK, Tile, block

__all__ = ["dense_bytes", "flags", "of_numbers", "of_rows", "of_tile"]

#: Flags that generic kernels are compiled for too: they decide on registers, or are of forms that few problems have.
_ALWAYS = ("WITH_KEY", "WITH_VALUE", "SINKS", "ALIBI", "PAGED", "TREE", "CACHE")


def of_tile(kernel: str, p: Problem, tile: Tile, flags: dict[str, int]) -> Variant:
    """``kernel`` for that tile; a generic one has few of ``flags``."""
    if tile.generic:
        flags = {name: value for name, value in flags.items() if name in _ALWAYS}
    rows, columns = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    return Variant(
        kernel,
        p.dtype,
        rows,
        columns,
        block(p.dim_qk, p, tile),
        block(p.dim_v, p, tile),
        tile.warps,
        tile.stages,
        tile.resident,
        tiles.shared(kernel, tile, p),
        tuple(flags.items()),
        teams=tile.teams,
        generic=tile.generic,
        varlen=p.varlen,
        eight=bool(p.cache),
    )


@per_class
def of_rows(p: Problem, kernel: str, folds: bool) -> Variant:
    """A kernel that has no tiles."""
    return Variant(kernel, p.dtype, warps=ROWS_A_BLOCK, flags=(("FOLD", int(folds)),), varlen=p.varlen)


@per_class
def of_numbers(p: Problem, kernel: str, of_keys: bool) -> Variant:
    """A kernel of single numbers."""
    return Variant(kernel, p.dtype, warps=ROWS_A_BLOCK, flags=(("OF_KEYS", int(of_keys)),))


def flags(p: Problem) -> dict[str, int]:
    """Those that all kernels with tiles have, by name."""
    return {
        "FOLD": int(arithmetic.folds(p)),
        "SOFTCAP": int(arithmetic.capped(p)),
        "MASK_KIND": arguments.mask_kind(p),
        "MASK_PAIRS": int(_pairs(p)),
        "DROPOUT": int(p.dropout > 0.0),
        "ALIBI": int(p.alibi),
        "PAGED": 0,
        "QUERY_BYTES": memory.copied(p.query, p.element("query")),
        "KEY_BYTES": memory.copied(p.key, p.element("key")),
        "VALUE_BYTES": memory.copied(p.value, p.element("value")),
    }


def dense_bytes(p: Problem) -> int:
    """Bytes that one copy may move of a gradient of the output whose rows lie without gaps."""
    return math.gcd(16, p.dim_v * DTYPES[p.dtype])


def _pairs(p: Problem) -> bool:
    """Whether one load may have two neighbours of a mask's row, of 8 bytes at most, which a thread has of scores."""
    if p.mask is None or "k" not in p.mask.axes or p.attn_mask.strided or not tiles.on_tensor_cores(p):
        return False
    return 2 * p.element("attn_mask") <= min(p.attn_mask.align, 8)
