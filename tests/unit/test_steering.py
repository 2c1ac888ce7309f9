"""Cases that are drawn to meet a demand have all that free draws have within it, and are as many as is wanted."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import pytest

from attnswitch.verify import Case, Space
from attnswitch.verify.checks import DRAWN, named
from attnswitch.verify.demands import steering
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.demands.words import FEATURES
from attnswitch.verify.session.coverage import triggers
from attnswitch.verify.session.explore import draw

SPACE = Space(checks=tuple(check.name for check in DRAWN if not check.gpu), work=2**18)
EVERY = ",".join((*FEATURES, "D<=576", "Dv<=576", "dtype=fp16", "dtype=bf16", "dtype=fp32", "dtype=fp64"))
#: Fields that hold numbers of many sizes, of which triggers tell the kinds.
_SIZES = {
    "seq_q",
    "seq_k",
    "dim_qk",
    "dim_v",
    "lengths",
    "query_lengths",
    "data_seed",
    "dropout_seed",
    "window",
    "page",
}


@functools.cache
def freely() -> list[Case]:
    return draw(SPACE, 1, 2000)


def traits(cases: Iterable[Case]) -> Counter[tuple[str, Any]]:
    """What each field of the cases holds, and the situations that they are."""
    found = Counter[tuple[str, Any]]()
    for case in cases:
        found.update(("trigger", name) for name in triggers(case))
        others = (f.name for f in fields(case) if f.name not in {*_SIZES, "mask", "placing", "check"})
        found.update((name, getattr(case, name)) for name in others)
        found.update(("check", name) for name in [case.check] if named(name).suits(case, "cpu"))
        found.update((f"placing.{role}", kind) for role, kind in asdict(case.placing).items())
        found.update((f"mask.{name}", of) for name, of in (asdict(case.mask) if case.mask else {}).items())
        found["pages of 16 rows or so many", case.page % 16 == 0] += 1
        found["window", case.window and tuple(side is None for side in case.window)] += 1
    return found


#: Words of which no problem of a form is.
_NOT_OF = {
    "dense": ("latent", "tree", "splits", "cache"),
    "varlen": ("latent", "tree", "splits", "cache", "mask", "grad=m", "lengths", "dropout", "parts"),
    "page": ("grad", "mask", "lengths", "dropout", "seeded", "parts", "bottom-right"),
}
_NOT_OF["page,varlen"] = _NOT_OF["page"]


@pytest.mark.parametrize("form", _NOT_OF)
def test_what_free_draws_have_demanded_ones_have_too(form: str) -> None:
    words = [word for word in EVERY.split(",") if not word.startswith(_NOT_OF[form])]
    requirement = Requirement.parse(",".join([form, *words]))
    free = [case for case in freely() if requirement.admits(case)]
    steered = list(islice(steering.cases(requirement, SPACE, 2, each=10**6), 5_000))
    assert len(free) > 100
    missing = traits(free).keys() - traits(steered).keys()
    assert not missing, sorted(missing, key=str)
