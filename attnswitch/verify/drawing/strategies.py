"""What Hypothesis draws: whole cases over all that the contract allows, plainest choice first so that they shrink.

Lengths are drawn as tile * multiple + delta, so that a fault at "one past a tile" shrinks to the smallest such length;
head dimensions by class, see ``dims``.
Every case makes the same number of choices, used or not, so that shrinking one does not change what the others mean.
Operations are bounded by construction: no draw is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from attnswitch.machine.backend import Regime
from attnswitch.verify.drawing import dims, features, within
from attnswitch.verify.drawing.case import Case, Placing
from attnswitch.verify.drawing.choices import Choices, OfHypothesis
from attnswitch.verify.drawing.data import ALIBI_KINDS, DISTRIBUTIONS, SINK_KINDS
from attnswitch.verify.drawing.placings import ALIGNED
from attnswitch.verify.drawing.plain import without
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


def _length(choices: Choices, longest: int) -> int:
    """A sequence length up to ``longest``, close to a multiple of a tile more often than not."""
    tiled, delta = choices.coin(), choices.integer(-1, 1)
    tile, multiple = choices.of(_TILES), choices.integer(1, 8)
    small = choices.integer(1, 40)
    length = tile * multiple + delta if tiled else small
    return int(max(0, min(length, max(1, longest))))


def _sizes(choices: Choices, space: Space) -> dict[str, int]:
    d, dv = dims.drawn(choices)
    room = space.work // max(d, dv, 32)  # the reference holds the scores several times over
    lk, few, is_few = _length(choices, min(space.longest, room)), choices.integer(0, 3), choices.often(25)
    lk = few if is_few else lk
    lq = _length(choices, min(space.longest, max(1, room // max(lk, 1))))
    square, is_one, one = choices.often(5), choices.often(6), choices.integer(0, 1)
    lq = lk if square and lk * lk <= room else one if is_one else lq
    room = min(room // max(1, lq * lk), space.heads)
    kv = min(choices.of((1, 2, 3, 4)), max(1, room))
    group = min(choices.of((1, 2, 3, 4, 8)), max(1, room // kv))
    batch = min(choices.of((1, 2, 3)), max(1, room // (kv * group)))
    if choices.often(60):
        batch = 0
    return {"batch": batch, "heads_kv": kv, "group": group, "seq_q": lq, "seq_k": lk, "dim_qk": d, "dim_v": dv}


def _regime(choices: Choices, space: Space, dtypes: list[str]) -> tuple[Regime, str, dict[str, int]] | None:
    """One of the regimes in so many draws, with a dtype and sizes within it; nothing is drawn where there are none."""
    found = []
    for regime in space.regimes:
        fitting = [dtype for dtype in regime.dtypes if dtype in dtypes]
        if fitting:
            sizes = within.sizes(choices, regime, space.scores, space.large, space.longest, space.heads)
            found += [(regime, choices.of(fitting), sizes)] * regime.often
    if not found:
        return None
    chosen, wanted = choices.of(found), choices.often(SHARE)
    return chosen if wanted else None


def _hiding(choices: Choices, sizes: dict[str, int], dtype: str, wide: int = 1) -> dict[str, Any]:
    """Causal, window, lengths and mask, alone and together; ``wide`` is of windows."""
    lk = sizes["seq_k"]
    causal, has_window, bottom_right = choices.coin(), choices.often(4), choices.coin()
    window = features.window(choices, wide)
    has_lengths, lengths = choices.often(4), [(choices.coin(), choices.integer(0, 2**12)) for _ in range(3)]
    has_mask, mask = choices.often(3), features.mask(choices, dtype)
    found: dict[str, Any] = {"causal": causal}
    if has_window:
        found["window"] = window
    if (causal or has_window) and bottom_right:
        found["alignment"] = "bottom_right"
    if has_lengths:
        cut = [min(n, lk) if small else max(0, lk - n % 64) for small, n in lengths]
        found["lengths"] = tuple(cut[b % len(cut)] for b in range(sizes["batch"]))
    if has_mask:
        found["mask"] = mask
    return found


@st.composite
def cases(draw: Any, space: Space = Space()) -> Case:
    """A case from ``space``."""
    return _case(OfHypothesis(draw), space)


def _case(choices: Choices, space: Space) -> Case:
    library = choices.of(space.libraries)
    dtypes = [dtype for dtype in space.dtypes if not (library == "cupy" and dtype == "bfloat16")]
    dtype = choices.of(dtypes)
    sizes = _sizes(choices, space)
    large = _regime(choices, space, dtypes)
    if large is not None:
        _, dtype, sizes = large
    hiding = _hiding(choices, sizes, dtype, 1 if large is None else max(1, sizes["seq_k"] // 140))
    kinds = ALIGNED if large is not None and large[0].aligned else features.placings(library)
    placing = features.placing(choices, kinds)
    found = {
        **sizes,
        **hiding,
        "library": library,
        "dtype": dtype,
        "placing": placing,
        "layout": choices.of(("BHLD", "BLHD")),
        "data": choices.of(DISTRIBUTIONS),
        "data_seed": choices.integer(0, 255),
        "scale": choices.of((*(None,) * 19, *features.SCALES)),
        "softcap": choices.of((*(0.0,) * 15, *features.SOFTCAPS)),
        "lse": choices.often(3),
        "grads": features.grads(choices, _letters(hiding), rather=large is not None),
    }
    if large is not None and large[0].aligned:
        features.fitted(found)
    if library != "torch" and found["grads"]:  # attention_backward gives the three, and the mask's where asked
        found["grads"] = "qkvm" if "m" in found["grads"] else "qkv"
    check, checked, deterministic = choices.integer(0, 2**20), choices.coin(), choices.often(6)
    if checked and space.checks:
        found["check"] = space.checks[check % len(space.checks)]
    found["deterministic"] = deterministic
    drops, dropout, poison = choices.often(8), _dropout(choices, found), choices.often(12)
    if drops:
        found |= dropout
    elif poison:
        found["poison"] = True
    varlen, alike, queries, keys = choices.often(8), choices.coin(), features.shares(choices), features.shares(choices)
    dense = large is not None and large[0].aligned  # whose kernels read tiles of a batch by TMA
    unseeded = found.get("dropout_seed", 0) is None  # V = I shows a mask of plain calls alone
    if unseeded and "check" in found and "fresh-dropout" in space.checks:  # of which nothing else says anything
        found["check"] = "fresh-dropout"
    if varlen and not dense and not unseeded:
        found |= _varlen(found, alike and large is None, queries, keys)
    paged, pages, few = choices.often(8), _pages(choices), choices.integer(1, 8)
    if paged and not (varlen or large is not None):  # which asks for queries
        found |= _paged(space, found, few if alike else found["seq_q"], queries, keys, **pages)
        if found["splits"] and "check" in found and "splits" in space.checks:  # which says nothing of other cases
            found["check"] = "splits"
    sinks, beside_pages = choices.often(10), choices.often(4)
    of_heads = {
        "sinks": (sinks or (beside_pages and "page" in found), choices.of(SINK_KINDS)),
        "alibi": (choices.often(12), choices.of(ALIBI_KINDS)),
    }
    bottom_right = choices.coin()
    if not (unseeded or dense):
        found |= {name: kind for name, (wanted, kind) in of_heads.items() if wanted}
    if "alibi" in found and bottom_right:  # of which alibi makes something even where nothing is hidden
        found["alignment"] = "bottom_right"
    narrow, cache = choices.often(3), features.cache(choices)
    if narrow and "page" in found and not (library == "cupy" and cache["cache"] != "int8"):
        found |= {**cache, "poison": False}
    speculative, tree = choices.often(4), choices.of(TREE_KINDS)
    if speculative and "page" in found:
        found["tree"] = tree
    latent, apart, parts = choices.often(4), choices.often(10), choices.integer(2, 4)
    if latent and "page" in found and found["dim_v"] <= found["dim_qk"]:
        found["latent"] = True
    case = Case(**found)
    return without(features.in_parts(case, parts) if apart and large is None else case, space.lacks)


def _letters(hiding: dict[str, Any]) -> str:
    """The operands that can have a gradient."""
    mask = hiding.get("mask")
    return "qkv" + ("m" if mask is not None and mask.dtype != "bool" else "")


def _varlen(found: dict[str, Any], alike: bool, queries: list[str], keys: list[str]) -> dict[str, Any]:
    """The same as sequences without padding, some shorter; ``alike``: each has as many queries as keys."""
    lq, lk = found["seq_q"], found["seq_k"]
    if alike:
        lq, queries = min(lq, lk), keys
        lk = lq
    return {
        "seq_q": lq,
        "seq_k": lk,
        "query_lengths": tuple(features.SHARES[queries[b % 3]](lq) for b in range(found["batch"])),
        "lengths": tuple(features.SHARES[keys[b % 3]](lk) for b in range(found["batch"])),
        "mask": None,
        "grads": found["grads"].replace("m", ""),
        "layout": "BHLD",
    }


def _pages(choices: Choices) -> dict[str, Any]:
    """Rows of a page, columns of the table that none needs, whether queries are packed, and num_splits."""
    return {
        "page": choices.of((1, 2, 16, 64, 256)),
        "wider": choices.integer(0, 2),
        "packed": choices.coin(),
        "splits": choices.of((0, 0, *features.SPLITS)),
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
        "query_lengths": tuple(features.SHARES[queries[b % 3]](lq) for b in batch) if packed else None,
        "lengths": tuple(features.SHARES[keys[b % 3]](lk) for b in batch),
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


def _dropout(choices: Choices, found: dict[str, Any]) -> dict[str, Any]:
    """Dropout by seed anywhere; without one only where V = I can show the mask: torch, Dv = Lk, finite scores."""
    p, own, dropout_seed = choices.of(features.DROPPED), choices.coin(), choices.integer(0, 2**64 - 1)
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
