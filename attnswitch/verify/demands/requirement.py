"""``Requirement``: problems that a backend has to take, as words and bounds, such as ``causal,gqa,D<=128,dtype=bf16``.

A requirement demands every problem that has no feature but those it names, alone and together, and whose
sizes and dtype are within what it names. What it does not name is usual: float16, bfloat16 or float32; a dense call;
D of 64 or 128, and Dv the same, or of latent heads 576 and 512; any batch, heads and lengths. Each of its words is a
demanded class: the problems within the requirement that are what the word says. ``causal!`` says that all of them are
causal, and ``causal?`` that some may be: those have to be taken as well, and are no class of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from attnswitch.errors import InvalidProblem
from attnswitch.names import meant, shown
from attnswitch.problem import DTYPES
from attnswitch.verify.demands.limits import SIZES, Limit, Range, range_of
from attnswitch.verify.demands.words import ALIASES, FEATURES, FORMS, covered, forms
from attnswitch.verify.drawing.case import Case

__all__ = ["Requirement"]

_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_USUAL_DTYPES = ("float16", "bfloat16", "float32")
_USUAL_DIMS = {"D": (64, 128)}
_LATENT_DIMS = {"D": (576,), "Dv": (512,)}
#: Words of a requirement, at the most.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Requirement:
    """``words`` are features, forms, dtypes and limits as they were named; the rest is read from them.

    All of its problems have the features ``always``. ``beside`` are words that are no classes.
    """

    words: tuple[str, ...]
    features: frozenset[str]
    always: frozenset[str]
    dtypes: tuple[str, ...]
    limits: tuple[Limit, ...]
    beside: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Requirement:
        """Read a requirement. Raises ``InvalidProblem`` for a word that is unknown, or none at all."""
        named = [word.strip() for word in text.split(",") if word.strip()]
        if not 0 < len(named) <= _MOST:
            raise InvalidProblem(f"{shown(text)}: expected 1 to {_MOST} words such as causal, gqa, D<=128, dtype=bf16")
        words, beside, dtypes = list[str](), list[str](), list[str]()
        features, always, limits = set[str](), set[str](), list[Limit]()
        for said in named:
            word = said.removesuffix("?")
            bare = word.removesuffix("!")
            if bare != word and ALIASES.get(bare, bare) in FEATURES:
                always.add(ALIASES.get(bare, bare))
                word = bare
            elif bare != word and (bare in FORMS or bare.startswith("dtype=") or Limit.is_meant(bare)):
                raise InvalidProblem(f"{shown(said)}: only features take a !, as all problems have the rest already")
            word = ALIASES.get(word, word)
            name, _, value = word.partition("=")
            if word in FEATURES or word in FORMS:
                features.add(word)
            elif name == "dtype":
                dtypes.append(_dtype(value))
            elif name == "mask" and not value:
                raise InvalidProblem("'mask' is of two kinds: expected mask=bool or mask=float, or both")
            elif Limit.is_meant(word):
                limits.append(Limit.parse(word))
            else:
                known = (*FEATURES, *FORMS)
                raise InvalidProblem(
                    f"{shown(word)} is not understood: expected {', '.join(known)}, dtype=bf16 (fp16, fp32, fp64), or a"
                    f" bound of {', '.join(SIZES)} such as D<=128, D=64, D%8, Lq=Lk{meant(word, (*known, *ALIASES))}"
                )
            if word != said and Limit.is_meant(word):
                raise InvalidProblem(f"{shown(said)}: a bound is of all problems, so it takes no question mark")
            (beside if said.endswith("?") else words).append(f"dtype={value}" if name == "dtype" else word)
        if not words:
            raise InvalidProblem(f"{shown(text)}: expected a word without a question mark, of which cases are drawn")
        if _paged(features, limits):
            features.add("page")
        return Requirement(
            tuple(dict.fromkeys(words)),
            frozenset(features),
            frozenset(always),
            tuple(dict.fromkeys(dtypes)),
            tuple(limits),
            tuple(dict.fromkeys(word for word in beside if word not in words)),
        )

    def __str__(self) -> str:
        classes = (f"{word}!" if word in self.always else word for word in self.words)
        return ",".join([*classes, *(f"{word}?" for word in self.beside)])

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of the call that it demands: dense calls too where all that are named may be, and need not."""
        named = tuple(form for form in FORMS if form in self.features)
        paged = _paged(self.features, self.limits)
        need = [form for form in named if form not in self.beside or (form == "page" and paged)]
        return named if need or "dense" in named else ("dense", *named)

    @property
    def any_dtype(self) -> tuple[str, ...]:
        """The dtypes that it demands."""
        return self.dtypes or _USUAL_DTYPES

    def range(self, name: str) -> Range:
        """Sizes called ``name`` that it demands."""
        return range_of(name, self.limits, (_LATENT_DIMS if self._latent else _USUAL_DIMS).get(name, ()))

    @property
    def _latent(self) -> bool:
        """Whether head dimensions are those of latent heads, for want of others that are named."""
        return "latent" in self.features and not any(limit.name in _LATENT_DIMS for limit in self.limits)

    @property
    def one_dim(self) -> bool:
        """Whether Dv is D."""
        return not (self._latent or any(limit.name == "Dv" for limit in self.limits))

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys."""
        return any(not limit.number for limit in self.limits)

    def admits(self, case: Case) -> bool:
        """Whether ``case`` is a problem that has to be taken."""
        if case.dtype not in self.any_dtype or not covered(case, self.features | {*self.forms}):
            return False
        if not all(FEATURES[word](case) for word in self.always):
            return False
        if self.one_dim and case.dim_v != case.dim_qk:
            return False
        alike = all(limit.holds(case) for limit in self.limits if not limit.number)
        sizes = {name: getattr(case, field) for name, field in SIZES.items()}  # 0 is what words are there for
        return alike and all(size in self.range(name) for name, size in sizes.items() if size)

    def classes(self, case: Case) -> list[str]:
        """Those of its words that say something of ``case``, which it admits."""
        return [word for word in self.words if self._says(word, case)]

    def _says(self, word: str, case: Case) -> bool:
        if word in FORMS:
            return word in forms(case)
        if word in FEATURES:
            return FEATURES[word](case)
        if word.startswith("dtype="):
            return case.dtype == _dtype(word.removeprefix("dtype="))
        limit = Limit.parse(word)
        return (limit.name != "page" or case.page > 0) and limit.holds(case)


def _dtype(name: str) -> str:
    long = _SHORT.get(name, name)
    if long not in DTYPES:
        raise InvalidProblem(f"dtype={shown(name)}: expected {', '.join(_SHORT)}{meant(name, _SHORT)}")
    return long


def _paged(features: Collection[str], limits: Iterable[Limit]) -> bool:
    """Whether all problems are of pages, by what is named beside them."""
    return "latent" in features or any(limit.name == "page" for limit in limits)
