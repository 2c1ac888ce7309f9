"""``Choices``: where the choices that make a case come from: Hypothesis, which shrinks them, or a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

__all__ = ["Choices", "OfHypothesis", "Seeded"]

_T = TypeVar("_T")


class Choices(Protocol):
    """One choice after another; the first option, and the least number, is the plainest."""

    def of(self, options: Sequence[_T]) -> _T:
        """One of several."""

    def integer(self, least: int, most: int) -> int:
        """A number, both ends included."""

    def coin(self) -> bool:
        """True half of the time."""

    def often(self, one_in: int) -> bool:
        """True once in so many times."""


class OfHypothesis:
    """``draw`` is what a composite strategy is given."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def of(self, options: Sequence[_T]) -> _T:
        """See ``Choices``."""
        return self._draw(st.sampled_from(options))  # type: ignore[no-any-return]

    def integer(self, least: int, most: int) -> int:
        """See ``Choices``."""
        return int(self._draw(st.integers(least, most)))

    def coin(self) -> bool:
        """See ``Choices``."""
        return bool(self._draw(st.booleans()))

    def often(self, one_in: int) -> bool:
        """See ``Choices``; it shrinks to False."""
        return self.integer(0, one_in - 1) == one_in - 1


class Seeded:
    """Always the same ones for the same seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def of(self, options: Sequence[_T]) -> _T:
        """See ``Choices``."""
        return self._random.choice(options)

    def integer(self, least: int, most: int) -> int:
        """See ``Choices``."""
        return self._random.randint(least, most)

    def coin(self) -> bool:
        """See ``Choices``."""
        return self._random.random() < 0.5

    def often(self, one_in: int) -> bool:
        """See ``Choices``."""
        return self._random.randrange(one_in) == 0
