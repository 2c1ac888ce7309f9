"""Tuning: what is measured, what is left out and why, and runs that are taken up again."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import attnswitch
from attnswitch import Device, InvalidProblem, Problem
from attnswitch.bench.measure import Budget
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Kernel
from attnswitch.tune import cases, problems, session, trial
from attnswitch.tune.trial import Effort
from attnswitch.verify import Case, Failure, Outcome
from attnswitch.verify.judge import examine
from attnswitch.verify.session import apart
from attnswitch.wisdom import store, view
from attnswitch.wisdom.classes import speed_class
from attnswitch.wisdom.record import Time, Untimed, Verdict
from attnswitch.wisdom.signature import Signature, sign

Register = Callable[[str, str], None]
QUICK = Effort(Budget(1.0, 2.0), search=0.0)
SMALL = Problem.parse("b1.h2.s16.d8.fp32")


# -- one problem -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "b1.h2.s16.d8.fp32",
        "b3.h4/2.s9x20.d8.fp32.causal-br.lengths.lse",
        "b2.h2.s16.d8.fp32.grad",
        "b1.h2.s16.d21.fp32.grad",  # rows that are no multiples of 16 bytes
        "b2.h2.s17.d8.fp32.mask=bool:bk",
    ],
)
def test_every_backend_that_takes_it_is_timed(text: str) -> None:
    problem = Problem.parse(text)
    found = trial.run(problem, "cpu", QUICK, examine)
    takes = {c.backend for c in attnswitch.explain(problem).candidates if c.to_try(())}
    assert {time.backend for time in found.times} | found.hopeless.keys() == takes
    assert all(ratio > 4 for ratio in found.hopeless.values())
    assert (found.wrong, found.failed) == ([], {})
    untimed = {record.backend: record.why for record in found.records if isinstance(record, Untimed)}
    assert untimed.keys() == found.hopeless.keys()
    assert all("times as long as the fastest" in why for why in untimed.values())
    assert [time.ms for time in found.times] == sorted(time.ms for time in found.times)
    assert all(time.problem == problem and time.low <= time.ms <= time.high for time in found.times)


@pytest.mark.parametrize("grads", ["", ".grad"])
def test_the_whole_call_is_timed_backward_included(grads: str, register: Register) -> None:
    register("tunable", f"{__name__}:Tunable")
    _Kernel.forwards = _Kernel.backwards = 0
    found = trial.run(Problem.parse(f"b1.h2.s16.d8.fp32{grads}"), "cpu", QUICK, _verified)
    assert "tunable" in {time.backend for time in found.times} | found.hopeless.keys()
    assert _Kernel.forwards > 2  # twice to be looked at, then timed
    assert _Kernel.backwards == (_Kernel.forwards if grads else 0)


def _verified(case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
    return [Outcome(case, backend, device, "verified", backend) for backend in backends]


def test_what_nothing_can_be_compared_with_is_not_wrong_for_it() -> None:
    """Of a mask's gradient alone there is no wider answer, and dropout adds no noise to none."""
    found = trial.run(Problem.parse("b1.h2.s16.d8.fp32.mask=fp32.dropout=0.5.grad=m"), "cpu", QUICK, _verified)
    assert found.wrong == []
    assert "sdpa-math" in {time.backend for time in found.times} | found.hopeless.keys()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("saboteurs:ScaledOutput", "b1.h2.s17.d8.fp32"),
        ("attnswitch.verify.mutants:scale-zero-taken-for-none", "b1.h2.s17.d8.fp32.scale=0.0"),
        ("attnswitch.verify.mutants:one-key-tail-dropped", "b1.h2.s129.d8.fp32"),
    ],
)
def test_a_wrong_backend_is_named_and_has_no_time(target: str, text: str, register: Register) -> None:
    register("saboteur", target)
    found = trial.run(Problem.parse(text), "cpu", QUICK, examine)
    assert [verdict.backend for verdict in found.wrong] == ["saboteur"]
    assert "saboteur" not in {time.backend for time in found.times}
    assert found.times


def test_a_fault_of_many_heads_alone_is_seen_on_the_whole_problem(register: Register) -> None:
    """The verifier's case has two heads; what is timed is held against the answer as well."""
    register("saboteur", f"{__name__}:WrongLastHead")
    found = trial.run(Problem.parse("b1.h5.s16.d8.fp32"), "cpu", QUICK, examine)
    assert [verdict.backend for verdict in found.wrong] == ["saboteur"]
    assert "its deviation from float64 math" in found.wrong[0].why


def test_the_best_config_is_found_and_a_wrong_one_is_left_out(register: Register) -> None:
    register("tunable", f"{__name__}:Tunable")

    def alone(case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
        """Nothing beside it: another backend may be so fast that it is not timed."""
        verdicts = {name: "verified" if name == "tunable" else "refused" for name in backends}
        return [Outcome(case, name, device, verdict) for name, verdict in verdicts.items()]  # type: ignore[arg-type]

    found = trial.run(SMALL, "cpu", Effort(Budget(1.0, 2.0), search=20.0), alone)
    (time,) = (time for time in found.times if time.backend == "tunable")
    assert time.config == "fast"
    assert found.wrong == []
    assert [name for name in found.failed if "tunable" in name] == ["tunable broken"]
    assert found.failed["tunable broken"].startswith("mismatch: its deviation from float64 math")
    view.remember(found.records)
    assert {c.backend: c.config for c in attnswitch.explain(SMALL).candidates}["tunable"] == "fast"


@pytest.mark.parametrize(
    ("text", "batch", "heads", "on_cpu"),
    [
        ("b3.h6/3.s64.d32.fp32", 3, 3, (2, 2)),  # judged as it is
        ("b32.h16.s256.d64.bf16", 4, 16, (2, 2)),  # with fewer sequences
        ("b4.h32/8.s2048.d128.bf16.causal", 1, 4, (1, 1)),  # and heads
        ("b16.h32/8.s1x16384.d64.bf16", 1, 4, (1, 2)),  # little work, and many keys
        ("b64.h16.s16384x8.d64.fp32", 1, 4, (1, 2)),  # or queries
        ("b2.h16.s8192.d64.bf16", 1, 2, (1, 1)),  # too much for a few heads
        ("b5.h3.s4096.d64.bf16.lengths", 1, 3, (1, 1)),
        ("b1.h3.s64.d64.bf16.lengths", 1, 3, (1, 2)),
        ("b8.h8.s2048.d64.fp32.dropout=0.1", 2, 8, (2, 2)),  # few of its keys
    ],
)
def test_as_much_of_a_problem_is_verified_as_can_be_judged_soon(
    text: str, batch: int, heads: int, on_cpu: tuple[int, int]
) -> None:
    problem = Problem.parse(text)
    for kind, sizes in (("cuda", (batch, heads)), ("cpu", on_cpu)):
        case = cases.of(problem, kind)
        assert (case.batch, case.heads_kv) == sizes
        less = {"batch": case.batch, "heads_q": case.heads_kv * problem.group, "heads_kv": case.heads_kv}
        assert case.problem() == problem.replace(**less, seq_k=64 if problem.dropout else problem.seq_k)
        assert case.lengths is None or (len(case.lengths) == case.batch and min(case.lengths) < case.seq_k)


def test_a_mask_that_the_backend_draws_is_verified_where_its_output_shows_it() -> None:
    """More keys than the output has columns would show some of the mask, and every backend would look wrong."""
    found = trial.run(Problem.parse("b2.h2.s24x40.d16.fp32.lengths.dropout=0.3.grad"), "cpu", QUICK, examine)
    assert found.wrong == []
    assert "sdpa-math" in {time.backend for time in found.times} | found.hopeless.keys()


def test_a_kernel_that_dies_where_it_is_verified_is_never_run_here() -> None:
    def crashed(case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
        crash = Failure("crash", "it was ended by SIGSEGV")
        return [
            Outcome(case, backend, device, "mismatch", failure=crash)
            if backend == "sdpa-math"
            else examine(case, (backend,), device)[0]
            for backend in backends
        ]

    found = trial.run(SMALL, "cpu", QUICK, crashed)
    assert [(verdict.backend, verdict.why) for verdict in found.wrong] == [
        ("sdpa-math", "crash: it was ended by SIGSEGV")
    ]
    assert "sdpa-math" not in {time.backend for time in found.times}


def test_what_cannot_be_measured_is_known_for_it_and_not_tried_again(register: Register) -> None:
    register("greedy", f"{__name__}:Greedy")
    found = trial.run(SMALL, "cpu", QUICK, examine)
    assert (found.wrong, list(found.failed)) == ([], ["greedy"])
    view.remember(found.records)
    assert session.known(SMALL, "cpu")
    plan = attnswitch.plan(SMALL, policy="measure")
    (candidate,) = (candidate for candidate in plan.candidates if candidate.backend == "greedy")
    (why,) = plan.why_not(candidate)
    assert why.startswith("it takes the problem, but was given up when it was tried on 2")
    assert why.endswith(": refused: out of memory: it wants a terabyte")


def test_an_empty_problem_takes_no_time() -> None:
    assert trial.run(Problem.parse("b0.h1.s4.d8.fp32"), "cpu", QUICK, examine).records == []


def test_a_backend_that_was_wrong_before_is_not_timed() -> None:
    signed = sign("tiled", Device.cpu())
    assert isinstance(signed, Signature)
    view.remember([Verdict(SMALL, "tiled", False, "some-case.json", "reference: out", signed, "2026-11-20")])
    found = trial.run(SMALL, "cpu", QUICK, examine)
    assert "tiled" not in {time.backend for time in found.times}
    assert found.failed["tiled"] == "it was wrong here before: reference: out (case some-case.json)"


# -- what there is to measure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_catalogue_has_one_problem_of_each_class(kind: str) -> None:
    found = problems.catalogue(kind)
    assert len(found) > 15
    assert problems.distinct(found) == found


@pytest.mark.parametrize("name", problems.models())
def test_every_model_is_problems(name: str) -> None:
    for train in (False, True):
        found = problems.of_model(name, batch=2, train=train)
        assert found
        assert all(problem.batch == 2 and (problem.grads == "qkv") is train for problem in found)


def test_a_model_has_prompts_and_tokens() -> None:
    found = [str(problem) for problem in problems.of_model("llama-3-8b", 1000)]
    assert found == [
        f"b1.h32/8.s{length}.d128.bf16" + ("" if str(length).startswith("1x") else ".causal")
        for length in (104, 128, "1x128", 232, 256, "1x256", 488, 512, "1x512", 1000, "1x1000")
    ]
    assert len({speed_class(Problem.parse(text)) for text in found}) == len(found)
    windowed = [str(problem) for problem in problems.of_model("gemma-2-9b", 8192, dtype="fp16")]
    assert "b1.h16/8.s8192.d256.fp16.causal.window=4095,0.softcap=50.0" in windowed
    assert not any("window" in text for text in windowed if "s4096" in text)
    assert [str(p) for p in problems.of_model("sdxl")] == ["b1.h10.s4096.d64.bf16", "b1.h10.s4096x77.d64.bf16"]


def test_what_is_no_model() -> None:
    with pytest.raises(InvalidProblem, match="model 'gpt-9' is not known; expected one of llama-2-7b"):
        problems.of_model("gpt-9")
    with pytest.raises(InvalidProblem, match="context 0"):
        problems.of_model("gpt2", 0)
    with pytest.raises(InvalidProblem, match=r"context 100: calls of sdxl have .*: 4096, 4096x77"):
        problems.of_model("sdxl", 100)


def test_one_of_each_class_plainly() -> None:
    texts = ("b1.h2.s100.d8.fp32.q=align4", "b1.h2.s120.d8.fp32", "b0.h2.s1.d8.fp32", "b1.h2.s128.d8.fp32")
    found = problems.distinct(map(Problem.parse, texts))
    assert [str(problem) for problem in found] == ["b1.h2.s100.d8.fp32", "b1.h2.s128.d8.fp32"]


# -- a run -------------------------------------------------------------------------------------------------------------


Cli = Callable[..., Any]
BRIEF = ("--device", "cpu", "--budget", "2", "--search", "0")


@pytest.fixture
def cli(command: Callable[[str], Cli]) -> Cli:
    return command("tune")


@pytest.mark.slow
def test_a_run_is_remembered_and_goes_on(cli: Cli) -> None:
    first, second = "b1.h2.s16.d8.fp32", "b1.h2.s64.d8.fp32"
    ran = cli(*BRIEF, "--problem", first, "--json", "-")
    document = json.loads(ran.out)
    assert (ran.code, document["known_before"]) == (0, 0)
    assert document["command"].startswith("attnswitch tune --device cpu --budget 2")
    (entry,) = document["problems"]
    assert entry["problem"] == first
    assert entry["after"] == entry["times"][0]["backend"] == attnswitch.plan(first).backend
    ran = cli(*BRIEF, "--problem", first, "--problem", second)
    assert (ran.code, "1 problem measured, 1 known before" in ran.out) == (0, True)
    assert session.known(Problem.parse(second), "cpu")
    ran = cli(*BRIEF, "--problem", first, "--problem", second)
    assert (ran.code, "0 problems measured, 2 known before" in ran.out) == (0, True)
    times = [record for record in store.here().read().records if isinstance(record, Time)]
    assert {speed_class(time.problem) for time in times} == {
        speed_class(Problem.parse(text)) for text in (first, second)
    }


def test_nothing_is_measured_that_could_not_be_remembered(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(session, "_Verifiers", None)  # which a run begins with
    ran = cli(*BRIEF, "--problem", "b1.h2.s16.d8.fp32")
    assert ran.code == 2
    assert f"{tmp_path / 'file' / 'cache' / 'wisdom.jsonl'} cannot be written (Not a directory)" in ran.out


def test_nothing_to_measure_is_told(cli: Cli) -> None:
    Path("calls.txt").write_text("\n")
    ran = cli("--device", "cpu", "--recorded", "calls.txt", "--problem", "b0.h1.s4.d8.fp32")
    assert (ran.code, "nothing to measure: what was named holds no problem" in ran.out) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [((), 0.0), (("--problem", "b1.h2.s16.d8.fp32"), 2.0), (("--search", "7"), 7.0)],
)
def test_configs_are_searched_where_problems_are_named(
    arguments: tuple[str, ...], seconds: float, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts = list[Effort]()

    def run(todo: Sequence[Problem], where: str, effort: Effort, timeout: float) -> Iterator[session.Tuned]:
        efforts.append(effort)
        yield from ()

    monkeypatch.setattr(session, "run", run)
    assert cli("--device", "cpu", *arguments).code == 3
    assert [effort.search for effort in efforts] == [seconds]


def test_parts_of_a_run_have_no_problem_in_common(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list[list[Problem]]()

    def run(todo: Sequence[Problem], where: str, effort: Effort, timeout: float) -> Iterator[session.Tuned]:
        parts.append(list(todo))
        yield from ()

    monkeypatch.setattr(session, "run", run)
    for n in range(4):
        assert cli("--device", "cpu", *(("--shard", f"{n}/3") if n else ())).code == 3
    whole, *dealt = parts
    assert sorted(map(str, itertools.chain(*dealt))) == sorted(map(str, whole))
    assert all(len(part) >= len(whole) // 3 for part in dealt)


def test_a_part_without_a_problem_says_so(cli: Cli) -> None:
    ran = cli(*BRIEF, "--problem", "b1.h2.s16.d8.fp32", "--shard", "2/2")
    assert (ran.code, "nothing to measure: shard 2/2 of 1 problem is empty" in ran.out) == (3, True)
    ran = cli(*BRIEF, "--shard", "3/2")
    assert (ran.code, "shard '3/2': expected a part and how many there are" in ran.out) == (2, True)


def test_problems_are_verified_side_by_side_and_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are at the verifier at once, or the barrier breaks; nobody is there while one is timed."""
    both, busy = threading.Barrier(2, timeout=20), set[int]()

    class Side:
        def examine(self, case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
            busy.add(threading.get_ident())
            both.wait()
            busy.discard(threading.get_ident())
            return _verified(case, backends, device)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(apart, "pool", lambda *_: Side())
    texts = ("b1.h2.s16.d8.fp32", "b1.h2.s64.d8.fp32")
    for tuned in session.run([Problem.parse(text) for text in texts], "cpu", QUICK, 60.0):
        assert not busy
        assert tuned.trial.times
        assert tuned.after == tuned.trial.times[0].backend


def test_each_problem_is_built_and_timed_by_what_was_found_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [Problem.parse(f"b1.h2.s{16 * n}.d8.fp32") for n in range(1, 7)]
    built, met = list[Problem](), dict[Problem, Problem]()

    class Side:
        def examine(self, case: Case, backends: Sequence[str], device: str) -> list[Outcome]:
            return _verified(case, backends, device)

        def __exit__(self, *_: object) -> None:
            pass

    def build(problem: Problem, where: str, outcomes: Sequence[Outcome]) -> None:
        assert all(outcome.case.problem() == problem for outcome in outcomes)
        built.append(problem)

    def run(problem: Problem, where: str, effort: Effort, examine: Any) -> trial.Trial:
        met[problem] = examine()[0].case.problem()
        return trial.Trial(problem)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(apart, "pool", lambda *_: Side())
    monkeypatch.setattr(trial, "build", build)
    monkeypatch.setattr(trial, "run", run)
    assert [tuned.problem for tuned in session.run(todo, "cpu", QUICK, 60.0)] == todo
    assert met == {problem: problem for problem in todo}
    assert sorted(built, key=todo.index) == todo


@pytest.mark.parametrize(("verdict", "builds"), [("verified", True), ("verified", False), ("mismatch", True)])
def test_what_was_verified_and_builds_for_each_shape_is_built_ahead(
    verdict: Any, builds: bool, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tunable, "builds_per_shape", builds, raising=False)
    register("tunable", f"{__name__}:Tunable")
    _Kernel.forwards = 0
    outcomes = [Outcome(cases.of(SMALL, "cpu"), name, "cpu", verdict, name) for name in ("tunable", "tiled")]
    trial.build(SMALL, "cpu", outcomes)
    assert _Kernel.forwards == (verdict == "verified" and builds)


def test_what_was_wrong_before_is_not_built_ahead(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tunable, "builds_per_shape", True, raising=False)
    register("tunable", f"{__name__}:Tunable")
    signed: Any = sign("tunable", Device.cpu())
    view.remember([Verdict(SMALL, "tunable", False, "some-case.json", "crash: SIGSEGV", signed, "2026-11-20")])
    _Kernel.forwards = 0
    trial.build(SMALL, "cpu", _verified(cases.of(SMALL, "cpu"), ["tunable"], "cpu"))
    assert _Kernel.forwards == 0


def test_what_fails_as_it_is_built_fails_when_it_is_measured(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Greedy, "builds_per_shape", True, raising=False)
    register("greedy", f"{__name__}:Greedy")
    trial.build(SMALL, "cpu", _verified(cases.of(SMALL, "cpu"), ["greedy"], "cpu"))
    assert "a terabyte" in trial.run(SMALL, "cpu", QUICK, _verified).failed["greedy"]


def test_an_interrupted_run_keeps_what_it_has(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = trial.run, list[Any]()

    def twice(problem: Problem, *rest: Any) -> Any:
        seen.append(problem)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return run(problem, *rest)

    monkeypatch.setattr(trial, "run", twice)
    ran = cli(*BRIEF, "--problem", "b1.h2.s16.d8.fp32", "--problem", "b1.h2.s64.d8.fp32", "--json", "run.json")
    assert (ran.code, "interrupted: the same command goes on" in ran.out) == (2, True)
    document = json.loads(Path("run.json").read_text())
    assert (document["stopped"], len(document["problems"])) == (True, 1)
    assert session.known(seen[0], "cpu")
    assert not session.known(seen[1], "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-9"), "model 'gpt-9' is not known"),
        (("--context", "100"), "--context: of a model's calls; name one with --model"),
        (("--batch", "2", "--problem", "b1.h1.s8.d8.fp32"), "--batch: of a model's calls"),
        (("--dtype", "bf16", "--train"), "--dtype, --train: of a model's calls"),
        (("--model", "whisper-large-v3", "--context", "100"), "context 100: calls of whisper"),
        (("--device", "h200"), "is not in this machine"),
        (("--problem", "b1"), "missing h, s, d"),
        (("--json", "/dev/null/x"), "cannot be written"),
        (("--device", "CPU", "--budget", "inf"), "a budget of inf ms: expected a finite number"),
    ],
)
def test_a_mistake_is_explained(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    ran = cli(*arguments)
    assert (ran.code, message in " ".join(ran.out.split())) == (2, True)


# -- backends of these tests -------------------------------------------------------------------------------------------


class _Tiled(Backend):
    name = "tiled-again"
    library = "numpy"
    autograd = False

    def reasons(self, problem: Problem, device: Device) -> Any:
        return ()

    def configs(self, problem: Problem, device: Device) -> Any:
        yield "heuristic"

    def precision(self, problem: Problem, device: Device) -> Any:
        return registry.loaded("tiled").precision(problem, device)

    def compile(self, problem: Problem, device: Device, config: Any) -> Any:
        tiled: Any = registry.load("tiled")
        return _Kernel(tiled.compile(problem, device, next(iter(tiled.configs(problem, device)))), config)


class _Kernel(Kernel):
    """The tiled kernel, slow unless its config is "fast"; "broken" gives another answer."""

    forwards = 0
    backwards = 0

    def __init__(self, kernel: Any, config: str) -> None:
        self.kernel, self.config = kernel, config

    def backward(self, *saved: Any) -> Any:
        _Kernel.backwards += 1
        return self.kernel.backward(*saved)

    def forward(self, inputs: Any) -> Any:
        import time

        _Kernel.forwards += 1
        out, lse = self.kernel.forward(inputs)
        if self.config == "greedy":
            raise MemoryError("it wants a terabyte")
        if self.config == "last head" and out.shape[1] > 2:
            out[:, -1] *= 1.1
        if self.config in ("heuristic", "slow"):
            time.sleep(0.005)
        return (2 * out if self.config == "broken" else out), lse


class WrongLastHead(_Tiled):
    def configs(self, problem: Problem, device: Device) -> Any:
        yield "last head"


class Greedy(_Tiled):
    """Takes everything, and has memory for nothing."""

    def configs(self, problem: Problem, device: Device) -> Any:
        yield "greedy"


class Tunable(_Tiled):
    def configs(self, problem: Problem, device: Device) -> Any:
        yield from ("heuristic", "slow", "broken", "fast")
