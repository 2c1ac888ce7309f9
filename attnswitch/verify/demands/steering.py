"""Cases drawn within a requirement, so that each of its classes is met: what draws over everything may miss.

The word that a case is drawn for comes in turn; every other feature is on in one case of three. Sizes are as in other
draws: lengths around the edges of tiles, heads and batch few, and the work within that of the space.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from attnswitch.errors import InvalidProblem
from attnswitch.problem import CACHES
from attnswitch.verify.checks import named
from attnswitch.verify.demands.limits import Range
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.demands.words import FORMS
from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
from attnswitch.verify.drawing.data import ALIBI_KINDS, DISTRIBUTIONS, SINK_KINDS
from attnswitch.verify.drawing.placings import PLACINGS, TURNED
from attnswitch.verify.drawing.stored import SCALE_KINDS
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.drawing.trees import TREE_KINDS

__all__ = ["EACH", "cases"]

#: Cases for each word.
EACH = 8
#: Draws for one case, of which most are thrown away where words exclude each other.
_TRIES = 400
#: Work of a case at the most, where the sizes that are demanded leave no smaller one.
_MOST = 2**36
_TILES = (16, 32, 64, 128)
_PLACINGS = tuple(kind for kind in PLACINGS if kind not in TURNED)  # which torch has not
_SCALES = (0.125, 0.3, 1.0, 2.0)
_CACHES = dict(zip(("cache=fp8e4m3", "cache=fp8e5m2", "cache=int8"), CACHES, strict=True))


def cases(requirement: Requirement, space: Space, seed: int, each: int = EACH) -> list[Case]:
    """``each`` cases for every word of ``requirement``, the same for the same seed.

    Raises ``InvalidProblem`` if the words leave no case of one of them.
    """
    found = []
    for number, word in enumerate(requirement.words * each):
        rng = random.Random(f"{seed} {requirement} {number}")
        drawn = (_Draw(requirement, space, rng, word).case() for _ in range(_TRIES))
        case = next((case for case in drawn if case is not None and word in requirement.classes(case)), None)
        if case is None:
            raise InvalidProblem(
                f"require {requirement}: no problem within it is {word}: name what goes with it, or require it apart"
            )
        found.append(case)
    return found


class _Draw:
    """One draw of a case, which may come to nothing."""

    def __init__(self, requirement: Requirement, space: Space, rng: random.Random, word: str) -> None:
        self.wanted, self.space, self.rng = requirement, space, rng
        features = [name for name in requirement.words if name in requirement.features and name not in FORMS]
        self.on = {name for name in features if name == word or rng.randrange(3) == 0} | requirement.always

    def case(self) -> Case | None:
        """A case within the requirement, or None."""
        forms = [f for f in self.wanted.forms if self.rng.randrange(2)] or [self.rng.choice(self.wanted.forms)]
        sizes = self._sizes(paged="page" in forms)
        if sizes is None or ("dense" in forms and len(forms) > 1):
            return None
        found = {**sizes, **self._options()}
        found |= self._hiding(found["seq_k"])
        found |= self._forms(forms, found)
        if "empty" in self.on and found.get("lengths") is None:
            found[self.rng.choice(("batch", "seq_q", "seq_k"))] = 0
        case = Case(**found)
        if not self.wanted.admits(case) or case.work > _MOST or not _judged(case):
            return None
        # The checks of a space are of its device already.
        checks = [name for name in self.space.checks if named(name).suits(case, "cuda")]
        return case.replace(check=self.rng.choice(checks)) if checks and self.rng.randrange(4) else case

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _sizes(self, paged: bool) -> dict[str, int] | None:
        ranges = {name: self.wanted.range(name) for name in ("B", "H", "Hkv", "Lq", "Lk", "D", "Dv", "page")}
        d = self._dim(ranges["D"])
        dv = self._dim(ranges["Dv"]) if any(limit.name == "Dv" for limit in self.wanted.limits) else d
        room = self.space.work // max(d, dv, 32)
        square = any(not limit.number for limit in self.wanted.limits)
        if square:
            ranges["Lq"] = ranges["Lk"] = ranges["Lq"].also(ranges["Lk"])
        least_q = ranges["Lq"].first
        lk = self._length(ranges["Lk"], math.isqrt(room) if square else room // least_q)
        page = self._page(ranges["page"]) if paged else 0
        lk = -(-lk // page) * page if page else lk
        lq = self._length(ranges["Lq"], min(room // max(lk, 1), 8 if paged and self.rng.randrange(4) else room))
        if square:
            lq = lk
        if "dropout" in self.on:
            lk = lq = min(lk, dv) if square else dv
        heads = self._heads(ranges["H"], ranges["Hkv"], max(1, min(room // max(1, lq * lk), self.space.heads)))
        if heads is None:
            return None
        kv, group = heads
        batch = self._few(ranges["B"], max(1, min(room // max(1, lq * lk), self.space.heads) // (kv * group)))
        return {
            "batch": batch,
            "heads_kv": kv,
            "group": group,
            "seq_q": lq,
            "seq_k": lk,
            "dim_qk": d,
            "dim_v": dv,
            "page": page,
        }

    def _dim(self, allowed: Range) -> int:
        """A head dimension: one of those named, an edge, a multiple of 8, or any."""
        if allowed.values:
            return self.rng.choice(allowed.values)
        most = min(allowed.most, max(256, allowed.first))
        picks = [allowed.first, most, self.rng.randint(1, most), 64, 128, *(8 * self.rng.randint(1, 32) for _ in "ab")]
        fitting = [size - size % allowed.step for size in picks]
        return self.rng.choice([size for size in fitting if size in allowed] or [allowed.first])

    def _length(self, allowed: Range, room: int) -> int:
        """A length: one of those named, or up to ``room``, near a multiple of a tile more often than not."""
        if allowed.values:
            return self.rng.choice(allowed.values)
        most = max(allowed.first, min(allowed.most, self.space.longest, room))
        tiled = self.rng.choice(_TILES) * self.rng.randint(1, 8) + self.rng.randint(-1, 1)
        beside = allowed.first + self.rng.randint(0, 70)
        picks = [tiled, tiled, beside, self.rng.randint(1, 40), most]
        fitting = [size - size % allowed.step for size in picks]
        return self.rng.choice([size for size in fitting if size in allowed and size <= most] or [allowed.first])

    def _heads(self, queries: Range, keys: Range, room: int) -> tuple[int, int] | None:
        """Key heads, and query heads to each."""
        shares = bool(self.on & {"gqa", "mqa"})
        if queries.values:
            total = self.rng.choice(queries.values)
            fitting = [kv for kv in range(1, total + 1) if total % kv == 0 and kv in keys and (kv < total) is shares]
        else:
            total = 0
            fitting = [kv for kv in (1, 2, 3, 4, keys.first) if kv in keys]
        if "mqa" in self.on and not ("gqa" in self.on and self.rng.randrange(2)):
            fitting = [kv for kv in fitting if kv == 1]
        if not fitting:
            return None
        kv = self.rng.choice([kv for kv in fitting if kv <= room] or [min(fitting)])
        groups = [group for group in (2, 4, 8) if group <= room] or [2]
        group = total // kv if total else self.rng.choice(groups) if shares else 1
        if not total:
            kv = kv if keys.values else max(1, min(kv, room // group))
        return kv, group

    def _few(self, allowed: Range, room: int) -> int:
        picks = allowed.values or tuple(n for n in (1, 2, 3) if n in allowed and n <= room) or (allowed.first,)
        return self.rng.choice(picks)

    # -- what is beside them -------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        rng, on = self.rng, self.on
        dtype = rng.choice([name for name in self.wanted.any_dtype if name in self.space.dtypes] or ["float32"])
        found: dict[str, Any] = {
            "dtype": dtype,
            "library": "torch" if "torch" in self.space.libraries else self.space.libraries[0],
            "data": rng.choice(DISTRIBUTIONS),
            "data_seed": rng.randrange(256),
            "softcap": rng.choice((30.0, 1.0, 5.0)) if "softcap" in on else 0.0,
            "scale": rng.choice(_SCALES) if "scale" in on else None,
            "lse": "lse" in on,
            "grads": rng.choice(("qkv", "qkv", "q", "kv")) if "grad" in on else "",
            "deterministic": "deterministic" in on,
            "poison": "nonfinite" in on,
        }
        found["grads"] += "m" if "grad=m" in on else ""
        if "sinks" in on:
            found["sinks"] = rng.choice(SINK_KINDS)
        if "alibi" in on:
            found["alibi"] = rng.choice(ALIBI_KINDS)
        if "strided" in on:
            found["placing"] = Placing(*(rng.choice(_PLACINGS) for _ in range(3)))
            found["layout"] = rng.choice(("BHLD", "BLHD"))
        if "seeded" in on:
            found |= {"dropout": rng.choice((0.1, 0.5)), "dropout_seed": rng.randrange(2**64), "poison": False}
        if "dropout" in on:
            found |= {"dropout": 0.5, "dropout_seed": None, "poison": False, "data": "normal", "lse": False}
        return found

    def _hiding(self, keys: int) -> dict[str, Any]:
        rng, on = self.rng, self.on
        found: dict[str, Any] = {"causal": bool(on & {"causal", "causal-br"})}
        corners = [corner for corner, word in (("top_left", "causal"), ("bottom_right", "causal-br")) if word in on]
        if not found["causal"]:
            corners = ["bottom_right" if "bottom-right" in on else "top_left"]
        found["alignment"] = rng.choice(corners)
        if "window" in on:
            sides = (rng.randint(0, 70), rng.choice((0, rng.randint(0, 70), None)))
            found["window"] = (sides[0], 0 if found["causal"] and rng.randrange(2) else sides[1])
        kinds = [kind for kind in ("bool", "float") if f"mask={kind}" in on]
        if kinds:
            found["mask"] = self._mask(rng.choice(kinds))
        return found

    def _mask(self, kind: str) -> MaskRecipe:
        axes = "".join(axis for axis in "bhqk" if self.rng.randrange(4))
        if kind == "bool":
            return MaskRecipe("bool", axes, 4, self.rng.choice(("random", "all", "dead-rows", "blocks")))
        return MaskRecipe("storage", axes, 4, self.rng.choice(("smooth", "random", "dead-rows", "finite-min")))

    def _forms(self, forms: Sequence[str], found: dict[str, Any]) -> dict[str, Any]:
        """Lengths of the sequences, and pages."""
        mask: MaskRecipe | None = found.get("mask")
        added: dict[str, Any] = {}
        if mask is not None and mask.dtype == "storage":
            added["mask"] = MaskRecipe(found["dtype"], mask.axes, mask.rank, mask.kind)
        lq, lk, batch = found["seq_q"], found["seq_k"], range(found["batch"])
        if "page" in forms:
            added |= {"alignment": "bottom_right", "splits": self.rng.choice((1, 3)) if "splits" in self.on else 0}
            if stored := sorted(self.on & _CACHES.keys()):
                added |= {"cache": _CACHES[self.rng.choice(stored)], "scales": self.rng.choice(SCALE_KINDS)}
            if "tree" in self.on:
                added["tree"] = self.rng.choice(TREE_KINDS)
        if "lengths" in self.on or forms != ["dense"]:
            added["lengths"] = tuple(self._of(lk) for _ in batch)
        if "varlen" in forms:
            square = any(not limit.number for limit in self.wanted.limits)
            added["query_lengths"] = added["lengths"] if square else tuple(self._of(lq) for _ in batch)
        return added

    def _page(self, allowed: Range) -> int:
        """The rows of a page."""
        return self.rng.choice(allowed.values or [n for n in (16, 64, 1, 128) if n in allowed] or [allowed.first])

    def _of(self, longest: int) -> int:
        """The length of one sequence, of which the longest may have ``longest``."""
        least = 0 if "empty" in self.on else min(1, longest)
        return self.rng.choice((longest, longest, self.rng.randint(least, max(least, longest)), least))


def _judged(case: Case) -> bool:
    """Whether it makes sense, and the verifier has an answer to it."""
    if case.unseeded and (case.seq_k != case.dim_v or case.varlen or case.sinks or case.alibi or case.scale):
        return False  # V = I has to show the mask of a plain call
    if case.poison and (case.dropout or case.cache):
        return False
    try:
        case.problem()
    except InvalidProblem:  # words that exclude each other, such as a mask of sequences without padding
        return False
    return True
