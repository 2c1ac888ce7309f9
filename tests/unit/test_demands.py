"""Coverage that is demanded: what a requirement admits, cases that meet its classes, figures of what was refused."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attnswitch import InvalidProblem
from attnswitch.verify import AUTO, Case, MaskRecipe, Outcome, Placing, Plan, Report, Shard, Space, Target, run
from attnswitch.verify.checks import DRAWN
from attnswitch.verify.checks import named as named_check
from attnswitch.verify.demands import steering, words
from attnswitch.verify.demands.figures import Class, Demanded
from attnswitch.verify.demands.profiles import named, profiles
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.session import order, worker
from attnswitch.verify.session.explore import Source

SPACE = Space(checks=tuple(check.name for check in DRAWN if not check.gpu))
EVERY = [requirement for profile in profiles().values() for requirement in profile.requirements]

PLAIN = Case(dtype="bfloat16", seq_q=20, seq_k=33, dim_qk=64, dim_v=64)
BOOL, FLOAT = MaskRecipe("bool"), MaskRecipe("bfloat16")
VARLEN = {"batch": 2, "query_lengths": (20, 7), "lengths": (33, 7)}
LATENT: dict[str, Any] = {"page": 16, "seq_k": 48, "lengths": (33,), "alignment": "bottom_right", "latent": True}
LATENT |= {"dim_qk": 576, "dim_v": 512}
PAGED = {"page": 16, "seq_k": 48, "lengths": (33,), "alignment": "bottom_right"}


# -- what a requirement admits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("lse", {}),
        ("causal", {"causal": True}),
        ("causal", {"causal": True, "seq_q": 33, "alignment": "bottom_right"}),  # the same from either corner
        ("causal-br", {"causal": True, "alignment": "bottom_right"}),
        ("causal-br", {"causal": True, "seq_q": 33}),
        ("gqa", {"heads_kv": 2, "group": 4}),
        ("gqa", {"group": 4}),
        ("mqa", {"group": 4}),
        ("causal,gqa,mask=bool", {"causal": True, "group": 2, "mask": BOOL}),
        ("mask=float", {"mask": FLOAT}),
        ("grad", {"grads": "kv"}),
        ("backward", {"grads": "qkv"}),
        ("grad,grad=m,mask=float", {"grads": "qkvm", "mask": FLOAT}),
        ("window,bottom-right", {"window": (3, 3), "alignment": "bottom_right"}),
        ("varlen", VARLEN),
        ("page", PAGED),
        ("page=16", PAGED),
        ("paged,packed,causal", {**PAGED, "causal": True, "query_lengths": (20,)}),
        ("page,cache=int8", {**PAGED, "cache": "int8", "scales": "page"}),
        ("D<=48,D>=40,D%8", {"dim_qk": 40, "dim_v": 40}),
        ("D=32,D=40", {"dim_qk": 40, "dim_v": 40}),
        ("D=192,Dv=128", {"dim_qk": 192, "dim_v": 128}),
        ("Lq=Lk", {"seq_q": 33}),
        ("varlen,Lq=Lk", {**VARLEN, "query_lengths": (33, 7), "seq_q": 33}),
        ("Lq=1", {"seq_q": 1}),
        ("dtype=fp64", {"dtype": "float64"}),
        ("strided", {"layout": "BLHD"}),
        ("turned", {"placing": Placing(key="mirrored"), "library": "numpy"}),
        ("turned,strided", {"placing": Placing("offset", "backwards"), "library": "numpy"}),
        ("empty", {"seq_k": 0}),
        ("dropout", {"dropout": 0.5, "seq_k": 64}),
        ("seeded", {"dropout": 0.5, "dropout_seed": 3}),
        ("causal!,lse", {"causal": True}),
        ("lse,causal?", {"causal": True}),
        ("lse,dtype=fp32?", {"dtype": "float32"}),
        ("page,varlen?", {**PAGED, "query_lengths": (20,)}),
        ("parts", {"parts": 2, "lse": True}),
        ("latent", LATENT),
        ("mla,D=64", {**LATENT, "dim_qk": 64, "dim_v": 64}),
        ("mla,D=192,Dv=128", {**LATENT, "dim_qk": 192, "dim_v": 128}),
    ],
)
def test_a_requirement_admits(text: str, changes: dict[str, Any]) -> None:
    assert Requirement.parse(text).admits(PLAIN.replace(**changes))


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("lse", {"causal": True}),
        ("lse", {"dtype": "float64"}),  # of the dtypes, the one that has to be named
        ("dtype=fp16", {}),
        ("lse", {"dim_qk": 40, "dim_v": 40}),
        ("D<=256", {"dim_qk": 64, "dim_v": 32}),
        ("D<=48", {}),
        ("D%48", {}),
        ("D=32,D=40", {}),
        ("causal", {"causal": True, "alignment": "bottom_right"}),
        ("causal-br", {"causal": True}),
        ("mqa", {"heads_kv": 2, "group": 4}),
        ("mask=bool", {"mask": FLOAT}),
        ("grad", {"grads": "qkvm", "mask": FLOAT}),
        ("varlen", {}),
        ("varlen", {**PAGED, "query_lengths": (20,)}),
        ("page", {**PAGED, "query_lengths": (20,)}),
        ("page=64", PAGED),
        ("page", {**PAGED, "cache": "int8", "scales": "page"}),
        ("Lq=Lk", {}),
        ("varlen,Lq=Lk", VARLEN),
        ("lse", {"placing": Placing(query="offset")}),
        ("strided", {"placing": Placing("offset", "backwards"), "library": "numpy"}),
        ("turned", {"placing": Placing("offset", "backwards"), "library": "numpy"}),
        ("lengths", {"lengths": (0,)}),
        ("dropout", {"dropout": 0.5, "dropout_seed": 3}),
        ("causal!,lse", {"lse": True}),
        ("lse,dtype=fp32?", {}),
        ("lse", {"parts": 2, "lse": True}),
        ("page", {**PAGED, "latent": True}),
        ("latent", {**LATENT, "dim_v": 64}),
        ("latent!", {**LATENT, "latent": False}),
    ],
)
def test_a_requirement_does_not_admit(text: str, changes: dict[str, Any]) -> None:
    assert not Requirement.parse(text).admits(PLAIN.replace(**changes))


def test_a_case_is_of_the_classes_that_say_something_of_it() -> None:
    requirement = Requirement.parse("causal,gqa,lse,D<=128,dtype=bf16,dtype=fp16")
    assert requirement.classes(PLAIN.replace(causal=True, lse=True)) == ["causal", "lse", "D<=128", "dtype=bf16"]


def test_words_are_read_once_and_keep_their_order() -> None:
    assert str(Requirement.parse(" gqa, backward,causal!,,grad ,gqa")) == "gqa,grad,causal!"
    assert Requirement.parse("dtype=bfloat16").admits(PLAIN)


def test_a_word_with_a_question_mark_is_no_class() -> None:
    requirement = Requirement.parse("packed?,page, lse ,grads?,dtype=bf16?,lse?")
    assert str(requirement) == "page,lse,varlen?,grad?,dtype=bf16?"
    assert Requirement.parse(str(requirement)) == requirement
    assert requirement.words == ("page", "lse")
    packed = PLAIN.replace(**PAGED, query_lengths=(20,))
    assert (requirement.admits(packed), requirement.classes(packed)) == (True, ["page"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected 1 to 64 words"),
        ("causl", "'causl' is not understood: expected causal, .*; did you mean 'causal'?"),
        ("mask", "expected mask=bool or mask=float"),
        ("mask=int", "'mask=int' is not understood"),
        ("dtype=bf61", "dtype='bf61': expected fp16, bf16, fp32, fp64; did you mean 'bf16'?"),
        ("D<128", "'D<128' is no bound of a size"),
        ("D<=x", "'D<=x': expected a number from 1 to 1,048,576"),
        ("D=0", "expected a number from 1"),
        ("D<=99999999999999999999", "expected a number from 1"),
        ("E<=3", "'E<=3' is no bound of a size: expected one of B, H,"),
        ("Lk=Lq", "'Lk=Lq': expected a number"),
        ("D=64!", "'D=64!': only features take a !"),
        ("lse,D=64?", "'D=64?': a bound is of all problems"),
        ("causal?,gqa?", "expected a word without a question mark"),
        ("causl?,lse", "'causl' is not understood"),
        ("\x1b[31m", "is not understood"),
        (",".join(["lse"] * 65), "expected 1 to 64 words"),
    ],
    ids=lambda text: ascii(text)[:16],
)
def test_what_is_no_requirement_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidProblem, match=says.replace("?", r"\?").replace("[", r"\[")):
        Requirement.parse(text)


# -- cases that meet it ------------------------------------------------------------------------------------------------

WORDS = "causal,causal-br,bottom-right,gqa,mqa,window,softcap,scale,mask=bool,mask=float,lengths,seeded,sinks,alibi,lse"
MORE = "grad,grad=m,mask=float,deterministic,nonfinite,strided,turned,empty,dropout,D=64"
PAGES = "page,varlen,cache=fp8e4m3,cache=fp8e5m2,cache=int8,splits,sinks,empty"
LATER = "dense,latent,parts,sinks?,lse?"


@pytest.mark.parametrize(
    "requirement",
    [*EVERY, *map(Requirement.parse, (WORDS, MORE, PAGES, LATER, "Lq>=1024,Lk>=2048", "D<=256"))],
    ids=str,
)
def test_each_class_is_met_by_several_cases(requirement: Requirement) -> None:
    found = list(steering.cases(requirement, SPACE, seed=3))
    assert found == list(steering.cases(requirement, SPACE, seed=3))
    assert found != list(steering.cases(requirement, SPACE, seed=4))
    for word in requirement.words:
        assert sum(word in requirement.classes(case) for case in found) >= steering.EACH, word
    for case in found:
        assert requirement.admits(case), case
        assert Case.from_json(case.to_json()) == case  # it is one that can be saved


@pytest.mark.parametrize("each", [1, 8, 100])
def test_each_word_has_as_many_cases_as_are_wanted(each: int) -> None:
    requirement = Requirement.parse("page,tree,lse,causal?,D<=256")
    found = list(steering.cases(requirement, SPACE, 3, each))
    counts = [sum(word in requirement.classes(case) for case in found) for word in requirement.words]
    assert min(counts) >= each
    assert len(found) < max(2 * each, 4 * min(each, steering.EACH) + 1)
    few = list(steering.cases(requirement, SPACE, 3, 1))
    assert found[: len(few)] == few, "more of them begin with the same ones"


def test_cases_share_problems_where_each_compiles() -> None:
    requirement = Requirement.parse("varlen,grad?")
    found = list(steering.cases(requirement, SPACE, 3, 240, recipes=12))
    problems = [tuple(group) for _, group in itertools.groupby(found, Case.problem)]
    assert [len(group) for group in problems] == [12] * 20
    assert len({case.data for case in problems[0]}) > 3
    checks = {case.check for case in found}
    assert checks > {"reference", "batch"}
    assert all(named_check(name).suits(case, "cpu") for case in found for name in [case.check])
    assert len(list(steering.cases(requirement, SPACE, 3, 8, recipes=12))) == 8, "of a few each is another problem"


def test_drawing_many_neither_blocks_nor_takes_long() -> None:
    began = time.monotonic()
    drawn = steering.cases(Requirement.parse("causal,gqa,lse,sinks,alibi,softcap,window,scale"), SPACE, 3, each=10**7)
    assert len(list(itertools.islice(drawn, 500))) == 500
    assert time.monotonic() - began < 5


def test_bounds_are_met_at_both_ends_and_between() -> None:
    sizes = {case.dim_qk for case in steering.cases(Requirement.parse("D>=40,D<=160,D%8"), SPACE, 0, each=40)}
    assert {40, 160} < sizes
    assert all(size % 8 == 0 and 40 <= size <= 160 for size in sizes)
    assert len(sizes) > 8


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("Lq=Lk,Lq=128,D=64,causal", {128}),
        ("Lq=Lk,Lk=128,Lk=192", {128, 192}),
        ("Lq=Lk,Lq>=100,Lk=128", {128}),
        ("Lq=Lk,Lq%48,Lk%32,Lq<=200", {96}),
    ],
)
def test_equal_lengths_are_within_the_bounds_of_both(text: str, lengths: set[int]) -> None:
    found = list(steering.cases(Requirement.parse(text), replace(SPACE, work=2**14), 0))
    assert {case.seq_q for case in found} == {case.seq_k for case in found} == lengths


def test_cases_are_no_larger_than_others_unless_that_is_demanded() -> None:
    small = list(steering.cases(Requirement.parse("causal,gqa,D<=256"), SPACE, 0))
    assert max(case.work for case in small) <= 2 * SPACE.work
    large = list(steering.cases(Requirement.parse("Lq>=1024,Lk>=1024"), SPACE, 0, each=2))
    assert all(min(case.seq_q, case.seq_k) >= 1024 for case in large)


@pytest.mark.parametrize(
    "text", ["page,mask=bool", "varlen,lengths", "H=32,Hkv=8", "page=16,Lk=100", "grad=m", "Lq=Lk,Lq=64,Lk=128"]
)
def test_words_that_leave_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidProblem, match=f"require {text}: no problem within it is "):
        list(steering.cases(Requirement.parse(text), SPACE, 0))


def test_a_profile_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidProblem, match=r"profile 'llm-trainin' is not known; .*did you mean 'llm-training'\?"):
        named("llm-trainin")


# -- what became of it -------------------------------------------------------------------------------------------------


def outcome(case: Case, verdict: str, backend: str = "one", reason: str = "") -> Outcome:
    return Outcome(case, backend, "cpu", verdict, reasons=(reason,) if reason else ())  # type: ignore[arg-type]


def test_figures_count_what_is_within() -> None:
    demanded = Demanded([Requirement.parse("causal,lse")], [("cpu", "one")])
    demanded.add(outcome(PLAIN.replace(causal=True), "verified"))
    demanded.add(outcome(PLAIN.replace(causal=True, lse=True), "refused", reason="no lse"))
    demanded.add(outcome(PLAIN.replace(lse=True), "mismatch"))
    demanded.add(outcome(PLAIN.replace(lse=True), "unavailable", reason="not here"))
    demanded.add(outcome(PLAIN.replace(softcap=1.0, lse=True), "refused", reason="softcap"))
    demanded.add(outcome(PLAIN.replace(lse=True), "refused", backend="two", reason="no lse"))
    figures = {each.word: (s.drawn, s.taken, s.right, dict(s.reasons)) for each, s in demanded.classes.items()}
    assert figures == {"causal": (2, 1, 1, {"no lse": 1}), "lse": (3, 1, 0, {"no lse": 1, "not here": 1})}
    whole = demanded.whole["cpu", "one"]
    assert (whole.drawn, whole.taken, whole.right) == (4, 2, 1)
    assert demanded.refused == [Class("causal,lse", "causal", "cpu", "one"), Class("causal,lse", "lse", "cpu", "one")]
    assert demanded.never == []


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``judged(verdict, **plan)`` runs a plan in which ``verdict(case, backend)`` stands for the judge."""

    def carry_out(verdict: Callable[[Case, str], str], **plan: Any) -> Any:
        def examine(case: Case, backends: Any, device: str = "cpu", **_: Any) -> list[Outcome]:
            words = {name: verdict(case, name) for name in backends}
            return [outcome(case, word, name, "it is a test" * (word == "refused")) for name, word in words.items()]

        monkeypatch.setattr(worker, "examine", examine)
        requirements = (Requirement.parse("causal,gqa,dtype=bf16"),)
        targets = (Target("cpu", (AUTO, "one", "two"), SPACE),)
        return run(Plan(targets, 5, 0, requirements=requirements, **plan))

    return carry_out


def test_taking_all_of_it_is_right(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "verified")
    assert (report.exit_code, report.demanded.refused, report.demanded.never) == (0, [], [])
    assert report.cases == 5 + 3 * steering.EACH
    assert len(report.demanded.classes) == 3 * 3


def test_as_many_as_are_wanted_of_each_word(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "verified", each=40)
    assert {share.drawn >= 40 for share in report.demanded.classes.values()} == {True}
    assert report.demanded.fewest < 60
    assert report.cases > 45
    again = judged(lambda case, backend: "verified", each=40)
    assert (again.cases, again.triggers) == (report.cases, report.triggers)


def test_of_a_run_in_parts_each_has_its_own(judged: Callable[..., Any]) -> None:
    def of(**plan: Any) -> list[Case]:
        tried: list[Case] = []

        def verdict(case: Case, backend: str) -> str:
            tried.extend([case] * (backend == "one"))
            return "verified"

        judged(verdict, **plan)
        return tried

    whole = of(each=40)
    parts = [of(each=40, shard=Shard(n, 3)) for n in (1, 2, 3)]
    assert Counter(map(str, itertools.chain(*parts))) == Counter(map(str, whole))


def test_refusing_some_of_it_is_a_failure_of_that_class(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "refused" if case.group > 2 and backend == "one" else "verified")
    assert report.exit_code == 1
    assert {(each.backend, each.word) for each in report.demanded.refused} >= {("one", "gqa")}
    assert {each.backend for each in report.demanded.refused} == {"one"}
    share = report.demanded.classes[Class("causal,gqa,dtype=bf16", "gqa", "cpu", "one")]
    assert 0 < share.taken == share.right < share.drawn


def test_refusing_what_is_not_demanded_is_none(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "refused" if case.lse or case.softcap or case.page else "verified")
    assert report.exit_code == 0


def test_only_backends_that_are_named_are_held_to_it(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "refused" if backend == "two" else "verified", held=("one",))
    assert report.exit_code == 0
    assert {each.backend for each in report.demanded.classes} == {"one"}


def test_a_class_that_was_never_tried_is_no_success(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "unavailable" if backend == "one" else "verified")
    assert report.exit_code == 3
    assert {each.backend for each in report.demanded.never} == {"one"}


def test_being_absent_for_what_is_hard_is_a_refusal(judged: Callable[..., Any]) -> None:
    report = judged(lambda case, backend: "unavailable" if case.causal and case.group > 1 else "verified")
    assert report.exit_code == 1
    assert {each.word for each in report.demanded.refused} == {"causal", "gqa", "dtype=bf16"}


def test_running_out_of_memory_is_a_refusal_too() -> None:
    demanded = Demanded([Requirement.parse("lse")], [("cpu", "one")])
    demanded.add(Outcome(PLAIN, "one", "cpu", "refused", reasons=("out of memory",), starved=True))
    demanded.add(outcome(PLAIN.replace(lse=True), "verified"))
    assert [share.taken for share in demanded.classes.values()] == [1]
    assert demanded.whole["cpu", "one"].refused


def test_a_run_finds_out_first_that_nothing_can_be_drawn() -> None:
    plan = Plan((Target("cpu", ("tiled",), SPACE),), 5, 0, requirements=(Requirement.parse("page,mask=bool"),))
    with pytest.raises(InvalidProblem, match="no problem within it is mask=bool"):
        run(plan)


@pytest.mark.slow
def test_a_backend_that_evades_is_found_in_a_real_run() -> None:
    few = Space(work=2**14, longest=140)
    requirements = (Requirement.parse("causal,mask=bool,dtype=fp32"),)
    report = run(Plan((Target("cpu", ("saboteurs:Evades", "tiled"), few),), 1, 0, requirements=requirements))
    assert (report.exit_code, report.failures) == (1, [])
    share = report.demanded.classes[Class(str(requirements[0]), "mask=bool", "cpu", "saboteurs:Evades")]
    assert (share.taken, share.reasons["mask of bool: it takes none"]) == (0, share.drawn)
    assert {each.backend for each in report.demanded.refused} == {"saboteurs:Evades"}


# -- from the command line ---------------------------------------------------------------------------------------------

HERE = ("--quick", "--no-isolate", "--no-corpus", "--device", "cpu", "--examples", "2", "--longest", "40")


def test_the_command_shows_which_part_was_taken(command: Callable[..., Any]) -> None:
    ran = command("verify")(*HERE, "--backend", "saboteurs:Evades", "--require", "mask=bool,dtype=fp32")
    assert ran.code == 1
    rows = [line.split() for line in ran.out.splitlines() if line.startswith(("mask=bool", "dtype=fp32"))]
    assert [row[0] for row in rows] == ["mask=bool", "dtype=fp32"]
    assert "mask of bool: it takes none" in ran.out
    assert "2 demanded classes refused" in ran.out


def test_the_command_draws_as_many_as_it_is_told(command: Callable[..., Any]) -> None:
    ran = command("verify")(*HERE, "--backend", "tiled", "--require", "sinks,dtype=fp32", "--each", "12", "--json", "-")
    rows = {row["class"]: row for row in json.loads(ran.out)["demanded"]}
    assert ran.code == 0
    assert rows.keys() == {"sinks", "dtype=fp32"}
    assert all(row["drawn"] == row["taken"] == row["right"] >= 12 for row in rows.values())


def test_the_dispatcher_is_held_to_it_where_no_backend_is_named(command: Callable[..., Any]) -> None:
    ran = command("verify")(*HERE, "--json", "-", "--require", "softcap,D=8,dtype=fp32")
    document = json.loads(ran.out)
    assert {row["backend"] for row in document["demanded"]} == {AUTO}
    assert (ran.code, document["verdict"]["correct"]) == (0, True)
    assert {each["of"] for each in document["verdict"]["backends"]} == {"demanded", "drawn"}


def test_the_bar_shows_the_word_that_has_the_fewest_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    watching: Any = importlib.import_module("attnswitch.cli.watching")
    bars: list[tuple[int, int | None]] = []
    monkeypatch.setattr(
        watching.Progress, "update", lambda self, task, **of: bars.append((of["completed"], of["total"]))
    )
    plan = Plan((Target("cpu", ("one",), SPACE),), 5, 0, requirements=(Requirement.parse("causal,lse"),), each=40)

    def carry_out(plan: Plan, progress: Any) -> Report:
        report = Report(0, demanded=Demanded(plan.requirements, [("cpu", "one")]))
        for case in (PLAIN.replace(lse=True), PLAIN.replace(lse=True, causal=True)):
            report.demanded.add(outcome(case, "verified"))
            progress(report, Source.DEMANDED, "cpu", ())
        progress(report, Source.DRAWN, "cpu", ())
        return report

    watching.watched(plan, True, None, carry_out)
    assert bars == [(0, 40), (1, 40), (0, 5)]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--require", "causl", "'causl' is not understood"),
        ("--require", "page,grad", "no problem within it is grad"),
        ("--profile", "llm", "profile 'llm' is not known"),
        ("--each", "9", "--each 9 is of words that are demanded: add --require or --profile"),
        ("--precision", "double", "precision 'double' is not known"),
    ],
)
def test_a_demand_that_makes_no_sense_is_the_callers_mistake(
    option: str, value: str, says: str, command: Callable[..., Any]
) -> None:
    ran = command("verify")(*HERE, "--backend", "tiled", option, value)
    assert (ran.code, says in ran.out) == (2, True)


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("causal,varlen?", {"dense", "varlen"}),
        ("lse,page?", {"dense", "page"}),
        ("page,lse,varlen?", {"page", "varlen"}),
        ("varlen,page?", {"varlen", "page"}),
        ("latent,varlen?", {"page", "varlen"}),
    ],
)
def test_forms_that_may_be_are_no_forms_that_must(text: str, forms: set[str]) -> None:
    requirement = Requirement.parse(text)
    assert set(requirement.forms) == forms
    drawn = {frozenset(words.forms(case)) for case in steering.cases(requirement, SPACE, 0, each=30)}
    assert len(drawn) > 1
    if "dense" in forms:
        assert frozenset({"dense"}) in drawn


def test_parts_have_cases_where_there_are_fewer_than_in_a_job() -> None:
    """Of a run in four parts."""
    target = Target("cpu", ("tiled",), SPACE)
    plan = Plan((target,), 1, 0, requirements=(Requirement.parse("parts"),), each=5, shard=Shard(3, 4))
    assert all(len(job.cases) == 1 for job in order.demanded(plan, target))


def test_what_runs_backwards_is_numpys() -> None:
    with pytest.raises(InvalidProblem, match="NumPy's arrays alone run backwards"):
        steering.require(Requirement.parse("turned"), replace(SPACE, libraries=("torch",)), 0)
