"""What hides by position and length alone, kept from call to call on the CPU.

For small calls it takes as long to make as to attend, and the layers of a model make it anew, one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnswitch.machine.backend import Inputs
from attnswitch.problem import Problem

from .base import Compose
from .masks import Hiding

__all__ = ["kept"]

#: Numbers of a mask that is kept, and how many are: 16 MiB of float32 at most.
_LARGEST, _MOST = 2**16, 64


def kept(problem: Problem, compose: Compose) -> Compose:
    """``compose``; where nothing but lengths differs from call to call, done once for the same lengths.

    Nobody writes to what it gives.
    """
    p = problem
    size = (p.batch if p.key_lengths else 1) * p.seq_q * p.seq_k
    if p.mask is not None or size > _LARGEST:
        return compose

    def known(inputs: Inputs, *, lifted: bool = False) -> Hiding:
        lengths = inputs.key_lengths
        return _composed(compose, None if lengths is None else tuple(lengths.tolist()), lifted)

    return known


@functools.lru_cache(maxsize=_MOST)
def _composed(compose: Compose, lengths: tuple[int, ...] | None, lifted: bool) -> Hiding:
    nothing: Any = None
    with torch.inference_mode(mode=False):
        given = None if lengths is None else torch.tensor(lengths, dtype=torch.int64, device="cpu")
        here = torch.empty(0, device="cpu")  # only its device is asked for
        return compose(Inputs(here, nothing, nothing, key_lengths=given), lifted=lifted)
