"""Which tiles of a masked problem are visited: made from the mask where looking at all of it first pays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnswitch.backend import Inputs
from attnswitch.device import Device
from attnswitch.problem import DTYPES, Problem

from . import run
from .arguments import as_bytes, mask_strides, position, tiles
from .kernels import lists as kernels
from .kernels.variant import Variant

__all__ = ["Lists", "listed", "overlaps"]

#: Positions of a mask that a program looks at together; and as words of four, when a tile of queries against 2,048 keys
#: is all loaded before any of it is waited for.
_POSITIONS, _WORDS = 2**14, 2**15


class Lists(NamedTuple):
    """What each tile of queries (or keys) visits (see ``classify``); strides of lists for batch, head and tile."""

    tiles: Any
    counts: Any
    strides: tuple[int, int, int]


def pays(p: Problem) -> bool:
    """Whether one pass over the mask costs little beside the attention.

    The mask is read once more, against two products of every score that it may spare. Heads that share a mask share
    the pass; a mask of its own for every head costs a tenth of the work that it could save, and more if it is float.
    """
    if p.mask is None:
        return False
    sharing = p.heads_q if "h" not in p.mask.axes else 1
    if "q" not in p.mask.axes:
        sharing *= max(1, p.seq_q // 16)
    return sharing >= (1 if p.mask.is_bool else DTYPES[p.mask.dtype])


def overlaps(device: Device) -> bool:
    """Whether a kernel of ``device`` may begin before the one that it waits for has ended."""
    return (device.capability or (0, 0)) >= (9, 0)


def listed(
    p: Problem, device: Device, inputs: Inputs, block_m: int, block_n: int, by_keys: bool = False
) -> Lists | None:
    """The tiles to visit of each tile of queries, or ``by_keys`` of each tile of keys; None for all."""
    mask = inputs.attn_mask
    if mask is None or not pays(p):
        return None
    tiles_q, tiles_k = tiles(p.seq_q, block_m), tiles(p.seq_k, block_n)
    batch = p.batch if mask.shape[0] > 1 or p.key_lengths else 1
    heads = mask.shape[1]
    alike = mask.shape[2] == 1 and not p.positional  # all queries, of which one is then enough to look at
    owners, others = (tiles_k, tiles_q) if by_keys else (1 if alike else tiles_q, tiles_k)
    found = 1 if by_keys and alike else others
    how = _variant(p, device, 1 if alike else block_m, block_n)
    words = not p.key_lengths and not p.positional and how.even_k and _in_words(mask)
    most = (4 * _WORDS if words else _POSITIONS) // (how.block_m * block_n)
    at_once = max(1, min(most, _POSITIONS // block_n, 1 << (found - 1).bit_length()))
    kinds = torch.empty((batch, heads, owners, found), dtype=torch.int16, device=mask.device)
    lists = torch.empty((batch, heads, owners, others), dtype=torch.int32, device=mask.device)
    counts = torch.empty((batch, heads, owners, 5), dtype=torch.int32, device=mask.device)
    run.start(
        kernels.classify,
        batch * heads * owners,
        as_bytes(mask),
        inputs.key_lengths,
        kinds,
        lists,
        counts,
        *mask_strides(mask),
        heads,
        owners,
        others,
        found,
        1 if alike else p.seq_q,
        p.seq_k,
        *position(p),
        AT_ONCE=at_once,
        BY_KEYS=by_keys,
        # Beyond a length, values must be cleared, and beyond the arrays, loads tested: such a tile is no part of a run.
        STRETCH=not by_keys and not p.key_lengths and how.even_k,
        WORDS=words,
        how=how,
        num_warps=8,
    )
    step_b = heads * owners if batch > 1 else 0
    step_h = owners if heads > 1 else 0
    return Lists(lists, counts, (step_b, step_h, 1 if owners > 1 else 0))


def _variant(p: Problem, device: Device, block_m: int, block_n: int) -> Variant:
    """What ``classify`` is compiled for, and no more: whatever else a problem has, it is the same kernel."""
    assert p.mask is not None
    left, right = p.reach
    return Variant(
        block_m,
        block_n,
        even_k=p.seq_k % block_n == 0,
        mask_kind=1 if p.mask.is_bool else 2,
        has_lengths=p.key_lengths,
        has_left=left is not None,
        has_right=right is not None,
        overlap=overlaps(device),
    )


def _in_words(mask: Any) -> bool:
    """Whether the keys of a bool mask lie side by side, four to an aligned word."""
    return (
        mask.dtype == torch.bool
        and mask.shape[3] > 1
        and mask.stride(3) == 1
        and mask.data_ptr() % 4 == 0
        and all(n == 1 or stride % 4 == 0 for n, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    )
