"""Fixed cases, small to large: head dimensions, lengths at the edges of tiles, and such as no dense reference has.

They come before the drawn ones in every run. The exact probes see there what random data hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from attnswitch.verify.drawing.case import Case, Placing
from attnswitch.verify.drawing.placings import FAR
from attnswitch.verify.drawing.strategies import Space

__all__ = ["extremes", "heads", "long", "probes", "short", "sums"]

#: Checks for the long cases in turn, plain and causal ones; those that hold a kernel against itself, and apply there.
_LAWS = ("split", "decode", "permutation", "shift", "linearity", "repeat")
_CAUSAL_LAWS = {True: ("prefix", "hull", "linearity", "repeat"), False: ("causality", "hull")}


def probes(space: Space, on_gpu: bool) -> Iterator[Case]:
    """Cases for the one-hot probe alone; every dtype of the space in turn."""
    dtypes, plain = cycle(space.dtypes), _one_hot(space)
    yield from _at_edges(plain, dtypes, 8193)
    for length in (2049, 4097, 8193):
        for first in range(0, length, 2049):
            yield plain.replace(seq_q=2049, seq_k=length, dtype=next(dtypes), data_seed=first)
    for length in _long(on_gpu):
        yield plain.replace(group=8, seq_q=8, seq_k=length, dim_qk=40, dim_v=40, dtype=next(dtypes))
        if on_gpu:
            yield plain.replace(seq_q=length, seq_k=length, dim_qk=64, dim_v=64, dtype=next(dtypes), causal=True)


def short(space: Space) -> Iterator[Case]:
    """Probes up to one past a tile of 64 keys, where no more can be run."""
    return _at_edges(_one_hot(space), cycle(space.dtypes), 65)


def _one_hot(space: Space) -> Case:
    return Case(library=_library(space), dim_qk=32, dim_v=32, check="one-hot")  # fused kernels want both alike


def _at_edges(plain: Case, dtypes: Iterator[str], longest: int) -> Iterator[Case]:
    for length in _edges(longest):
        # In four heads, as many rows as keys, so that every key is some row's target.
        if length <= 1025:
            rows, grads = -(-length // 4), "qkv"
            yield plain.replace(heads_kv=2, group=2, seq_q=rows, seq_k=length, dtype=next(dtypes), grads=grads)
        yield plain.replace(group=4, seq_k=length, dtype=next(dtypes), causal=True, alignment="bottom_right")


def long(space: Space, on_gpu: bool) -> Iterator[Case]:
    """Cases beyond a dense reference, each with a law; judged on sampled rows as well."""
    dtypes, laws = cycle(space.dtypes), {False: cycle(_LAWS), True: cycle(_CAUSAL_LAWS[on_gpu])}
    plain = Case(library=_library(space), group=2, dim_qk=64 if on_gpu else 32, dim_v=64 if on_gpu else 32)
    for number, length in enumerate(_long(on_gpu)):
        causal = number % 2 == 1
        for _ in range(2 if on_gpu else 1):
            yield plain.replace(
                seq_q=length if on_gpu else 24,
                seq_k=length,
                dtype=next(dtypes),
                causal=causal,
                alignment="bottom_right" if causal and not on_gpu else "top_left",
                lse=not on_gpu,
                grads="qkv" if on_gpu else "",
                check=next(laws[causal]),
                data_seed=length % 251,
            )


def heads(space: Space) -> Iterator[Case]:
    """A step with gradients at every multiple of 8 up to 256: of few problems, as on a GPU, draws miss some."""
    dtypes, plain = cycle(space.dtypes), Case(library=_library(space), group=2, lse=True, grads="qkv")
    for dim in range(8, 257, 8):
        yield plain.replace(seq_q=17, seq_k=65, dim_qk=dim, dim_v=dim, dtype=next(dtypes), data_seed=dim % 251)


def sums(space: Space) -> Iterator[Case]:
    """Gradients summed over several tiles of queries, made again and again: few draws are long and repeated."""
    plain = Case(library=_library(space), group=2, seq_q=200, dim_qk=32, dim_v=32, grads="qkv", check="repeat")
    for number, dtype in enumerate(space.dtypes):
        yield plain.replace(seq_k=33, dtype=dtype, causal=number % 2 == 1, data_seed=number)


def extremes(space: Space) -> Iterator[Case]:
    """More batch entries than a launch grid has places for, and offsets beyond 31 bits."""
    plain = Case(library=_library(space), dtype="float16" if "float16" in space.dtypes else space.dtypes[0])
    yield plain.replace(batch=65537, seq_k=2, dim_qk=2, dim_v=2)
    yield plain.replace(seq_q=2, seq_k=65, placing=Placing(key=FAR))
    yield plain.replace(seq_q=2, seq_k=65, placing=Placing(value=FAR), grads="qkv")


def _library(space: Space) -> str:
    return "torch" if "torch" in space.libraries else space.libraries[0]


def _edges(longest: int) -> Iterator[int]:
    """Powers of two up to ``longest`` and their neighbours."""
    lengths = {n for power in range(longest.bit_length()) for n in (2**power - 1, 2**power, 2**power + 1)}
    yield from sorted(n for n in lengths if 0 < n <= longest)


def _long(on_gpu: bool) -> Iterator[int]:
    """Lengths beyond a dense reference."""
    yield from (16384, 32769, 65535, 131072)
    if on_gpu:
        yield 131072 - 63
