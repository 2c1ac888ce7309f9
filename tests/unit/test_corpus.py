"""Saved cases: what is written is read, and a file that is none is a sentence and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch.errors import InvalidProblem
from attnswitch.verify import Case, Failure, Outcome, Report, examine
from attnswitch.verify.drawing.case import MaskRecipe
from attnswitch.verify.session import corpus, journal
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import targets
from attnswitch.verify.session.tally import Tally

Cli = Callable[..., Any]
CASE = Case(seq_q=3, seq_k=4, lengths=(2,), mask=MaskRecipe(rank=2))

PAGED = {"page": 2, "alignment": "bottom_right", "mask": None}


def record(**changes: Any) -> dict[str, Any]:
    """A saved case as plain data."""
    return {"schema": 1, "backend": "reference", "device": "cpu", "case": CASE.to_json(), **changes}


def of(**changes: Any) -> str:
    """The text of a saved case, of which the case has other fields."""
    return json.dumps(record(case={**CASE.to_json(), **changes}))


def without(field: str) -> str:
    return json.dumps({name: value for name, value in record().items() if name != field})


#: Files that are no saved cases, and what is wrong with them.
DAMAGED = {
    "deep": (10**5 * "[", "nested more than 32 deep"),
    "digits": (5000 * "1", "an integer of 5000 digits"),
    "large": (json.dumps(record(note=10**400)), "an integer of 401 digits"),
    "surrogate": (json.dumps(record(note="\ud800")), "half of a surrogate pair"),
    "schema": (json.dumps(record(schema=2)), "it is of schema 2, and this version reads schema 1"),
    **{f"no {name}": (without(name), f"it has no field '{name}'") for name in ("schema", "backend", "device", "case")},
    "backend list": (json.dumps(record(backend=["tiled"])), "backend is ['tiled']: expected text"),
    "backend code": (json.dumps(record(backend='"+x+"')), "expected a name, or a target"),
    "device null": (json.dumps(record(device=None)), "device is None: expected text"),
    "device code": (json.dumps(record(device='cuda"+str(open("/"))+"')), "expected cpu, cuda, or one of many"),
    "device line": (json.dumps(record(device="cpu\n")), "expected cpu, cuda, or one of many"),
    "note": (json.dumps(record(note=[])), "note is []: expected text"),
    "failure": (json.dumps(record(failure={"check": 3})), "failure.check is 3: expected text"),
    "failure list": (json.dumps(record(failure=[3])), "failure is [3]: expected an object"),
    "bool for int": (of(seq_q=True), "case.seq_q is True: expected an integer"),
    "int for bool": (of(causal=1), "case.causal is 1: expected true or false"),
    "list for text": (of(dtype=["float32"]), "case.dtype is ['float32']: expected text"),
    "text for list": (of(lengths="2"), "case.lengths is '2': expected a list"),
    "placing": (of(placing=[]), "case.placing is []: expected an object"),
    "check": (of(check="luck"), "case.check is 'luck': expected one of form"),
    "scale": (of(scale=float("nan")), "scale=nan: expected a finite number"),
    "rank": (of(mask={"axes": "bhqk", "rank": 2}, batch=2, lengths=[1, 1], group=2), "no mask of rank 2 has them all"),
    "rank 0": (of(mask={"axes": "qk", "rank": 0}), "no mask of rank 0"),
    "long": (of(lengths=[5]), "case.lengths has 5: expected lengths from 0 to 4"),
    "negative": (of(lengths=[-1]), "case.lengths has -1: expected lengths from 0 to 4"),
    "queries": (of(query_lengths=[9], mask=None), "case.query_lengths has 9: expected lengths from 0 to 3"),
    "seed": (of(data_seed=-1), "case.data_seed is -1: expected an integer from 0"),
    "cupy": (of(library="cupy"), "CuPy has arrays on GPUs alone"),
    "poison": (
        of(**PAGED, cache="int8", scales="head", poison=True),
        "what is stored in 8 bits has no NaN and no inf to hide",
    ),
    "far": (of(group=2, placing={"query": "far"}), "expected one batch entry and head, without pages"),
    "far pages": (of(**PAGED, placing={"key": "far"}), "expected one batch entry and head, without pages"),
    "scales": (of(**PAGED, cache="int8", scales="row"), "case.scales is 'row': expected one of tensor"),
    "size": (of(batch=2**63, lengths=None), "no array is as long"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_saved_case_is_a_sentence(name: str, tmp_path: Path) -> None:
    text, message = DAMAGED[name]
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(InvalidProblem) as caught:
        corpus.load(path)
    assert str(caught.value).startswith(f"{path} is not a saved case: ")
    assert message in str(caught.value)


def test_what_is_drawn_and_saved_is_read(tmp_path: Path) -> None:
    (target,) = targets(("cpu",), ("tiled",))
    for case in draw(target.space, 0, 300):
        failure = Failure("reference", "wrong", "out", (0,), float("nan"), float("inf"), 0.5)
        saved = corpus.load(corpus.save(Outcome(case, "pack.age:Cls", "cuda:1", "mismatch", failure=failure), tmp_path))
        assert (saved.case, saved.backend, saved.device, saved.check) == (case, "pack.age:Cls", "cuda:1", "reference")


def test_a_worst_case_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    report = Report(0, tallies={("cpu", "tiled", "float32"): Tally(worst=0.5, worst_case=CASE)})
    (path,) = corpus.save_worst(report, tmp_path)
    assert corpus.save_worst(report, tmp_path) == []
    for text in ("{}", "[", json.dumps(record(ratio="much")), json.dumps(record(ratio=float("nan")))):
        path.write_text(text)
        assert corpus.save_worst(report, tmp_path) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"count": 1, "backend": "tiled", "case": {"batch": true}}'])
def test_a_journal_that_was_cut_off_names_no_case(text: str, tmp_path: Path) -> None:
    journal.path(tmp_path).write_text(text)
    assert journal.read(journal.path(tmp_path)) is None


@pytest.mark.parametrize(
    "sizes", [{"batch": 2**62}, {"seq_q": 2**62}, {"seq_q": 2**31, "seq_k": 2**31}, {"dim_v": 2**50}]
)
def test_what_no_memory_holds_is_no_mismatch(sizes: dict[str, int]) -> None:
    for outcome in examine(Case(**sizes), ("sdpa-math", "auto")):  # type: ignore[arg-type]
        assert (outcome.verdict, outcome.starved) == ("refused", True)
        assert "out of memory: its operands need" in outcome.reasons[0]


VERIFY = ("verify", "--backend", "reference", "--device", "cpu", "--examples", "1", "--quick", "--no-isolate")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    told: list[str] = []
    assert list(corpus.read_all(tmp_path, told)) == []
    names = "folder.json", "pipe.json"
    assert told == [f"{tmp_path / name} is not a saved case: it is no file" for name in names]


def test_a_damaged_file_is_passed_over_where_nobody_named_its_folder(
    command: Callable[[str], Cli], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSWITCH_CORPUS", str(tmp_path / "corpus"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "deep.json").write_text(10**5 * "[")
    (tmp_path / "corpus" / "folder.json").mkdir()
    (tmp_path / "corpus" / "whole.json").write_text(json.dumps(record()))
    verify = command(VERIFY[0])
    ran = verify(*VERIFY[1:], "--json", "found.json")
    assert ran.code == 0
    assert "passed over " in ran.out
    assert "deep.json is not a saved case: it is not JSON that can be read: nested more than 32 deep" in ran.out
    document = json.loads((tmp_path / "found.json").read_text())
    assert (document["replayed"], len(document["passed_over"])) == (1, 2)
    named = verify(*VERIFY[1:], "--corpus", "corpus")
    assert (named.code, "deep.json is not a saved case" in named.out) == (2, True)


def test_a_damaged_file_that_was_named_is_an_error(command: Callable[[str], Cli], tmp_path: Path) -> None:
    for name, (text, message) in DAMAGED.items():
        (tmp_path / "damaged.json").write_text(text)
        ran = command("replay")("--no-isolate", "damaged.json")
        assert (ran.code, ran.out.split()[:2], message in ran.out) == (2, ["ERROR", "damaged.json"], True), name
