"""What Hypothesis draws: whole cases over all that the contract allows, plainest choice first so that they shrink.

Lengths are drawn as tile * multiple + delta, so that a fault at "one past a tile" shrinks to the smallest such length.
Operations are bounded by construction: no draw is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from attnswitch.verify.case import Case, MaskRecipe, Placing
from attnswitch.verify.data import DISTRIBUTIONS
from attnswitch.verify.layouts import PLACINGS

__all__ = ["Space", "cases"]


@dataclass(frozen=True, slots=True)
class Space:
    """What to draw from: the array libraries and dtypes of a device, and how large a case may be.

    ``work`` bounds batch * heads * Lq * Lk * max(D, Dv, 32).
    """

    libraries: tuple[str, ...] = ("torch", "numpy")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    work: int = 2**20
    longest: int = 1100


_TILES = (16, 32, 64, 128)
_DIMS = (8, 16, 32, 64, 1, 2, 5, 24, 40, 72, 80, 96, 128, 160, 192, 256)
_SCALES = (None, 0.125, 1.0, 0.0, -0.25, -1.0, 2.0, 1e-3, 1e-30)


def _choice(draw: Any, options: tuple[Any, ...] | list[Any]) -> Any:
    return draw(st.sampled_from(options))


def _often(draw: Any, one_in: int) -> bool:
    """True once in ``one_in`` draws, and shrinking to False."""
    return bool(draw(st.integers(0, one_in - 1)) == one_in - 1)


def _length(draw: Any, longest: int) -> int:
    """A sequence length up to ``longest``, close to a multiple of a tile more often than not."""
    if draw(st.booleans()):
        tile = _choice(draw, [tile for tile in _TILES if tile <= longest] or [1])
        multiple = draw(st.integers(1, max(1, min(longest // tile, 8))))
        delta = draw(st.integers(-1, 1))
        return int(max(0, min(tile * multiple + delta, longest)))
    return int(draw(st.integers(1, max(1, min(longest, 40)))))


def _sizes(draw: Any, space: Space) -> dict[str, int]:
    d = _choice(draw, _DIMS)
    dv = d if not _often(draw, 5) else _choice(draw, _DIMS)
    room = space.work // max(d, dv, 32)  # the reference holds the scores several times over
    lk = draw(st.integers(0, 3)) if _often(draw, 25) else _length(draw, min(space.longest, room))
    if _often(draw, 5):
        lq = lk
    elif _often(draw, 6):
        lq = draw(st.integers(0, 1))
    else:
        lq = _length(draw, min(space.longest, max(1, room // max(lk, 1))))
    room //= max(1, lq * lk)
    kv = _choice(draw, [n for n in (1, 2, 3, 4) if n <= max(1, room)])
    group = _choice(draw, [n for n in (1, 2, 3, 4, 8) if n * kv <= max(1, room)] or [1])
    batch = _choice(draw, [n for n in (1, 2, 3) if n * kv * group <= max(1, room)] or [1])
    if _often(draw, 60):
        batch = 0
    return {"batch": batch, "heads_kv": kv, "group": group, "seq_q": lq, "seq_k": lk, "dim_qk": d, "dim_v": dv}


def _hiding(draw: Any, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    """Causal, window, lengths and mask, alone and together."""
    lk = sizes["seq_k"]
    found: dict[str, Any] = {"causal": draw(st.booleans())}
    if _often(draw, 4):
        found["window"] = tuple(
            None if _often(draw, 3) else draw(st.integers(0, max(1, min(lk, 70)))) for _ in ("left", "right")
        )
    if (found["causal"] or "window" in found) and draw(st.booleans()):
        found["alignment"] = "bottom_right"
    if _often(draw, 4):
        found["lengths"] = tuple(draw(st.one_of(st.just(lk), st.integers(0, lk))) for _ in range(sizes["batch"]))
    if _often(draw, 3):
        found["mask"] = _mask(draw, dtype)
    return found


def _mask(draw: Any, dtype: str) -> MaskRecipe:
    rank = _choice(draw, (4, 2, 3, 1))
    axes = "".join(axis for axis in "bhqk"[4 - rank :] if not _often(draw, 4))
    if draw(st.booleans()):
        return MaskRecipe("bool", axes, rank, _choice(draw, ("random", "all", "dead-rows", "blocks", "none")))
    kinds: tuple[str, ...] = ("smooth", "random", "dead-rows", "finite-min", "minus-1e4", "none")
    other = _often(draw, 3)
    mask_dtype = _choice(draw, ("float32", "float16", "bfloat16", "float64")) if other else dtype
    if mask_dtype != "float16":
        kinds = (*kinds, "minus-1e9")
    return MaskRecipe(mask_dtype, axes, rank, _choice(draw, kinds))


def _placing(draw: Any, library: str) -> Placing:
    kinds = [kind for kind in PLACINGS if library == "numpy" or kind != "backwards"]
    if draw(st.booleans()):
        same = _choice(draw, kinds)
        return Placing(same, same, same, grad_out=same)
    plain = [kind for kind in kinds if not kind.startswith("expanded")]
    query, key, value, grad_out = (_choice(draw, kinds) for _ in range(4))
    return Placing(query, key, value, _choice(draw, plain), grad_out)


def _grads(draw: Any, mask: MaskRecipe | None) -> str:
    """None, all, or any subset of the operands that can have a gradient."""
    letters = "qkv" + ("m" if mask is not None and mask.dtype != "bool" else "")
    if draw(st.booleans()):
        return ""
    if draw(st.booleans()):
        return letters
    return "".join(letter for letter in letters if draw(st.booleans()))


@st.composite
def cases(draw: Any, space: Space = Space()) -> Case:
    """A case from ``space``."""
    library = _choice(draw, space.libraries)
    dtypes = [dtype for dtype in space.dtypes if not (library == "cupy" and dtype == "bfloat16")]
    dtype = _choice(draw, dtypes)
    sizes = _sizes(draw, space)
    hiding = _hiding(draw, sizes, dtype)
    placing = _placing(draw, library)
    found = {
        **sizes,
        **hiding,
        "library": library,
        "dtype": dtype,
        "placing": placing,
        "layout": _choice(draw, ("BHLD", "BLHD")),
        "data": _choice(draw, DISTRIBUTIONS),
        "data_seed": draw(st.integers(0, 255)),
        "scale": _choice(draw, _SCALES) if _often(draw, 3) else None,
        "softcap": _choice(draw, (30.0, 1.0, 5.0)) if _often(draw, 6) else 0.0,
        "lse": _often(draw, 3),
        "grads": _grads(draw, hiding.get("mask")),
    }
    if library != "torch" and found["grads"]:  # attention_backward gives the three, and the mask's where asked
        found["grads"] = "qkvm" if "m" in found["grads"] else "qkv"
    if _often(draw, 8):
        found |= _dropout(draw, found)
    elif _often(draw, 12):
        found["poison"] = True
    return Case(**found)


def _dropout(draw: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Dropout by seed anywhere; without one only where V = I can show the mask: torch, Dv = Lk, finite scores."""
    p = _choice(draw, (0.5, 0.1, 0.25, 0.9))
    if found["library"] != "torch" or draw(st.booleans()):
        return {"dropout": p, "dropout_seed": draw(st.integers(0, 2**64 - 1))}
    length = max(1, min(found["seq_k"], 64))
    lengths = found.get("lengths")
    return {
        "dropout": p,
        "dropout_seed": None,
        "seq_k": length,
        "dim_qk": length,
        "dim_v": length,
        "lengths": None if lengths is None else tuple(min(n, length) for n in lengths),
        "placing": Placing(),
        "data": "normal",
        "scale": None,
        "lse": False,
    }
