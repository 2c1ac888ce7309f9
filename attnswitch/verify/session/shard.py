"""``Shard``: one of several parts of a run, which machines that do not know of each other carry out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from attnswitch.errors import InvalidProblem
from attnswitch.names import shown

__all__ = ["WHOLE", "Shard"]

_T = TypeVar("_T")
#: Parts at the most: beyond, most would have nothing to do.
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count``, from 1 on. Jobs are dealt in turn, and no two parts have one in common."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @staticmethod
    def parse(text: str) -> Shard:
        """The part that "2/8" is. Raises ``InvalidProblem``."""
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= _MOST:
            raise InvalidProblem(f"shard {shown(text)}: expected a part and how many there are, such as 2/8")
        return Shard(int(found[1]), int(found[2]))

    def dealt(self, jobs: Iterator[_T]) -> Iterator[_T]:
        """Those of ``jobs`` that are this part's; each part has to be given the same."""
        return islice(jobs, self.number - 1, None, self.count)

    def has(self, digest: str) -> bool:
        """Whether what has this digest, in hexadecimal digits, is this part's, whatever else there is."""
        return int(digest, 16) % self.count == self.number - 1


#: All there is.
WHOLE = Shard()
