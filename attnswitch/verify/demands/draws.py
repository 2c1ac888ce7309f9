"""``Draw``: one case within a requirement, of the features that free draws have too.

The word that it is drawn for is on, and every other feature of the requirement in one case of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnswitch.errors import InvalidProblem
from attnswitch.problem import CACHES
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.demands.sizes import sizes
from attnswitch.verify.demands.words import FORMS
from attnswitch.verify.drawing import features
from attnswitch.verify.drawing.case import DENSE_WORK, Case
from attnswitch.verify.drawing.choices import Choices
from attnswitch.verify.drawing.data import ALIBI_KINDS, DISTRIBUTIONS, SINK_KINDS
from attnswitch.verify.drawing.placings import TURNED
from attnswitch.verify.drawing.stored import SCALE_KINDS
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.drawing.trees import TREE_KINDS

__all__ = ["Draw"]

#: Work of a case at the most, where the sizes that are demanded leave no smaller one.
_MOST = 2**36
_CACHES = dict(zip(("cache=fp8e4m3", "cache=fp8e5m2", "cache=int8"), CACHES, strict=True))


class Draw:
    """One draw of a case, which may come to nothing."""

    def __init__(self, requirement: Requirement, space: Space, choices: Choices, word: str) -> None:
        self.wanted, self.space, self.choices = requirement, space, choices
        words = (*requirement.words, *requirement.beside)
        named = [name for name in words if name in requirement.features and name not in FORMS]
        self.on = {name for name in named if name == word or choices.often(3)} | requirement.always

    def case(self) -> Case | None:
        """A case within the requirement, or None."""
        wanted, on = self.wanted, self.on
        forms = [f for f in wanted.forms if self.choices.coin()] or [self.choices.of(wanted.forms)]
        if "dense" in forms and len(forms) > 1:
            return None
        kind = self._kind()
        of_sizes = sizes(wanted, self.space, self.choices, kind["dtype"], on, paged="page" in forms)
        if of_sizes is None:
            return None
        measures, wide = of_sizes
        found = {**measures, **kind, **self._options()}
        found |= self._hiding(found, wide)
        found |= self._lying(found["library"], forms)
        found |= self._lengths(forms, found)
        found |= self._pages(found) if "page" in forms else {}
        found |= self._grads(found)
        if "empty" in on:
            self._emptied(found)
        case = Case(**found)
        if "parts" in on:
            case = features.in_parts(case, self.choices.integer(2, 4))
        return case if wanted.admits(case) and case.work <= _MOST and _judged(case) else None

    # -- what is beside the sizes --------------------------------------------------------------------------------------

    def _kind(self) -> dict[str, str]:
        """Array library and dtype. V = I shows a dropout mask of torch's alone, and NumPy's arrays alone are turned."""
        only = "torch" if "dropout" in self.on else "numpy" if "turned" in self.on else ""
        libraries = [name for name in self.space.libraries if only in ("", name)]
        library = self.choices.of(libraries or self.space.libraries)
        usual = [name for name in self.wanted.any_dtype if name in self.space.dtypes]
        dtypes = [name for name in usual if not (library == "cupy" and name == "bfloat16")]
        if not dtypes and usual:
            library, dtypes = "torch", usual
        return {"library": library, "dtype": self.choices.of(dtypes or ["float32"])}

    def _options(self) -> dict[str, Any]:
        choices, on = self.choices, self.on
        found: dict[str, Any] = {
            "data": choices.of(DISTRIBUTIONS),
            "data_seed": choices.integer(0, 255),
            "softcap": choices.of(features.SOFTCAPS) if "softcap" in on else 0.0,
            "scale": choices.of(features.SCALES) if "scale" in on else None,
            "lse": "lse" in on,
            "deterministic": "deterministic" in on,
            "poison": "nonfinite" in on,
            "sinks": choices.of(SINK_KINDS) if "sinks" in on else "",
            "alibi": choices.of(ALIBI_KINDS) if "alibi" in on else "",
        }
        if "seeded" in on:
            seed = choices.integer(0, 2**64 - 1)
            found |= {"dropout": choices.of(features.DROPPED), "dropout_seed": seed, "poison": False}
        if "dropout" in on:
            found |= {"dropout": choices.of(features.DROPPED), "dropout_seed": None, "poison": False}
            found |= {"data": "normal", "lse": False}
        return found

    def _lying(self, library: str, forms: Sequence[str]) -> dict[str, Any]:
        """How operands lie in memory."""
        choices, strided, turned = self.choices, "strided" in self.on, "turned" in self.on
        every = features.placings(library)
        kinds = [kind for kind in every if kind == "contiguous" or (turned if kind in TURNED else strided)]
        layout = choices.of(("BHLD", "BLHD")) if strided and forms == ["dense"] else "BHLD"
        return {"placing": features.placing(choices, kinds), "layout": layout}

    def _grads(self, found: dict[str, Any]) -> dict[str, str]:
        """Of torch's any of them; ``attention_backward`` gives the three, and the mask's where it is asked."""
        every = "qkv" if "grad" in self.on else ""
        some = every
        if found["library"] == "torch" and every:
            some = features.grads(self.choices, every) or every
        if "grad=m" in self.on:
            some = (some if found["library"] == "torch" else "qkv") + "m"
        return {"grads": some}

    # -- what hides ----------------------------------------------------------------------------------------------------

    def _hiding(self, found: dict[str, Any], wide: int) -> dict[str, Any]:
        choices, on = self.choices, self.on
        causal = bool(on & {"causal", "causal-br"})
        corners = [corner for corner, word in (("top_left", "causal"), ("bottom_right", "causal-br")) if word in on]
        if not causal:
            corners = ["bottom_right" if "bottom-right" in on else "top_left"]
        elif found["seq_q"] == found["seq_k"]:  # if nothing makes one of them another
            corners = ["top_left", "bottom_right"]
        made: dict[str, Any] = {"causal": causal, "alignment": choices.of(corners)}
        if "window" in on:
            made["window"] = features.window(choices, wide)
        kinds = [kind for kind in ("bool", "float") if f"mask={kind}" in on]
        if kinds:
            made["mask"] = features.mask(choices, found["dtype"], choices.of(kinds))
        return made

    def _lengths(self, forms: Sequence[str], found: dict[str, Any]) -> dict[str, Any]:
        """Of each sequence; of queries too, where these are packed."""
        lq, lk, batch = found["seq_q"], found["seq_k"], range(found["batch"])
        made: dict[str, Any] = {}
        if "lengths" in self.on or forms != ["dense"]:
            made["lengths"] = tuple(self._of(lk) for _ in batch)
        if "varlen" in forms:
            made["query_lengths"] = made["lengths"] if self.wanted.square else tuple(self._of(lq) for _ in batch)
        return made

    def _of(self, longest: int) -> int:
        """The length of one sequence, of which the longest may have ``longest``."""
        least = 0 if "empty" in self.on else min(1, longest)
        share = self.choices.of(("whole", *features.SHARES))
        picks = (features.SHARES[share](longest), self.choices.integer(least, max(least, longest)))
        return max(least, self.choices.of((picks[0], *picks)))

    def _emptied(self, found: dict[str, Any]) -> None:
        """Make a size 0; of sequences lengths may be 0 already."""
        if found.get("lengths") is None:
            found[self.choices.of(("batch", "seq_q", "seq_k"))] = 0
        elif self.choices.often(4):
            none = {name: () for name in ("lengths", "query_lengths") if found.get(name) is not None}
            found |= {"batch": 0, **none}
        elif self.choices.often(4):
            queries = found.get("query_lengths")
            found |= {"seq_q": 0, "query_lengths": None if queries is None else (0,) * len(queries)}

    # -- a cache -------------------------------------------------------------------------------------------------------

    def _pages(self, found: dict[str, Any]) -> dict[str, Any]:
        choices, on = self.choices, self.on
        made: dict[str, Any] = {"alignment": "bottom_right", "latent": "latent" in on}
        if "splits" in on:
            made["splits"] = choices.of(features.SPLITS)
        if stored := [_CACHES[word] for word in sorted(on & _CACHES.keys())]:
            fitting = [dtype for dtype in stored if found["library"] != "cupy" or dtype == "int8"]
            made |= {"library": found["library"] if fitting else "torch"}
            made |= {"cache": choices.of(fitting or stored), "scales": choices.of(SCALE_KINDS)}
        if "tree" in on:
            made["tree"] = choices.of(TREE_KINDS)
        return made


def _judged(case: Case) -> bool:
    """Whether it makes sense, and the verifier has an answer to it."""
    if case.unseeded and (
        case.seq_k != case.dim_v or case.varlen or case.sinks or case.alibi or case.scale is not None
    ):
        return False  # V = I has to show the mask of a plain call
    if case.poison and (case.dropout or case.cache):
        return False
    if case.parts and case.work > DENSE_WORK:
        return False
    try:
        case.problem()
    except InvalidProblem:  # words that exclude each other, such as a mask of sequences without padding
        return False
    return True
