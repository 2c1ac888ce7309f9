"""``Piece``: one attention call among those that a rank's queries and some rank's keys come to.

Positions are those of the whole sequence. What is causal or has a window there is a band, ``low <= j - i <= high`` of
query i and key j. Between two ranges of rows, what the band leaves is again a call that is causal or has a window:
rows that see nothing and keys that nobody sees are cut off, until the band begins within both. No mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from attnswitch.problem import Window

__all__ = ["Band", "Piece", "packed", "pieces"]


class Band(NamedTuple):
    """The least and the greatest j - i of a key j that query i sees; None for unlimited."""

    low: int | None = None
    high: int | None = None

    @staticmethod
    def of(causal: bool, window: Window | None, offset: int = 0) -> Band:
        """What ``is_causal`` and ``window`` leave, of which ``offset`` is that of the alignment."""
        left, right = window or (None, None)
        right = 0 if causal and right is None else min(0, right) if causal and right is not None else right
        return Band(None if left is None else offset - left, None if right is None else offset + right)


class Piece(NamedTuple):
    """Rows of a rank's queries, and of the keys that it has at hand, with what hides between them."""

    rows: range
    keys: range
    causal: bool = False
    window: Window | None = None
    #: Where sequences begin within ``rows``, which are ``keys`` too, and where the last ends; none where there is one.
    cu_seqlens: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether every row sees every key."""
        return not (self.causal or self.window or self.cu_seqlens)


#: All that a causal call hides.
_CAUSAL = Band(None, 0)


def pieces(mine: Sequence[range], theirs: Sequence[range], band: Band, *, apart: bool = False) -> list[Piece]:
    """The calls between queries at the positions ``mine`` and keys at ``theirs``; each pair is in one at most.

    ``rows`` and ``keys`` of a piece count rows as they lie, one range after another. They are of more than one range
    where that makes one call of several, unless ``apart``.
    """
    found = [
        piece
        for rows, at in _placed(mine)
        for keys, where in _placed(theirs)
        for piece in _between(rows, keys, band, at, where)
    ]
    if apart:
        return found
    if band == _CAUSAL and mine == theirs and len(mine) > 1:  # rows lie in the order of their positions
        everything = range(sum(map(len, mine)))
        return [Piece(everything, everything, causal=True)]
    return _joined(found)


def packed(mine: Sequence[range], theirs: Sequence[range], band: Band, cu_seqlens: Sequence[int]) -> list[Piece]:
    """The same of sequences that lie one after another, from one of ``cu_seqlens`` to the next."""
    found: list[Piece] = []
    for rows, at in _placed(mine):
        for keys, where in _placed(theirs):
            shared = [
                (_within(rows, sequence), _within(keys, sequence))
                for sequence in (range(*edges) for edges in pairwise(cu_seqlens))
            ]
            shared = [(some, seen) for some, seen in shared if some and seen]
            if rows == keys and len(shared) > 1:
                found += _sequences([some for some, _ in shared], rows, band, at, where)
            else:
                for some, seen in shared:
                    found += _between(some, seen, band, at + some.start - rows.start, where + seen.start - keys.start)
    return found


def _within(rows: range, sequence: range) -> range:
    return range(max(rows.start, sequence.start), min(rows.stop, sequence.stop))


def _placed(ranges: Iterable[range]) -> Iterator[tuple[range, int]]:
    """Ranges of positions, with the row at which each begins."""
    at = 0
    for positions in ranges:
        yield positions, at
        at += len(positions)


def _sequences(parts: Sequence[range], rows: range, band: Band, at: int, where: int) -> Iterator[Piece]:
    """The call of several sequences, or what is left of each, to themselves."""
    start, stop = parts[0].start, parts[-1].stop
    here, there = (range(n + start - rows.start, n + stop - rows.start) for n in (at, where))
    longest = max(map(len, parts))
    causal, window = _said(band, longest, longest)
    yield Piece(here, there, causal, window, (*(part.start - start for part in parts), stop - start))


def _between(rows: range, keys: range, band: Band, at: int, where: int) -> Iterator[Piece]:
    """The call of what queries at ``rows`` see of ``keys``, which begin at the rows ``at`` and ``where``."""
    low, high = band
    start = rows.start if high is None else max(rows.start, keys.start - high)
    stop = rows.stop if low is None else min(rows.stop, keys.stop - low)
    first = keys.start if low is None else max(keys.start, start + low)
    last = keys.stop if high is None else min(keys.stop, stop + high)
    if start >= stop or first >= last:
        return
    offset = start - first  # of positions within the piece, j - i is less by as much
    relative = Band(None if low is None else low + offset, None if high is None else high + offset)
    causal, window = _said(relative, stop - start, last - first)
    at, where = at - rows.start, where - keys.start
    yield Piece(range(at + start, at + stop), range(where + first, where + last), causal, window)


def _said(band: Band, rows: int, keys: int) -> tuple[bool, Window | None]:
    """``is_causal`` and ``window`` of a call of so many rows and keys within ``band``, which begins in its corner."""
    left = None if band.low is None or -band.low >= rows - 1 else -band.low
    right = None if band.high is None or band.high >= keys - 1 else band.high
    causal = right == 0
    if left is None and (causal or right is None):
        return causal, None
    return causal, (left, right)


def _joined(found: Sequence[Piece]) -> list[Piece]:
    """``found`` with plain pieces made one where they have the same rows, and keys that touch; then the other way."""
    for turned in (False, True):
        result: list[Piece] = []
        for piece in found:
            same, along = (piece.keys, piece.rows) if turned else (piece.rows, piece.keys)
            for n, known in enumerate(result):
                beside, before = (known.keys, known.rows) if turned else (known.rows, known.keys)
                if known.plain and piece.plain and beside == same and before.stop == along.start:
                    longer = range(before.start, along.stop)
                    result[n] = Piece(longer, same) if turned else Piece(same, longer)
                    break
            else:
                result.append(piece)
        found = result
    return list(found)
