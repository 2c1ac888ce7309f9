"""``Limit``: a bound on a size of a problem, such as ``D<=256``; sizes that are not named are usual ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of, shown
from attnswitch.verify.drawing.case import Case

__all__ = ["SIZES", "Limit", "Range", "range_of"]

#: Names of sizes on the command line, and of a case.
SIZES = {
    "B": "batch",
    "H": "heads_q",
    "Hkv": "heads_kv",
    "Lq": "seq_q",
    "Lk": "seq_k",
    "D": "dim_qk",
    "Dv": "dim_v",
    "page": "page",
}
#: The largest that may be asked for: no case beyond it can be judged.
_MOST = 2**20
_FORM = re.compile(r"(?P<name>[A-Za-z]+)(?P<op><=|>=|=|%)(?P<number>\w+)")
_LIKE = re.compile(rf"(?:{'|'.join(SIZES)})=|[A-Za-z]*[<>%]")


@dataclass(frozen=True, slots=True)
class Limit:
    """A size held against a number: ``=`` (one of several that are named so), ``<=``, ``>=``, ``%`` (a multiple).

    ``number`` 0 stands for another size, in ``Lq=Lk``.
    """

    name: str
    op: str
    number: int

    @staticmethod
    def is_meant(word: str) -> bool:
        """Whether ``word`` is to be read as one."""
        return _LIKE.match(word) is not None

    @staticmethod
    def parse(word: str) -> Limit:
        """Read ``D<=256``. Raises ``InvalidProblem``."""
        found = _FORM.fullmatch(word)
        if found is None or found["name"] not in SIZES:
            expected = f"{one_of(found['name'] if found else word, SIZES)}, then =, <=, >= or % and a number"
            raise InvalidProblem(f"{shown(word)} is no bound of a size: {expected}")
        if word == "Lq=Lk":
            return Limit("Lq", "=", 0)
        number = int(found["number"]) if found["number"].isdecimal() and len(found["number"]) < 9 else 0
        if not 1 <= number <= _MOST:
            raise InvalidProblem(f"{shown(word)}: expected a number from 1 to {_MOST:,}")
        return Limit(found["name"], found["op"], number)

    def holds(self, case: Case) -> bool:
        """Whether the size of ``case`` is within it."""
        if not self.number:
            return case.query_lengths == case.lengths if case.varlen else case.seq_q == case.seq_k
        size: int = getattr(case, SIZES[self.name])
        if self.op == "%":
            return size % self.number == 0
        return (
            size == self.number if self.op == "=" else size <= self.number if self.op == "<=" else size >= self.number
        )

    def __str__(self) -> str:
        return f"{self.name}{self.op}{self.number or 'Lk'}"


@dataclass(frozen=True, slots=True)
class Range:
    """Every limit of one size: from ``least`` to ``most``, multiples of ``step``, or one of ``values`` if any."""

    least: int = 1
    most: int = _MOST
    step: int = 1
    values: tuple[int, ...] = ()

    def __contains__(self, size: int) -> bool:
        within = self.least <= size <= self.most and size % self.step == 0
        return within and (not self.values or size in self.values)

    @property
    def first(self) -> int:
        """The smallest size within it."""
        return min(self.values) if self.values else -(-self.least // self.step) * self.step

    def also(self, other: Range) -> Range:
        """What is within both, as far as there is anything."""
        least, most, step = max(self.least, other.least), min(self.most, other.most), math.lcm(self.step, other.step)
        both = Range(least, most, step)
        either = self.values or other.values
        return replace(both, values=tuple(size for size in either if size in self and size in other and size in both))


def range_of(name: str, limits: Iterable[Limit], usual: tuple[int, ...] = ()) -> Range:
    """What ``limits`` leave of the size ``name``; one of ``usual`` where they do not name it."""
    mine = [limit for limit in limits if limit.name == name and limit.number]
    if not mine:
        return Range(values=usual)
    by = {op: [limit.number for limit in mine if limit.op == op] for op in ("=", "<=", ">=", "%")}
    return Range(max([1, *by[">="]]), min([_MOST, *by["<="]]), math.lcm(*by["%"]), tuple(sorted({*by["="]})))
