"""Where Hypothesis gets its random choices: from a counter, so that case n of a seed is the same everywhere.

Hypothesis' own generator also mutates earlier examples and mixes in constants that it finds in the source files of the
project under test, both of which differ between a clone and an installed package, and between versions. Shrinking is
Hypothesis' own. This uses its interface for alternative backends (``hypothesis.internal.conjecture.providers``).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

from attnswitch import files

__all__ = ["NAME", "CounterProvider", "position", "start", "storage"]

NAME = "attnswitch"
_STORAGE = "HYPOTHESIS_STORAGE_DIRECTORY"


class _Counter:
    """The seed of a run and the number of the next case; one run at a time draws from it."""

    seed = 0
    number = 0


def start(seed: int, number: int) -> None:
    """Let the next case drawn be ``number`` of ``seed``."""
    _Counter.seed, _Counter.number = seed, number


def position() -> int:
    """Number of the case that will be drawn next."""
    return _Counter.number


def storage() -> dict[str, str]:
    """The variable by which Hypothesis keeps what it reads off sources in the cache folder, not in the current one."""
    named = os.environ.get(_STORAGE)
    return {_STORAGE: named or str(files.cache_folder() / "hypothesis")}


class CounterProvider(PrimitiveProvider):
    """Draws of one case from Mersenne Twister seeded with (seed, number), whose output Python guarantees."""

    lifetime = "test_function"

    @contextlib.contextmanager
    def per_test_case_context_manager(self) -> Iterator[None]:
        """Seed for one more case."""
        self._random = random.Random(f"{_Counter.seed}:{_Counter.number}")
        _Counter.number += 1
        yield

    def draw_boolean(self, p: float = 0.5) -> bool:
        """True with probability ``p``."""
        return self._random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """Uniform within the bounds; the strategies bound every integer."""
        assert min_value is not None
        assert max_value is not None
        span = max_value - min_value + 1
        return min_value + int(self._random.random() * span if span < 2**50 else self._random.getrandbits(128) % span)

    def draw_float(self, **_: Any) -> float:
        """Not drawn by any strategy here."""
        raise NotImplementedError

    def draw_string(self, *_: Any, **__: Any) -> str:
        """Not drawn by any strategy here."""
        raise NotImplementedError

    def draw_bytes(self, *_: Any, **__: Any) -> bytes:
        """Not drawn by any strategy here."""
        raise NotImplementedError


AVAILABLE_PROVIDERS[NAME] = "attnswitch.verify.drawing.provider.CounterProvider"
