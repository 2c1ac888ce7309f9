"""A dropout seed where the caller gives none."""

from __future__ import annotations

import sys
import threading
from typing import Any

from attnswitch.arrays import Array

__all__ = ["drawn_seed"]

#: By how much a CUDA generator's offset moves for a seed, which is four of its numbers; it takes no smaller step.
_STEP = 4
_WORD = 2**64 - 1
_ONE_AT_A_TIME = threading.Lock()


def drawn_seed(beside: Array) -> int:
    """One for a call on ``beside``, an array of NumPy, CuPy or torch, for backends whose mask is a function of a seed.

    For a tensor on a GPU the generator of that GPU draws it, as for torch's own dropout: programs may seed the GPUs of
    their ranks apart. For other arrays it is the CPU's, or NumPy's where torch is not loaded. A captured CUDA graph
    replays the seed that it was captured with, and the CPU's generator draws that.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        numpy: Any = sys.modules["numpy"]
        return int(numpy.random.randint(2**63 - 1))
    if isinstance(beside, torch.Tensor) and beside.is_cuda and not torch.cuda.is_current_stream_capturing():
        return _next(torch.cuda.default_generators[beside.device.index])
    return int(torch.randint(2**63 - 1, (), device="cpu").item())


def _next(generator: Any) -> int:
    """What a CUDA generator's seed and offset say, and its offset moved. No GPU is waited for."""
    with _ONE_AT_A_TIME:  # two threads are not to have one offset
        offset = generator.get_offset()
        generator.set_offset(offset + _STEP)
    return _mixed(_mixed(generator.initial_seed() & _WORD) + offset & _WORD) >> 1


def _mixed(word: int) -> int:
    """Splitmix64's finalizer (Steele, Lea, Flood 2014), one to one: seeds and offsets side by side go far apart."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
