"""Cases that wait for the night: more of a kind of which a landing looks at some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["some"]


def some(cases: Sequence[Any], every: int = 2) -> list[Any]:
    """``cases`` for ``parametrize``: the first, and each ``every``-th after it; ``.ci/nightly`` has the others too."""
    alone = [case if type(case) is tuple else (case,) for case in cases]  # a named tuple is one value
    return [pytest.param(*case, marks=pytest.mark.nightly if n % every else ()) for n, case in enumerate(alone)]
