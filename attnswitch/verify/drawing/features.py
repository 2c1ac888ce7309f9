"""The features of a case, one by one, as they are drawn wherever a case is: freely, or to meet a demand.

Each function makes the same number of choices, whatever comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from attnswitch.problem import CACHES, Window
from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
from attnswitch.verify.drawing.choices import Choices
from attnswitch.verify.drawing.placings import PLACINGS, TURNED
from attnswitch.verify.drawing.stored import SCALE_KINDS

__all__ = [
    "DROPPED",
    "SCALES",
    "SHARES",
    "SOFTCAPS",
    "SPLITS",
    "cache",
    "fitted",
    "grads",
    "in_parts",
    "mask",
    "placing",
    "placings",
    "shares",
    "window",
]

SCALES = (0.125, 1.0, 0.0, -0.25, -1.0, 2.0, 1e-3, 1e-30)
SOFTCAPS = (30.0, 1.0, 5.0)
DROPPED = (0.5, 0.1, 0.25, 0.9)
#: ``num_splits`` where there is one.
SPLITS = (1, 3)
#: How many rows a sequence has, of the longest.
SHARES: dict[str, Callable[[int], int]] = {
    "whole": lambda longest: longest,
    "one": lambda longest: min(longest, 1),
    "less": lambda longest: max(longest - 1, 0),
    "most": lambda longest: longest * 11 // 16,
    "half": lambda longest: longest // 2,
    "none": lambda longest: 0,
}
#: Keys to one side of a window, at most, where keys are few.
_SIDE = 70
#: Elements of a 16-bit type in 16 bytes.
_STEP = 8
#: Masks that move whole rows so far that an lse does not tell a part of the keys from all of them.
_FAR = ("finite-min", "minus-1e9")


def window(choices: Choices, wide: int = 1) -> Window:
    """Up to 70 times ``wide`` keys to a side, or all."""
    sides = [(wide * choices.integer(0, _SIDE), choices.often(3)) for _ in ("left", "right")]
    left, right = (None if unlimited else side for side, unlimited in sides)
    return left, right


def mask(choices: Choices, dtype: str, kind: str = "") -> MaskRecipe:
    """A mask beside operands of ``dtype``; ``kind`` "bool" or "float" if it has to be of that."""
    rank, whole = choices.of((4, 2, 3, 1)), [not choices.often(4) for _ in "bhqk"]
    as_bool, other = choices.coin(), choices.often(3)
    bool_kind = choices.of(("random", "all", "dead-rows", "blocks", "none"))
    float_kind = choices.of(("smooth", "random", "dead-rows", "finite-min", "minus-1e4", "minus-1e9", "none"))
    other_dtype = choices.of(("float32", "float16", "bfloat16", "float64"))
    axes = "".join(axis for axis, on in zip("bhqk", whole, strict=True) if on and axis in "bhqk"[4 - rank :])
    if kind == "bool" or (as_bool and not kind):
        return MaskRecipe("bool", axes, rank, bool_kind)
    mask_dtype = other_dtype if other else dtype
    if mask_dtype == "float16" and float_kind == "minus-1e9":
        float_kind = "minus-1e4"
    return MaskRecipe(mask_dtype, axes, rank, float_kind)


def fitted(found: dict[str, Any]) -> None:
    """Give a float mask the operands' type and rows of whole steps of 16 bytes, as aligned regimes want it."""
    recipe: MaskRecipe | None = found.get("mask")
    if recipe is not None and recipe.dtype != "bool":
        kind = "minus-1e4" if recipe.kind == "minus-1e9" and found["dtype"] == "float16" else recipe.kind
        found["mask"] = replace(recipe, dtype=found["dtype"], kind=kind)
        if "k" in recipe.axes:
            found["seq_k"] = max(_STEP, found["seq_k"] // _STEP * _STEP)
            if found.get("lengths") is not None:
                found["lengths"] = tuple(min(length, found["seq_k"]) for length in found["lengths"])


def placings(library: str) -> list[str]:
    """The ways in which arrays of a library may lie."""
    return [kind for kind in PLACINGS if library == "numpy" or kind not in TURNED]


def placing(choices: Choices, kinds: Sequence[str]) -> Placing:
    """How each operand lies, all alike half of the time."""
    plain = [kind for kind in kinds if not kind.startswith("expanded")]
    query, key, value, grad_out = (choices.of(kinds) for _ in range(4))
    of_mask, alike = choices.of(plain), choices.coin()
    return Placing(query, query, query, of_mask, query) if alike else Placing(query, key, value, of_mask, grad_out)


def grads(choices: Choices, letters: str, *, rather: bool = False) -> str:
    """None, all, or any subset of the ``letters`` of operands; ``rather`` some than none."""
    wanted, every, each = choices.coin(), choices.coin(), [choices.coin() for _ in "qkvm"]
    if not (wanted or (rather and every)):
        return ""
    return letters if every else "".join(x for x, on in zip("qkvm", each, strict=True) if on and x in letters)


def shares(choices: Choices) -> list[str]:
    """Those of three sequences, in turn."""
    return [choices.of(list(SHARES)) for _ in range(3)]


def cache(choices: Choices) -> dict[str, str]:
    """A type of 8 bits, and how its pages are scaled."""
    return {"cache": choices.of(CACHES), "scales": choices.of(SCALE_KINDS)}


def in_parts(case: Case, parts: int) -> Case:
    """``case`` by ``parts`` of its keys, whose results are merged; unchanged where they do not tell the whole's.

    The gradient of a mask is of all keys.
    """
    if not case.mergeable or case.seq_k < 2 or (case.mask is not None and case.mask.kind in _FAR):
        return case
    return case.replace(parts=parts, lse=True, grads=case.grads.replace("m", ""))
