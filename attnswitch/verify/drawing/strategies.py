"""What Hypothesis draws: whole cases over all that the contract allows, plainest choice first so that they shrink.

Lengths are drawn as tile * multiple + delta, so that a fault at "one past a tile" shrinks to the smallest such length;
head dimensions by class, see ``dims``.
Every case makes the same number of choices, used or not, so that shrinking one does not change what the others mean.
Operations are bounded by construction: no draw is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from attnswitch.machine.backend import Regime
from attnswitch.problem import CACHES
from attnswitch.verify.drawing import dims, within
from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
from attnswitch.verify.drawing.data import ALIBI_KINDS, DISTRIBUTIONS, SINK_KINDS
from attnswitch.verify.drawing.placings import ALIGNED, PLACINGS, TURNED
from attnswitch.verify.drawing.plain import without
from attnswitch.verify.drawing.stored import SCALE_KINDS
from attnswitch.verify.drawing.trees import TREE_KINDS

__all__ = ["SHARE", "Space", "cases", "recipe"]


@dataclass(frozen=True, slots=True)
class Space:
    """What to draw from: the array libraries and dtypes of a device, and how large a case may be.

    ``work`` bounds batch * heads * Lq * Lk * max(D, Dv, 32), and ``heads`` batch * heads alone. ``checks`` are the
    properties of which each case is given one to be tried on it; half of the cases, and all where there are none, are
    given none beside the usual. One case in ``SHARE`` lies within one of ``regimes``, if there are any: ``large`` takes
    the place of ``work`` there, and a key head with its query heads has at most ``scores``. No case has what ``lacks``
    names (``Backend.lacks``).
    """

    libraries: tuple[str, ...] = ("torch", "numpy")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    work: int = 2**20
    longest: int = 1100
    heads: int = 2**20
    checks: tuple[str, ...] = ()
    regimes: tuple[Regime, ...] = ()
    large: int = 2**27
    scores: int = 2**19
    lacks: tuple[str, ...] = ()


#: Where backends name regimes, one case in so many lies within one of them.
SHARE = 8
_TILES = (16, 32, 64, 128)
#: Elements of a 16-bit type in 16 bytes.
_STEP = 8
_SCALES = (None, 0.125, 1.0, 0.0, -0.25, -1.0, 2.0, 1e-3, 1e-30)


def _choice(draw: Any, options: tuple[Any, ...] | list[Any]) -> Any:
    return draw(st.sampled_from(options))


def _often(draw: Any, one_in: int) -> bool:
    """True once in ``one_in`` draws, and shrinking to False."""
    return bool(draw(st.integers(0, one_in - 1)) == one_in - 1)


def _length(draw: Any, longest: int) -> int:
    """A sequence length up to ``longest``, close to a multiple of a tile more often than not."""
    tiled, delta = draw(st.booleans()), draw(st.integers(-1, 1))
    tile, multiple = _choice(draw, _TILES), draw(st.integers(1, 8))
    small = draw(st.integers(1, 40))
    length = tile * multiple + delta if tiled else small
    return int(max(0, min(length, max(1, longest))))


def _sizes(draw: Any, space: Space) -> dict[str, int]:
    d, dv = dims.drawn(draw)
    room = space.work // max(d, dv, 32)  # the reference holds the scores several times over
    lk, few, is_few = _length(draw, min(space.longest, room)), draw(st.integers(0, 3)), _often(draw, 25)
    lk = few if is_few else lk
    lq = _length(draw, min(space.longest, max(1, room // max(lk, 1))))
    square, is_one, one = _often(draw, 5), _often(draw, 6), draw(st.integers(0, 1))
    lq = lk if square and lk * lk <= room else one if is_one else lq
    room = min(room // max(1, lq * lk), space.heads)
    kv = min(_choice(draw, (1, 2, 3, 4)), max(1, room))
    group = min(_choice(draw, (1, 2, 3, 4, 8)), max(1, room // kv))
    batch = min(_choice(draw, (1, 2, 3)), max(1, room // (kv * group)))
    if _often(draw, 60):
        batch = 0
    return {"batch": batch, "heads_kv": kv, "group": group, "seq_q": lq, "seq_k": lk, "dim_qk": d, "dim_v": dv}


def _regime(draw: Any, space: Space, dtypes: list[str]) -> tuple[Regime, str, dict[str, int]] | None:
    """One of the regimes in so many draws, with a dtype and sizes within it; nothing is drawn where there are none."""
    found = []
    for regime in space.regimes:
        fitting = [dtype for dtype in regime.dtypes if dtype in dtypes]
        if fitting:
            sizes = within.sizes(draw, regime, space.scores, space.large, space.longest, space.heads)
            found += [(regime, _choice(draw, fitting), sizes)] * regime.often
    if not found:
        return None
    chosen, wanted = _choice(draw, found), _often(draw, SHARE)
    return chosen if wanted else None


def _hiding(draw: Any, sizes: dict[str, int], dtype: str, wide: int = 1) -> dict[str, Any]:
    """Causal, window of up to 70 times ``wide`` keys to a side, lengths and mask, alone and together."""
    lk = sizes["seq_k"]
    causal, has_window, bottom_right = draw(st.booleans()), _often(draw, 4), draw(st.booleans())
    sides = [(wide * draw(st.integers(0, 70)), _often(draw, 3)) for _ in ("left", "right")]
    has_lengths, lengths = _often(draw, 4), [(draw(st.booleans()), draw(st.integers(0, 2**12))) for _ in range(3)]
    has_mask, mask = _often(draw, 3), _mask(draw, dtype)
    found: dict[str, Any] = {"causal": causal}
    if has_window:
        found["window"] = tuple(None if unlimited else side for side, unlimited in sides)
    if (causal or has_window) and bottom_right:
        found["alignment"] = "bottom_right"
    if has_lengths:
        cut = [min(n, lk) if small else max(0, lk - n % 64) for small, n in lengths]
        found["lengths"] = tuple(cut[b % len(cut)] for b in range(sizes["batch"]))
    if has_mask:
        found["mask"] = mask
    return found


def _mask(draw: Any, dtype: str) -> MaskRecipe:
    rank, whole = _choice(draw, (4, 2, 3, 1)), [not _often(draw, 4) for _ in "bhqk"]
    as_bool, other = draw(st.booleans()), _often(draw, 3)
    bool_kind = _choice(draw, ("random", "all", "dead-rows", "blocks", "none"))
    float_kind = _choice(draw, ("smooth", "random", "dead-rows", "finite-min", "minus-1e4", "minus-1e9", "none"))
    other_dtype = _choice(draw, ("float32", "float16", "bfloat16", "float64"))
    axes = "".join(axis for axis, on in zip("bhqk", whole, strict=True) if on and axis in "bhqk"[4 - rank :])
    if as_bool:
        return MaskRecipe("bool", axes, rank, bool_kind)
    mask_dtype = other_dtype if other else dtype
    if mask_dtype == "float16" and float_kind == "minus-1e9":
        float_kind = "minus-1e4"
    return MaskRecipe(mask_dtype, axes, rank, float_kind)


def _fitted(found: dict[str, Any], regime: Regime) -> None:
    """Give a float mask in an aligned regime the operands' type and rows of whole steps of 16 bytes."""
    mask: MaskRecipe | None = found.get("mask")
    if regime.aligned and mask is not None and mask.dtype != "bool":
        kind = "minus-1e4" if mask.kind == "minus-1e9" and found["dtype"] == "float16" else mask.kind
        found["mask"] = replace(mask, dtype=found["dtype"], kind=kind)
        if "k" in mask.axes:
            found["seq_k"] = max(_STEP, found["seq_k"] // _STEP * _STEP)
            if found.get("lengths") is not None:
                found["lengths"] = tuple(min(length, found["seq_k"]) for length in found["lengths"])


def _placing(draw: Any, library: str, *, aligned: bool = False) -> Placing:
    kinds = [kind for kind in PLACINGS if library == "numpy" or kind not in TURNED]
    kinds = list(ALIGNED) if aligned else kinds
    plain = [kind for kind in kinds if not kind.startswith("expanded")]
    query, key, value, grad_out = (_choice(draw, kinds) for _ in range(4))
    mask, alike = _choice(draw, plain), draw(st.booleans())
    return Placing(query, query, query, mask, query) if alike else Placing(query, key, value, mask, grad_out)


def _grads(draw: Any, mask: MaskRecipe | None, *, rather: bool = False) -> str:
    """None, all, or any subset of the operands that can have a gradient; ``rather`` some than none."""
    letters = "qkv" + ("m" if mask is not None and mask.dtype != "bool" else "")
    wanted, every, each = draw(st.booleans()), draw(st.booleans()), [draw(st.booleans()) for _ in "qkvm"]
    if not (wanted or (rather and every)):
        return ""
    return letters if every else "".join(x for x, on in zip("qkvm", each, strict=True) if on and x in letters)


@st.composite
def cases(draw: Any, space: Space = Space()) -> Case:
    """A case from ``space``."""
    library = _choice(draw, space.libraries)
    dtypes = [dtype for dtype in space.dtypes if not (library == "cupy" and dtype == "bfloat16")]
    dtype = _choice(draw, dtypes)
    sizes = _sizes(draw, space)
    large = _regime(draw, space, dtypes)
    if large is not None:
        _, dtype, sizes = large
    hiding = _hiding(draw, sizes, dtype, 1 if large is None else max(1, sizes["seq_k"] // 140))
    placing = _placing(draw, library, aligned=large is not None and large[0].aligned)
    found = {
        **sizes,
        **hiding,
        "library": library,
        "dtype": dtype,
        "placing": placing,
        "layout": _choice(draw, ("BHLD", "BLHD")),
        "data": _choice(draw, DISTRIBUTIONS),
        "data_seed": draw(st.integers(0, 255)),
        "scale": _choice(draw, (*(None,) * 18, *_SCALES)),
        "softcap": _choice(draw, (*(0.0,) * 15, 30.0, 1.0, 5.0)),
        "lse": _often(draw, 3),
        "grads": _grads(draw, hiding.get("mask"), rather=large is not None),
    }
    if large is not None:
        _fitted(found, large[0])
    if library != "torch" and found["grads"]:  # attention_backward gives the three, and the mask's where asked
        found["grads"] = "qkvm" if "m" in found["grads"] else "qkv"
    check, checked, deterministic = draw(st.integers(0, 2**20)), draw(st.booleans()), _often(draw, 6)
    if checked and space.checks:
        found["check"] = space.checks[check % len(space.checks)]
    found["deterministic"] = deterministic
    drops, dropout, poison = _often(draw, 8), _dropout(draw, found), _often(draw, 12)
    if drops:
        found |= dropout
    elif poison:
        found["poison"] = True
    varlen, alike, queries, keys = _often(draw, 8), draw(st.booleans()), _shares(draw), _shares(draw)
    dense = large is not None and large[0].aligned  # whose kernels read tiles of a batch by TMA
    unseeded = found.get("dropout_seed", 0) is None  # V = I shows a mask of plain calls alone
    if unseeded and "check" in found and "fresh-dropout" in space.checks:  # of which nothing else says anything
        found["check"] = "fresh-dropout"
    if varlen and not dense and not unseeded:
        found |= _varlen(found, alike and large is None, queries, keys)
    paged, pages, few = _often(draw, 8), _pages(draw), draw(st.integers(1, 8))
    if paged and not (varlen or large is not None):  # which asks for queries
        found |= _paged(space, found, few if alike else found["seq_q"], queries, keys, **pages)
        if found["splits"] and "check" in found and "splits" in space.checks:  # which says nothing of other cases
            found["check"] = "splits"
    sinks, beside_pages = _often(draw, 10), _often(draw, 4)
    of_heads = {
        "sinks": (sinks or (beside_pages and "page" in found), _choice(draw, SINK_KINDS)),
        "alibi": (_often(draw, 12), _choice(draw, ALIBI_KINDS)),
    }
    bottom_right = draw(st.booleans())
    if not (unseeded or dense):
        found |= {name: kind for name, (wanted, kind) in of_heads.items() if wanted}
    if "alibi" in found and bottom_right:  # of which alibi makes something even where nothing is hidden
        found["alignment"] = "bottom_right"
    narrow, cache, scales = _often(draw, 3), _choice(draw, CACHES), _choice(draw, SCALE_KINDS)
    if narrow and "page" in found and not (library == "cupy" and cache != "int8"):
        found |= {"cache": cache, "scales": scales, "poison": False}
    speculative, tree = _often(draw, 4), _choice(draw, TREE_KINDS)
    if speculative and "page" in found:
        found["tree"] = tree
    return without(Case(**found), space.lacks)


#: How many rows a sequence has, of the longest.
_SHARES: dict[str, Callable[[int], int]] = {
    "whole": lambda longest: longest,
    "one": lambda longest: min(longest, 1),
    "less": lambda longest: max(longest - 1, 0),
    "most": lambda longest: longest * 11 // 16,
    "half": lambda longest: longest // 2,
    "none": lambda longest: 0,
}


def _shares(draw: Any) -> list[str]:
    return [_choice(draw, list(_SHARES)) for _ in range(3)]


def _varlen(found: dict[str, Any], alike: bool, queries: list[str], keys: list[str]) -> dict[str, Any]:
    """The same as sequences without padding, some shorter; ``alike``: each has as many queries as keys."""
    lq, lk = found["seq_q"], found["seq_k"]
    if alike:
        lq, queries = min(lq, lk), keys
        lk = lq
    return {
        "seq_q": lq,
        "seq_k": lk,
        "query_lengths": tuple(_SHARES[queries[b % 3]](lq) for b in range(found["batch"])),
        "lengths": tuple(_SHARES[keys[b % 3]](lk) for b in range(found["batch"])),
        "mask": None,
        "grads": found["grads"].replace("m", ""),
        "layout": "BHLD",
    }


def _pages(draw: Any) -> dict[str, Any]:
    """Rows of a page, columns of the table that none needs, whether queries are packed, and num_splits."""
    return {
        "page": _choice(draw, (1, 2, 16, 64, 256)),
        "wider": draw(st.integers(0, 2)),
        "packed": draw(st.booleans()),
        "splits": _choice(draw, (0, 0, 1, 3)),
    }


def _paged(
    space: Space,
    found: dict[str, Any],
    most: int,
    queries: list[str],
    keys: list[str],
    page: int,
    wider: int,
    packed: bool,
    splits: int,
) -> dict[str, Any]:
    """The same of a cache in pages, with at most so many queries, and as few as the space leaves of a wider table.

    Where keys are divided there are some to divide, of two sequences at least (of fewer heads then), and an lse to show
    it where outputs are rounded to few bits.
    """
    lq, lk, count = found["seq_q"], found["seq_k"] + min(64, space.longest // 4) * splits, found["batch"]
    alone = count == 1 and splits > 0
    batch = range(2 if alone else count)
    kv, group = (1, min(found["group"], 2)) if alone else (found["heads_kv"], found["group"])
    each = max(1, len(batch) * kv * group) * max(found["dim_qk"], found["dim_v"], 32)
    scores = max(1, space.work // each)  # of a head
    page = min(page, scores, space.longest)
    width = min(-(-lk // page) + wider, max(1, min(scores, space.longest) // page)) * page
    lk, lq = min(lk, width), min(lq, most, max(1, scores // max(width, 1)))
    return {
        "batch": len(batch),
        "heads_kv": kv,
        "group": group,
        "seq_q": lq,
        "seq_k": width,
        "query_lengths": tuple(_SHARES[queries[b % 3]](lq) for b in batch) if packed else None,
        "lengths": tuple(_SHARES[keys[b % 3]](lk) for b in batch),
        "page": page,
        "splits": splits,
        "lse": found["lse"] or splits > 0,
        "alignment": "bottom_right",
        "mask": None,
        "dropout": 0.0,
        "dropout_seed": None,
        "grads": "",
        "layout": "BHLD",
    }


def _dropout(draw: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Dropout by seed anywhere; without one only where V = I can show the mask: torch, Dv = Lk, finite scores."""
    p, own, dropout_seed = _choice(draw, (0.5, 0.1, 0.25, 0.9)), draw(st.booleans()), draw(st.integers(0, 2**64 - 1))
    if found["library"] != "torch" or not own:
        return {"dropout": p, "dropout_seed": dropout_seed}
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


def recipe(case: Case, number: int, checks: tuple[str, ...]) -> Case:
    """The same problem in the same memory with other numbers, and another check: recipe ``number`` of ``case``."""
    if number == 0 or case.unseeded:
        return case
    word = number * 2654435761 + case.data_seed * 40503
    data = DISTRIBUTIONS[word // 7 % len(DISTRIBUTIONS)]
    check = checks[word // 11 % len(checks)] if checks and number % 2 else "reference"
    return case.replace(data=data, data_seed=word % 256, check=check)
