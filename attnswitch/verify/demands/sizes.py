"""Sizes of a case within a requirement, as free draws have them: lengths at the edges of tiles, heads and batch few.

The work is within that of the space, if what is demanded leaves any such.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from attnswitch.verify.demands.limits import Range
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.drawing import dims, within
from attnswitch.verify.drawing.choices import Choices
from attnswitch.verify.drawing.strategies import SHARE, Space

__all__ = ["sizes"]

_TILES = (16, 32, 64, 128)
_PAGES = (16, 64, 1, 2, 128, 256)
#: Queries of a cache in pages, in three cases of four.
_FEW = 8
#: Keys of which a window takes 70 to a side.
_NARROW = 140


def sizes(
    wanted: Requirement, space: Space, choices: Choices, dtype: str, on: Collection[str], *, paged: bool
) -> tuple[dict[str, int], int] | None:
    """Sizes of a case of ``dtype`` with the features ``on``, and how wide its windows are; None if none was found."""
    ranges = {name: wanted.range(name) for name in ("B", "H", "Hkv", "Lq", "Lk", "D", "Dv", "page")}
    if wanted.square:
        ranges["Lq"] = ranges["Lk"] = ranges["Lq"].also(ranges["Lk"])
    drawing = _Drawing(wanted, space, choices, frozenset(on), ranges)
    page = drawing.page() if paged else 0
    large = drawing.of_regime(dtype, page)
    if large is not None:
        return large, max(1, large["seq_k"] // _NARROW)
    few = drawing.usual(page)
    return None if few is None else (few, 1)


@dataclass(frozen=True, slots=True)
class _Drawing:
    wanted: Requirement
    space: Space
    choices: Choices
    on: frozenset[str]
    ranges: dict[str, Range]

    def usual(self, page: int) -> dict[str, int] | None:
        """Sizes of few scores."""
        ranges, space = self.ranges, self.space
        d = self._dim(ranges["D"])
        dv = d if self.wanted.one_dim else self._dim(ranges["Dv"])
        room = space.work // max(d, dv, 32)
        square, least_q = self.wanted.square, ranges["Lq"].first
        lk = _whole(self._length(ranges["Lk"], math.isqrt(room) if square else room // least_q), page)
        few = page and not self.choices.often(4)
        lq = lk if square else self._length(ranges["Lq"], min(room // max(lk, 1), _FEW if few else room))
        if "dropout" in self.on:  # V = I
            lk, lq = dv, dv if square else lq
        room = max(1, min(room // max(1, lq * lk), space.heads))
        heads = self._heads(room)
        if heads is None:
            return None
        kv, group = heads
        batch = self._few(ranges["B"], max(1, room // (kv * group)))
        return self._named(batch, kv, group, lq, lk, d, dv, page)

    def of_regime(self, dtype: str, page: int) -> dict[str, int] | None:
        """Sizes within a regime of a backend in one case of so many, if one is within what is wanted."""
        space, ranges = self.space, self.ranges
        fitting = [
            replace(regime, dims=of)
            for regime in space.regimes
            if dtype in regime.dtypes and (of := tuple(pair for pair in regime.dims if self._has(*pair)))
            for _ in range(regime.often)
        ]
        if not fitting or not self.choices.often(SHARE) or self.on & {"dropout", "parts"}:
            return None
        regime = self.choices.of(fitting)
        found = within.sizes(self.choices, regime, space.scores, space.large, space.longest, space.heads)
        kv, group, lq, lk = found["heads_kv"], found["group"], found["seq_q"], _whole(found["seq_k"], page)
        if (group > 1) is not self._shares:
            kv, group = (kv, 2) if self._shares else (min(kv * group, space.heads), 1)
        if "mqa" in self.on and "gqa" not in self.on:
            kv = 1
        lq = lk if self.wanted.square else lq if lq in ranges["Lq"] else self._length(ranges["Lq"], lq)
        return self._named(found["batch"], kv, group, lq, lk, found["dim_qk"], found["dim_v"], page)

    def _named(self, batch: int, kv: int, group: int, lq: int, lk: int, d: int, dv: int, page: int) -> dict[str, int]:
        lengths = {"seq_q": lq, "seq_k": lk, "page": page}
        return {"batch": batch, "heads_kv": kv, "group": group, "dim_qk": d, "dim_v": dv, **lengths}

    def _has(self, d: int, dv: int) -> bool:
        alike = d == dv if self.wanted.one_dim else dv in self.ranges["Dv"]
        return alike and d in self.ranges["D"]

    def _dim(self, allowed: Range) -> int:
        """A head dimension: one of those named, an end, or as other draws have them."""
        if allowed.values:
            return self.choices.of(allowed.values)
        most = min(allowed.most, max(256, allowed.first))
        inside, drawn = self.choices.integer(1, most), [dims.one(self.choices) for _ in "abc"]
        picks = [size - size % allowed.step for size in (allowed.first, most, inside, 64, 128, *drawn)]
        return self.choices.of([size for size in picks if size in allowed] or [allowed.first])

    def _length(self, allowed: Range, room: int) -> int:
        """A length: one of those named, or up to ``room``, near a multiple of a tile more often than not."""
        choices = self.choices
        if allowed.values:
            return choices.of(allowed.values)
        most = max(allowed.first, min(allowed.most, self.space.longest, room))
        tiled = choices.of(_TILES) * choices.integer(1, 8) + choices.integer(-1, 1)
        beside, small = allowed.first + choices.integer(0, 70), choices.integer(1, 40)
        picks = [size - size % allowed.step for size in (tiled, tiled, beside, small, choices.integer(1, 3), most)]
        return choices.of([size for size in picks if size in allowed and size <= most] or [allowed.first])

    @property
    def _shares(self) -> bool:
        return bool(self.on & {"gqa", "mqa"})

    def _heads(self, room: int) -> tuple[int, int] | None:
        """Key heads, and query heads to each."""
        queries, keys, choices, shares = self.ranges["H"], self.ranges["Hkv"], self.choices, self._shares
        if queries.values:
            total = choices.of(queries.values)
            fitting = [kv for kv in range(1, total + 1) if total % kv == 0 and kv in keys and (kv < total) is shares]
        else:
            total = 0
            fitting = [kv for kv in (1, 2, 3, 4, keys.first) if kv in keys]
        if "mqa" in self.on and not ("gqa" in self.on and choices.coin()):
            fitting = [kv for kv in fitting if kv == 1]
        if not fitting:
            return None
        kv = choices.of([kv for kv in fitting if kv <= room] or [min(fitting)])
        several = max(2, min(choices.of((2, 3, 4, 8)), room))
        group = total // kv if total else several if shares else 1
        if not total:
            kv = kv if keys.values else max(1, min(kv, room // group))
        return kv, group

    def _few(self, allowed: Range, room: int) -> int:
        picks = allowed.values or tuple(n for n in (1, 2, 3) if n in allowed and n <= room) or (allowed.first,)
        return self.choices.of(picks)

    def page(self) -> int:
        """The rows of a page."""
        allowed = self.ranges["page"]
        rows = (*_PAGES, self.choices.integer(1, _PAGES[-1]))
        usual = [n for n in rows if n in allowed and n <= self.space.longest]
        return self.choices.of(allowed.values or usual or [allowed.first])


def _whole(length: int, page: int) -> int:
    """Rows of whole pages."""
    return -(-length // page) * page if page else length
