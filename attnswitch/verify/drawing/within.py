"""Sizes within a ``Regime``: what a backend has kernels for that the usual small cases do not reach.

Lengths lie around the edges of its tiles, several of them if there is room. One key head with its query heads stays
within what the judge answers in whole (``truth.exact``), and heads and batch are as many as the regime asks for.
"""

from __future__ import annotations

from attnswitch.machine.backend import Regime
from attnswitch.verify.drawing.choices import Choices

__all__ = ["sizes"]

_GROUPS, _HEADS, _BATCHES = (1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 3)


def sizes(choices: Choices, regime: Regime, scores: int, work: int, longest: int, heads: int) -> dict[str, int]:
    """Sizes of a case.

    ``scores`` bounds group * Lq * Lk, ``work`` is ``Space``'s for all heads, and ``heads`` batch * heads. As many
    choices are made whatever they are.
    """
    d, dv = choices.of(regime.dims)
    group = choices.of(_GROUPS)
    room = min(scores, work // max(d, dv, 32))
    group = min(group, max(1, heads), max(1, room // (2 * max(regime.tiles)) ** 2))
    room //= group
    least = max(2, regime.queries)
    keys = _length(choices, regime.tiles, 1, min(longest, room // least))
    queries = _length(choices, regime.tiles, least, min(longest, room // keys))
    square = choices.integer(0, 3) == 3
    if square and least <= keys and keys * keys <= room:
        queries = keys
    kv, batch = choices.of(_HEADS), choices.of(_BATCHES)
    each = queries * keys
    most = max(1, min(heads, work // (each * max(d, dv, 32))) // group)
    fewest = -(-regime.products // (each * (d + dv) * group))
    kv = min(kv, most)
    batch = min(max(batch, -(-fewest // kv)), max(1, most // kv))
    return {"batch": batch, "heads_kv": kv, "group": group, "seq_q": queries, "seq_k": keys, "dim_qk": d, "dim_v": dv}


def _length(choices: Choices, tiles: tuple[int, ...], least: int, most: int) -> int:
    """A length from ``least`` to ``most``: some tiles, one more or less, or half of one besides."""
    tile = choices.of(tiles)
    several = choices.integer(0, 7)
    beside = choices.of((0, 1, -1, tiles[0] // 2 + 5))
    fitting = max(1, (most - beside) // tile)
    return max(least, min(tile * (1 + several % fitting) + beside, most))
