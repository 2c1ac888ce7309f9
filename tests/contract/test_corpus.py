"""The saved cases of ``fixtures/corpus``: each is right or refused today, and each refusal is still called for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

from attnswitch import InvalidProblem
from attnswitch.machine import registry
from attnswitch.verify import AUTO, Failure, Outcome, Saved, check, default_folder, emulation, load
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.launch.unguarded import unguarded
from attnswitch.verify.session import apart

FOLDER = Path(__file__).parents[2] / "fixtures" / "corpus"
FILES = sorted(FOLDER.glob("*.json"))
TORCH = metadata.version("torch").split("+")[0]


def named(paths: Sequence[Path]) -> list[object]:
    return [pytest.param(load(path), id=path.stem) for path in paths]


def on_cpu(path: Path) -> bool:
    return load(path).device == "cpu"


ON_CPU = named([path for path in FILES if on_cpu(path)])
#: Without those of the dispatcher's own choice, which refuses nothing itself.
OF_BACKENDS = named([path for path in FILES if on_cpu(path) and load(path).backend != AUTO])


def guarded(saved: Saved) -> Outcome:
    return tried(saved, guard=True)


def tried(saved: Saved, guard: bool) -> Outcome:
    """The case on its backend; in a process of its own where that is emulated."""
    if emulation.variables((saved.backend,), saved.device):
        return apart.check(saved.case, saved.backend, saved.device, unguarded=not guard)
    with contextlib.nullcontext() if guard else unguarded(saved.backend):
        return check(saved.case, saved.backend, saved.device)


def recorded(saved: Saved) -> str:
    """The torch that the fault was seen with."""
    version: str = json.loads(saved.path.read_text())["environment"]["torch"]
    return version.split("+")[0]


def broken(saved: Saved) -> str:
    """The result that the fault was seen in."""
    result: str = json.loads(saved.path.read_text())["failure"]["result"]
    return result


#: The package that a backend is made with, and its least version if that is not any.
NEEDS = {"cuda": ("cupy",), "triton": ("triton", "3.6")}


def test_there_are_saved_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNSWITCH_CORPUS", raising=False)
    monkeypatch.chdir(FOLDER.parents[1])
    assert ON_CPU
    assert default_folder().resolve() == FOLDER.resolve()
    assert {path.suffix for path in FOLDER.rglob("*") if path.is_file()} == {".json"}


@pytest.mark.parametrize("saved", named(FILES))
def test_a_file_says_what_it_is_about(saved: Saved) -> None:
    record = json.loads(saved.path.read_text())
    assert saved.backend in (AUTO, *registry.names())
    assert saved.case.to_json() == record["case"]  # every field is written out, and none is lost
    assert record["problem"] == str(saved.case.problem())
    assert record["failure"]["check"] == saved.check
    assert saved.check in ("crash", "hang", "lost", *(check.name for check in CHECKS))
    assert record["failure"].keys() == asdict(Failure("", "")).keys()
    assert record["environment"]["torch"]
    assert saved.note, "a file that is kept says what the fault is"


@pytest.mark.parametrize("saved", ON_CPU)
def test_a_saved_case_is_right_or_refused(saved: Saved) -> None:
    outcome = guarded(saved)
    if saved.backend in NEEDS and outcome.verdict == "unavailable":
        pytest.importorskip(*NEEDS[saved.backend])
        if "the interpreter of" in outcome.reasons[0]:  # not kept from working by anything of ours
            pytest.skip(outcome.reasons[0])
    assert outcome.verdict in ("verified", "refused")
    assert outcome.failure is None
    assert (outcome.verdict == "refused") == bool(outcome.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("saved", OF_BACKENDS)
def test_a_refused_fault_is_still_there(saved: Saved) -> None:
    """Otherwise the refusal has outlived its cause, and costs users a kernel that is right."""
    if guarded(saved).verdict == "verified":
        assert tried(saved, guard=False).verdict == "verified"
        return
    outcome = tried(saved, guard=False)
    if outcome.verdict == "verified" and recorded(saved) != TORCH:
        pytest.xfail(f"{saved.path.name} was seen with torch {recorded(saved)}, and is gone in torch {TORCH}")
    assert outcome.verdict == "mismatch"
    assert outcome.failure is not None
    if recorded(saved) == TORCH:
        assert (outcome.failure.check, outcome.failure.result) == (saved.check, broken(saved))
    assert guarded(saved).verdict == "refused"  # the guard is back


@pytest.mark.parametrize("saved", ON_CPU)
def test_the_dispatcher_finds_another_way(saved: Saved) -> None:
    outcome = check(saved.case, AUTO, saved.device)
    assert (outcome.verdict, outcome.failure) == ("verified", None)


def test_unguarded_takes_known_backends_only() -> None:
    with pytest.raises(InvalidProblem, match="backend 'nobody' is not known"), unguarded("nobody"):
        pytest.fail("there is no such backend")
