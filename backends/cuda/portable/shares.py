"""Among how many blocks the steps of a tile of gradients are split."""

from __future__ import annotations

import functools

from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ...own import arithmetic
from . import occupancy
from .splits import EXTRA, MOST_SPLITS, pace
from .tiles import Tile

__all__ = ["shares"]

#: Rounds of blocks that share steps, at most; the fewest steps of each block; and up to how many every number is tried.
_ROUNDS, _FEWEST, _ALL = 4, 2, 16
#: Blocks that share the steps of one where they are emulated.
_EMULATED = 3
#: Products of tiles in each step.
_PRODUCTS = {"key_gradients": 4, "query_gradient": 3}
#: What the launch takes that adds, in steps of about 2 us as in ``splits``, and bytes of parts that an SM writes and
#: reads in one: by 15 problems on an H200, 2026-11-27, each shared by 1 to 33 blocks.
_LAUNCH, _PARTS = 2, 24e3


def shares(kernel: str, problem: Problem, device: Device, tile: Tile) -> int:
    """Among how many blocks the steps of each tile of ``kernel`` are split, a gradient of query or those of keys.

    More than 1 where few blocks have long ways, as 8 batch entries with 28 keys of one head do against 10,862 queries.
    """
    p = problem
    if p.varlen or tile.generic:
        return 1
    queries, keys = arithmetic.tiles(p.seq_q, tile.queries), arithmetic.tiles(p.seq_k, tile.keys)
    if kernel == "key_gradients":
        heads = p.batch * p.heads_kv
        blocks, steps, numbers = heads * keys, p.group * queries, heads * p.seq_k * (p.dim_qk + p.dim_v)
    else:
        heads = p.batch * p.heads_q
        blocks, steps, numbers = heads * queries, keys, heads * p.seq_q * p.dim_qk
    if device.kind == "cpu":
        return max(1, min(_EMULATED, steps)) if p.seq_q % 2 else 1
    if not blocks or steps < 2 * _FEWEST:
        return 1
    sms = device.sms or 64
    held = max(1, occupancy.blocks(kernel, tile, p, occupancy.sm(device)))
    part = numbers * max(4, DTYPES[p.dtype]) / (_PARTS * sms)
    return _soonest(blocks, steps, sms * held, pace(p, tile, _PRODUCTS[kernel]), part)


@functools.lru_cache(maxsize=4096)
def _soonest(blocks: int, steps: int, slots: int, slowness: float, part: float) -> int:
    """``shares`` of so many blocks, of which ``slots`` run at one time; each part of their sums takes ``part`` more."""

    def time(splits: int) -> float:
        rounds = -(-blocks * splits // slots)
        added = _LAUNCH + splits * part if splits > 1 else 0.0
        return rounds * (-(-steps // splits) + EXTRA / slowness) + added / slowness

    most = min(_ROUNDS * slots // blocks, steps // _FEWEST, MOST_SPLITS)
    filling = (min(most, rounds * slots // blocks) for rounds in range(1, _ROUNDS + 1))
    tried = {*range(2, min(most, _ALL) + 1), *(splits for splits in filling if splits > 1)}
    best: int = min((1, *sorted(tried)), key=time)
    return best
