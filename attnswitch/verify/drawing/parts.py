"""Where the parts of the keys of a case begin and end."""

from __future__ import annotations

import itertools

import numpy as np

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.generator import hashed

__all__ = ["ranges"]

_STREAM = 24


def ranges(case: Case) -> list[slice]:
    """The keys of each part, one part after another; some may have none."""
    words = hashed(np, case.data_seed, _STREAM, max(case.parts - 1, 0)) & (2**62 - 1)
    edges = [0, *sorted(int(word) % (case.seq_k + 1) for word in words), case.seq_k]
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]
