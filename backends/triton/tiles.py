"""Which tiles of a masked problem are visited: made from the mask where looking at all of it first pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ..own import arithmetic
from .arguments import dense, reach, steps
from .config import Tile, small
from .kernels import lists as kernels
from .kernels.parameters import Visits
from .kernels.variant import Variant
from .run import Passed

__all__ = ["Listing", "Make", "listing", "overlaps"]

#: Positions of a mask that a program looks at together; and as words of four, when 128 queries against 2,048 keys are
#: all loaded before any is waited for: 13.5 us for 16.8 MB on an H200, and 15.7 by halves.
_POSITIONS, _WORDS = 2**14, 2**16
#: What makes a launch of a kernel, its programs, and what says what is passed: ``run.Launch``, or a record of it.
Make = Callable[[Any, int, Callable[..., Passed]], Callable[..., None]]


def pays(p: Problem, device: Device) -> bool:
    """Whether one pass over the mask costs little beside the attention, and so does its launch.

    The mask is read once more, against two products of every score that it may spare. Heads that share a mask share
    the pass; a mask of its own for every head costs a tenth of the work that it could save, and more if it is float.
    """
    if p.mask is None or small(p, device):
        return False
    sharing = p.heads_q if "h" not in p.mask.axes else 1
    if "q" not in p.mask.axes:
        sharing *= max(1, p.seq_q // 16)
    return sharing >= (1 if p.mask.is_bool else DTYPES[p.mask.dtype])


def overlaps(device: Device) -> bool:
    """Whether a kernel of ``device`` may begin before the one that it waits for has ended."""
    return (device.capability or (0, 0)) >= (9, 0)


def listing(make: Make, p: Problem, device: Device, tile: Tile, *, by_keys: bool = False) -> Listing | None:
    """What lists the tiles to visit, of each tile of queries or ``by_keys`` of keys; None where all are."""
    return Listing(make, p, device, tile.queries, tile.keys, by_keys) if pays(p, device) else None


class Listing:
    """Lists what each tile of queries (or keys) visits (see ``classify``); ``visits`` is where the lists stand."""

    def __init__(
        self, make: Make, p: Problem, device: Device, block_m: int, block_n: int, by_keys: bool = False
    ) -> None:
        assert p.mask_shape is not None
        b, h, q, _ = p.mask_shape
        tiles_q, tiles_k = arithmetic.tiles(p.seq_q, block_m), arithmetic.tiles(p.seq_k, block_n)
        batch = p.batch if b > 1 or p.key_lengths else 1
        self._alike = q == 1 and not p.positional  # all queries, of which one is then enough to look at
        owners, others = (tiles_k, tiles_q) if by_keys else (1 if self._alike else tiles_q, tiles_k)
        self._p, self._how, self._by_keys = p, _variant(p, device, 1 if self._alike else block_m, block_n), by_keys
        found = 1 if by_keys and self._alike else others
        self._sizes = h, owners, others, found
        self._kinds, self._lists, self._counts = (dense(batch, h, owners, n) for n in (found, others, 5))
        self._launch = make(kernels.classify, batch * h * owners, self._passed)
        self.visits = Visits(h * owners if batch > 1 else 0, owners if h > 1 else 0, 1 if owners > 1 else 0)

    def __call__(self, mask: Any, lengths: Any) -> tuple[Any, Any]:
        """Launch it: the lists (batch or 1, heads or 1, tiles or 1, tiles of the other) and their counts (..., 5)."""
        kinds = mask.new_empty_strided(*self._kinds, dtype=torch.int16)
        lists = mask.new_empty_strided(*self._lists, dtype=torch.int32)
        counts = mask.new_empty_strided(*self._counts, dtype=torch.int32)
        self._launch(mask, lengths, kinds, lists, counts)
        return lists, counts

    def _passed(self, mask: Any, lengths: Any, *_: Any) -> Passed:
        p, how, found = self._p, self._how, self._sizes[3]
        words = not p.key_lengths and not p.positional and how.even_k and _in_words(mask)
        most = (4 * _WORDS if words else _POSITIONS) // (how.block_m * how.block_n)
        flags = {
            "AT_ONCE": max(1, min(most, _POSITIONS // how.block_n, 1 << (found - 1).bit_length())),
            "BY_KEYS": self._by_keys,
            # Beyond a length, values must be cleared, beyond the arrays, loads tested: such a tile is no part of a run.
            "STRETCH": not self._by_keys and not p.key_lengths and how.even_k,
            "WORDS": words,
            "how": how,
            "num_warps": 8,
        }
        rows = 1 if self._alike else p.seq_q
        return Passed((steps(mask), *self._sizes, rows, p.seq_k, reach(p, lengths)), flags)


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
