"""Head dimensions, of query and key and of value, drawn by class: a fault may need one of them and no other.

Kernels see them in whole steps of 16 bytes, padded to a power of two, or in panels. So there are classes for the steps,
for both sides of every such edge, and for all that lies between. Those that take panels are rare: few kernels have any.
"""

from __future__ import annotations

from attnswitch.verify.drawing.choices import Choices

__all__ = ["CLASSES", "WIDEST", "drawn", "one"]

#: The widest head that the contract names; and the widest that kernels keep whole.
WIDEST, _WHOLE = 576, 256
#: Where a kernel takes another tile, another class or one panel more.
_EDGES = (16, 32, 64, 96, 128, 192, _WHOLE, 2, 4, 8, 512, WIDEST)


def _at_edges(least: int, most: int) -> tuple[int, ...]:
    """The edges with one below and one above, as far as they lie from ``least`` to ``most``."""
    found = (edge + delta for edge in _EDGES for delta in (0, -1, 1))
    return tuple(dict.fromkeys(dim for dim in found if least <= dim <= most))


#: Plainest first, and the plainest dimension of each first.
CLASSES: dict[str, tuple[int, ...]] = {
    "usual": (8, 16, 32, 64, 128, 80, 96, 192, _WHOLE),
    "eights": tuple(range(8, _WHOLE + 1, 8)),
    "small": tuple(range(1, 65)),
    "edges": _at_edges(1, _WHOLE),
    "between": tuple(range(65, _WHOLE)),
    "wide edges": _at_edges(_WHOLE + 1, WIDEST),
    "wide": tuple(range(_WHOLE + 8, WIDEST, 8)),
}
#: How often each is drawn, of so many.
_SHARES = {"usual": 24, "eights": 40, "small": 42, "edges": 16, "between": 3, "wide edges": 2, "wide": 1}
_WEIGHTED = tuple(name for name, share in _SHARES.items() for _ in range(share))

#: Of value beside query and key: the same, one drawn apart, one near, or a pair that models have.
_BESIDE = ("alike",) * 14 + ("apart",) * 4 + ("near",) * 3 + ("paired",)
_NEAR = (8, -8, 1, -1)
_PAIRS = ((192, 128), (128, 64), (64, 128), (WIDEST, 512))


def drawn(choices: Choices) -> tuple[int, int]:
    """D and Dv."""
    dim, other = one(choices), one(choices)
    beside, delta, pair = choices.of(_BESIDE), choices.of(_NEAR), choices.of(_PAIRS)
    if beside == "paired":
        return pair
    return dim, {"alike": dim, "apart": other, "near": min(max(1, dim + delta), WIDEST)}[beside]


def one(choices: Choices) -> int:
    """A dimension: a class, and one of it."""
    dims, number = CLASSES[choices.of(_WEIGHTED)], choices.integer(0, 2**12)
    return dims[number % len(dims)]
