"""The mutants: each edit fits the tiled backend's source, makes a backend, and is reached as any backend is."""

from __future__ import annotations

import ast
import re
import traceback
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch.errors import VerificationError
from attnswitch.machine import registry
from attnswitch.verify import mutants
from attnswitch.verify.mutants import FAMILIES, Mutant, catalogue

MUTANTS = mutants.mutants()
EVERY = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])


def changed(mutant: Mutant) -> list[str]:
    """Lines that the edit removes or adds."""
    return [line for line in mutant.diff().splitlines()[2:] if line[:1] in ("+", "-")]


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 70


def test_names_are_unique_and_kebab_case() -> None:
    names = [mutant.name for mutant in MUTANTS] + [excluded.name for excluded in mutants.excluded()]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name


def test_every_family_has_a_mutant_and_there_are_no_others() -> None:
    assert {mutant.family for mutant in MUTANTS} == set(FAMILIES)
    assert [mutant.family for mutant in MUTANTS] == sorted((m.family for m in MUTANTS), key=FAMILIES.index)


def test_no_two_edits_are_the_same() -> None:
    assert len({mutant.edited() for mutant in MUTANTS}) == len(MUTANTS)


def test_what_is_excluded_has_an_argument() -> None:
    assert mutants.excluded()
    for excluded in mutants.excluded():
        assert len(excluded.argument.split()) >= 10, excluded.name


@EVERY
def test_the_edit_is_small_and_changes_what_runs(mutant: Mutant) -> None:
    true = catalogue._source()
    assert true.count(mutant.find) == 1
    assert ast.dump(ast.parse(mutant.edited())) != ast.dump(ast.parse(true))
    assert 1 <= len(changed(mutant)) <= 10
    assert mutant.fault.endswith(".")


@EVERY
def test_it_answers_a_plain_call(mutant: Mutant) -> None:
    """Wrongly, or by raising, as the fault may be; but as the backend that it says it is."""
    loaded = registry.loaded(mutant.target)
    assert loaded.name == mutant.name
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 2, 5, 8)).astype(np.float32) for _ in range(3))
    try:
        out = attnswitch.attention(query, key, value, is_causal=True, backend=mutant.target)
    except Exception:
        told = traceback.format_exc()
    else:
        assert out.shape == query.shape
        return
    assert f"<mutant {mutant.name}>" in told


def test_the_dispatcher_names_the_mutant() -> None:
    target = MUTANTS[0].target
    plan = attnswitch.plan("b1.h1.s8.d8.fp32", backend=target)
    assert plan.backend == target


def test_a_backend_is_made_afresh() -> None:
    """What one copy remembers of its calls, another does not."""
    first, second = (mutants.backend("mask-cached-by-shape") for _ in range(2))
    assert first is not second


def test_an_edit_that_no_longer_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_source", lambda: "class TiledBackend: ...\n")
    with pytest.raises(VerificationError, match=r"mutant one-key-tail-dropped no longer fits .* 0 times"):
        mutants.backend("one-key-tail-dropped")


def test_without_the_tiled_backend_there_are_no_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return registry.Missing("it could not be loaded")

    monkeypatch.setattr(registry, "load", missing)
    with pytest.raises(VerificationError, match="it could not be loaded"):
        catalogue._source.__wrapped__()


def test_a_name_that_is_no_mutant() -> None:
    with pytest.raises(KeyError):
        mutants.backend("none-such")
    with pytest.raises(AttributeError, match="no mutant of that name"):
        getattr(mutants, "none-such")
    assert "none-such" in str(registry.load("attnswitch.verify.mutants:none-such"))
