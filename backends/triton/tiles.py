"""Which tiles of a masked problem are visited: made from the mask where looking at all of it first pays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnswitch.backend import Inputs
from attnswitch.device import Device
from attnswitch.problem import DTYPES, Problem

from . import run
from .kernels import lists as kernels

__all__ = ["Lists", "listed", "overlaps"]


class Lists(NamedTuple):
    """What each tile of queries (or keys) visits (see ``arrange``); strides of lists for batch, head and tile."""

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
    tiles_q, tiles_k = -(-p.seq_q // block_m), -(-p.seq_k // block_n)
    lengths, positional = p.key_lengths, p.positional
    batch = p.batch if mask.shape[0] > 1 or lengths else 1
    heads = mask.shape[1]
    span_q = mask.shape[2] > 1 or positional
    kinds_q = tiles_q if span_q else 1
    kinds = torch.empty((batch, heads, kinds_q, tiles_k), dtype=torch.int16, device=mask.device)
    left, right = p.window or (None, None)
    if p.causal:
        right = 0 if right is None else min(right, 0)
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    overlap = overlaps(device)
    run.start(
        kernels.classify,
        kinds.numel(),
        mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
        inputs.key_lengths,
        kinds,
        *strides,
        heads,
        kinds_q,
        tiles_k,
        p.seq_q,
        p.seq_k,
        int(p.bottom_right),
        left or 0,
        right or 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        EVEN_K=p.seq_k % block_n == 0,
        MASK_KIND=1 if mask.dtype == torch.bool else 2,
        HAS_LENGTHS=lengths,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        # Beyond a length, values must be cleared, and beyond the arrays, loads tested: such a tile is no part of a run.
        STRETCH=not by_keys and not lengths and p.seq_k % block_n == 0,
        WORDS=not lengths and not p.positional and p.seq_k % block_n == 0 and _in_words(mask),
        OVERLAP=overlap,
        num_warps=4,
    )
    if by_keys:
        kinds = kinds.expand(batch, heads, tiles_q, tiles_k)
        owners, others = tiles_k, tiles_q
        steps = kinds.stride(3), kinds.stride(2)
    else:
        owners, others = kinds_q, tiles_k
        steps = kinds.stride(2), kinds.stride(3)
    lists = torch.empty((batch, heads, owners, others), dtype=torch.int32, device=mask.device)
    counts = torch.empty((batch, heads, owners, 5), dtype=torch.int32, device=mask.device)
    run.start(
        kernels.arrange,
        counts.numel() // 5,
        kinds,
        lists,
        counts,
        owners,
        others,
        *steps,
        kinds_q * tiles_k,
        SIZE=block_m if by_keys else block_n,
        BLOCK=256,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    step_b = heads * owners if batch > 1 else 0
    step_h = owners if heads > 1 else 0
    return Lists(lists, counts, (step_b, step_h, 1 if owners > 1 else 0))


def _in_words(mask: Any) -> bool:
    """Whether the keys of a bool mask lie side by side, four to an aligned word."""
    return (
        mask.dtype == torch.bool
        and mask.shape[3] > 1
        and mask.stride(3) == 1
        and mask.data_ptr() % 4 == 0
        and all(n == 1 or stride % 4 == 0 for n, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    )
