"""Precision that the run demands: levels, files, the stricter of two, and backends that overstate their rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import InvalidProblem
from attnswitch.machine.backend import Precision
from attnswitch.verify import Case, Plan, Space, Target, check, run, terms
from attnswitch.verify.demands.precision import LEVELS, demanded, read, stricter
from attnswitch.verify.terms import Terms
from attnswitch.verify.trial import Subject

Register = Callable[[str, str], None]
ROUGHEST = Precision("float32", "storage", "tf32", "storage", "lse", exp=0.5)
CASE = Case(group=2, seq_q=33, seq_k=65, dim_qk=16, dim_v=16, grads="qkv", lse=True)


# -- the stricter of two -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strict",
    [
        {"accumulator": "float64"},
        {"weights": "accumulator"},
        {"score_inputs": "storage"},
        {"group_sum": "accumulator"},
        {"statistics": "exact"},
        {"exp": 0.25},
    ],
    ids=str,
)
def test_each_field_is_the_stricter_one(strict: dict[str, object]) -> None:
    one = Precision(**{**_fields(ROUGHEST), **strict})  # type: ignore[arg-type]
    assert stricter(one, ROUGHEST) == stricter(ROUGHEST, one) == one != ROUGHEST


def test_fields_are_taken_from_both() -> None:
    mixed = stricter(Precision(weights="storage", exp=0.5), Precision(score_inputs="tf32", exp=0.25))
    assert mixed == Precision(exp=0.25)


def test_no_bound_is_wider_than_either() -> None:
    subject = Subject(CASE.replace(dtype="bfloat16"))
    levels = [ROUGHEST, Precision("float64"), Precision(exp=1e-3), *LEVELS.values()]
    limits = {level: subject.exact.limits(level) for level in levels}
    for one, other in itertools.combinations(dict.fromkeys(levels), 2):
        both = subject.exact.limits(stricter(one, other))
        for name, bound in both.items():
            assert (bound <= limits[one][name]).all(), (name, one, other)
            assert (bound <= limits[other][name]).all(), (name, one, other)


def test_a_stricter_declaration_holds() -> None:
    declared = Precision("float64")
    assert demanded(declared, LEVELS["bf16"], "bfloat16") == declared
    assert demanded(ROUGHEST, None, "float32") == ROUGHEST


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_float64_is_summed_in_float64(level: Precision) -> None:
    held = demanded(ROUGHEST, level, "float64")
    assert (held.accumulator, held.score_inputs, held.exp) == ("float64", "storage", 0.0)


def test_levels_differ_where_they_say() -> None:
    assert LEVELS["fp32"].weights == "accumulator"
    assert LEVELS["bf16"].weights == "storage"
    assert {name for name, level in LEVELS.items() if level.score_inputs == "tf32"} == {"tf32"}


# -- from the command line ---------------------------------------------------------------------------------------------


def test_a_file_says_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('weights = "storage"\nexp = 1e-3\n')
    assert read(str(path)) == Precision(weights="storage", exp=1e-3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exp = -1", "exp is -1: expected a relative error"),
        ("exp = nan", "exp is nan: expected a relative error"),
        ("exp = true", "exp is True: expected a number"),
        ("exp = 2020-01-01", "exp is datetime.date(2020, 1, 1): expected a number"),
        ('accumulator = "float16"', "accumulator is 'float16': expected one of float32, float64"),
        ("speed = 1", "unknown fields: 'speed'"),
        ("exp = ", "it is not TOML"),
        (f"exp = {'[' * 5000}", "it is not TOML"),
        (f"exp = {'9' * 5000}", "it is not TOML"),
        ("#" * 2**17, "more than 65,536 bytes"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_none_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InvalidProblem, match=r"mine\.toml: ") as refused:
        read(str(path))
    assert says in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidProblem, match="not text in UTF-8"):
        read(str(path))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidProblem, match=r"precision 'bf61' is not known; expected one of fp16.*did you mean"):
        read("bf61")


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_declaring_the_roughest_precision_excuses_nothing(register: Register) -> None:
    register("saboteur", "saboteurs:Overstates")
    assert check(CASE, "saboteur").verdict == "verified"  # by its own words
    with terms.within(Terms(LEVELS["fp32"])):
        outcome = check(CASE, "saboteur")
    assert outcome.verdict == "mismatch"
    assert outcome.failure is not None
    assert outcome.failure.check == "reference"


def test_a_right_backend_is_right_at_every_level_it_keeps() -> None:
    with terms.within(Terms(LEVELS["fp32"])):
        assert check(CASE, "tiled").verdict == "verified"


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
def test_a_run_reaches_its_workers(isolate: bool) -> None:
    space = Space(libraries=("numpy",), dtypes=("float32",), work=2**12, longest=70)
    target = Target("cpu", ("saboteurs:Overstates",), space)
    terms_of_run = Terms(LEVELS["fp32"])
    plan = Plan((target,), 20, 0, max_failures=1, shrink_tries=0, isolate=isolate, workers=1, terms=terms_of_run)
    report = run(plan)
    assert report.exit_code == 1
    assert [found.outcome.failure.check for found in report.failures if found.outcome.failure] == ["reference"]


def test_a_saved_failure_is_replayed_on_the_same_terms(command: Callable[..., Any], tmp_path: Path) -> None:
    here = ("--backend", "saboteurs:Overstates", "--no-isolate")
    few = ("--quick", "--examples", "5", "--max-failures", "1", "--corpus", str(tmp_path))
    found = command("verify")(*here, *few, "--precision", "fp32")
    (path,) = tmp_path.glob("*.json")
    assert f"attnswitch replay {path} --backend saboteurs:Overstates --precision fp32" in found.out
    replay = command("replay")
    assert (found.code, replay(str(path), *here).code, replay(str(path), *here, "--precision", "fp32").code) == (
        1,
        0,
        1,
    )


def _fields(precision: Precision) -> dict[str, object]:
    return {name: getattr(precision, name) for name in Precision.__dataclass_fields__}
