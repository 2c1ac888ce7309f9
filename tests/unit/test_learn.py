"""Policy LEARN: classes are measured in another process, within a share of the time, and calls never wait for it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_worker
import torch

import attnswitch
from attnswitch import Device, InvalidProblem, Policy, Problem
from attnswitch.bench import workload
from attnswitch.call import recording
from attnswitch.planning import policy, waiting
from attnswitch.planning.choice import Basis
from attnswitch.tune import learn
from attnswitch.wisdom import store, view
from attnswitch.wisdom.record import Time, Untimed, Verdict
from attnswitch.wisdom.signature import sign

SABOTEURS = Path(__file__).parents[1] / "saboteurs"
CPU = Device.cpu()
TEXT = "b2.h4.s64.d32.fp32"
Script = Callable[..., Path]


def tensors(length: int = 64, **how: Any) -> Any:
    return (torch.randn(2, 4, length, 32, **how) for _ in range(3))


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``condition`` says once it holds; the test fails where it does not hold in time."""
    end = time.monotonic() + seconds
    while not (holds := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return holds


def measured(text: str = TEXT) -> bool:
    return attnswitch.explain(text).basis is Basis.MEASURED


def worker() -> int:
    """The process of the worker, once there is one."""
    child = until(lambda: learn._learner and learn._learner._worker)
    return int(child._process.pid)


def gone(pid: int) -> bool:
    """Whether no process has this number: not even one that is dead and nobody asked for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


@pytest.fixture(autouse=True)
def nothing_met() -> Iterator[None]:
    learn.end()
    waiting.forget()
    policy.share.cache_clear()
    yield
    learn.end()
    waiting.forget()
    policy.share.cache_clear()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """``script("answer", step=0.1, share=0.5)`` has a scripted worker measure; the file has when it was awake."""

    def write(what: str, step: float = 0.0, share: float = 1.0) -> Path:
        monkeypatch.setattr(learn, "_WORKER", "scripted_worker")
        monkeypatch.setattr(learn, "_START", 0.0)
        monkeypatch.setattr(learn, "_BUSY", 0.01)
        steps, signatures = tmp_path / "steps.txt", tmp_path / "signatures"
        signatures.write_bytes(pickle.dumps({backend: sign(backend, CPU) for backend in scripted_worker.MS}))
        for name, value in {
            "PYTHONPATH": str(SABOTEURS),
            "SCRIPT": what,
            "STEP": str(step),
            "STEPS": str(steps),
            "SIGNATURES": str(signatures),
            "ATTNSWITCH_LEARN_SHARE": str(share),
        }.items():
            monkeypatch.setenv(name, value)
        return steps

    return write


# -- what is met, and what becomes of it -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["answer", "busy"])
def test_later_calls_choose_by_what_was_measured_meanwhile(script: Script, what: str) -> None:
    script(what)
    query, key, value = tensors()
    expected = attnswitch.attention(query, key, value, policy="learn")
    plan = attnswitch.explain(query, key, value, policy="learn")
    assert plan.backend == "sdpa-flash"
    assert f"\nlearn    {plan.news}\n" in str(plan)
    assert plan.news == "its class waits to be measured in the background"
    until(measured)
    plan = attnswitch.explain(query, key, value)
    assert (plan.backend, plan.news) == ("tiled", "")
    torch.testing.assert_close(attnswitch.attention(query, key, value, policy="learn"), expected)
    assert store.here().read().records == []  # writing is the worker's


def test_each_way_to_ask_for_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script("answer")
    with attnswitch.using("learn"):
        attnswitch.attention(*tensors(40))
    attnswitch.attention(*tensors(130), policy=Policy.LEARN)
    attnswitch.plan("b1.h1.s9.d8.fp32", policy="learn")
    leaves = [tensor.requires_grad_() for tensor in tensors(300)]
    with monkeypatch.context() as environment:
        environment.setenv("ATTNSWITCH_POLICY", "learn")
        policy.of_process.cache_clear()
        attnswitch.attention(*leaves).sum().backward()
    policy.of_process.cache_clear()
    for text in ("b2.h4.s40.d32.fp32", "b2.h4.s130.d32.fp32", "b1.h1.s9.d8.fp32", "b2.h4.s300.d32.fp32.grad"):
        until(lambda text=text: measured(text))  # type: ignore[misc]


def test_classes_are_measured_in_the_order_in_which_they_are_met(script: Script) -> None:
    script("answer", step=0.1)
    for length in (20, 40, 80, 21, 160):
        attnswitch.attention(*tensors(length), policy="learn")
    last = "b2.h4.s160.d32.fp32"
    assert attnswitch.explain(last).news.endswith(", behind 3 others")
    until(lambda: measured(last))
    dates = [attnswitch.explain(f"b2.h4.s{n}.d32.fp32").chosen.time.date for n in (20, 40, 80, 160)]  # type: ignore[union-attr]
    assert dates == sorted(dates)
    until(lambda: learn._learner and learn._learner._worker is None)  # nothing is left to be measured


def test_what_has_no_free_choice_is_not_measured(script: Script) -> None:
    script("answer")
    attnswitch.attention(*tensors(), backend="tiled", policy="learn")
    attnswitch.attention(*(tensor[:, :, :0] for tensor in tensors()), policy="learn")
    attnswitch.explain("b2.h16.s1024.d64.bf16", device="h200", policy="learn")
    attnswitch.attention(*tensors(50))
    with recording.paused():
        attnswitch.attention(*tensors(60), policy="learn")
    assert waiting.first() is None
    assert learn._learner is None


def test_what_is_known_starts_no_worker(script: Script) -> None:
    script("answer")
    attnswitch.attention(*tensors(), policy="measure")
    attnswitch.attention(*tensors(), policy="learn")
    until(lambda: waiting.first() is None)
    assert learn._learner is not None
    assert learn._learner._worker is None


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan", "half"])
def test_a_share_that_is_none_is_refused_at_every_call(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_LEARN_SHARE", share)
    for _ in range(2):
        with pytest.raises(InvalidProblem, match=f"ATTNSWITCH_LEARN_SHARE='{share}': expected a number above 0"):
            attnswitch.attention(*tensors(), policy="learn")
    attnswitch.attention(*tensors())


# -- the share of the time ---------------------------------------------------------------------------------------------


def test_the_worker_is_awake_for_its_share_of_the_time(script: Script) -> None:
    steps, share = script("answer", step=0.1, share=0.25), 0.25
    begun = time.monotonic()
    for length in (20, 40, 80):
        attnswitch.attention(*tensors(length), policy="learn")
    until(lambda: measured("b2.h4.s80.d32.fp32"))
    spans = [tuple(map(float, line.split())) for line in steps.read_text().splitlines()]
    assert len(spans) == 6
    for number, (begin, _) in enumerate(spans[1:], 1):
        awake = sum(end - start for start, end in spans[:number])
        assert awake <= share * (begin - begun)


def test_nothing_begins_in_a_program_that_does_not_run_long_enough(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("answer", share=0.05)
    monkeypatch.setattr(learn, "_START", 5.0)
    attnswitch.attention(*tensors(), policy="learn")
    time.sleep(0.5)
    assert learn._learner is not None
    assert learn._learner._worker is None
    begun = time.monotonic()
    learn.end()  # for which it does not rest to the end
    assert time.monotonic() - begun < 1.0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_is_told_by_explain_and_by_nothing_else(script: Script) -> None:
    script("die")
    for length in (20, 40, 80, 160, 320):
        attnswitch.attention(*tensors(length), policy="learn")
    last = until(lambda: attnswitch.explain("b2.h4.s320.d32.fp32").news.partition("and is not: ")[2])
    assert last == "the process that measures ended with exit code 7"
    assert attnswitch.explain("b2.h4.s20.d32.fp32").news == ""  # it may be what ended it
    assert attnswitch.attention(*tensors(20), policy="learn").shape == (2, 4, 20, 32)


def test_a_worker_that_cannot_start_says_why(script: Script) -> None:
    script("absent")
    attnswitch.attention(*tensors(), policy="learn")
    why = until(lambda: attnswitch.explain(TEXT).news.partition("and is not: ")[2])
    assert why == "the process that measures ended with exit code 1: it has no memory left"


def test_a_worker_that_hangs_is_ended(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script("mute")
    monkeypatch.setattr(learn, "_LONGEST", 2.0)
    attnswitch.attention(*tensors(), policy="learn")
    pid = worker()
    until(lambda: gone(pid))
    until(lambda: attnswitch.explain(TEXT).news == "")  # of which the learner learns a little later


def test_a_fault_of_its_own_is_told_by_explain(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script("answer")

    def fail(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(view, "take", fail)
    attnswitch.attention(*tensors(), policy="learn")
    until(lambda: attnswitch.explain(TEXT).news.endswith("and is not: RuntimeError: no such thing"))


def test_want_of_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch, built: list[object]) -> None:
    """The program may hold the memory that a trial lacks; another may not."""

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(workload, "of", full)
    query, key, value = tensors(55)
    attnswitch.attention(query, key, value, policy="measure")
    assert store.here().read().records == []
    built.clear()
    for _ in range(3):
        attnswitch.attention(query, key, value, policy="measure")
    assert built == []  # it is tried once in a process


def test_plans_are_made_while_wisdom_grows() -> None:
    """Who is reading goes on with what there was."""
    attnswitch.attention(*tensors(), policy="measure")
    known = view.current()
    reading = iter(known.measured("tiled", CPU))
    (record,) = known.measured("tiled", CPU)
    view.take([Untimed(Problem.parse("b1.h1.s9.d8.fp32"), "tiled", "slow", record.signature, view.now())])
    assert list(reading) == [record]
    assert len(list(view.current().measured("tiled", CPU))) == 2


# -- how it ends -------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time, torch, attnswitch
from attnswitch.tune import learn
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
torch.manual_seed(0)
learn._START = 0.0
query, key, value = (torch.randn(2, 4, 64, 32) for _ in range(3))
expected = attnswitch.attention(query, key, value, backend="reference")

def call():
    out = attnswitch.attention(query, key, value)
    assert (out - expected).abs().max() < 1e-5, attnswitch.explain(query, key, value)

def pid():
    while learn._learner is None or learn._learner._worker is None:
        call()
    return learn._learner._worker._process.pid
"""


def program(text: str, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "ATTNSWITCH_POLICY": "learn", "ATTNSWITCH_LEARN_SHARE": "1", **environment}
    command = [sys.executable, "-W", "error", "-c", PROGRAM + text]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


ENDS = {
    "return": "print(pid(), flush=True)",
    "error": "print(pid(), flush=True); raise ValueError('of the program')",
    "at once": "print(pid(), flush=True); os._exit(5)",
    "interrupt": "print(pid(), flush=True)\nwhile True: call()",
    "kill": "print(pid(), flush=True)\nwhile True: call()",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_it_ends_with_the_program(script: Script, how: str) -> None:
    script("mute")
    setup = "learn._WORKER = 'scripted_worker'\n"
    ran = program(setup + ENDS[how], PYTHONPATH=str(SABOTEURS))
    assert ran.stdout is not None
    assert ran.stderr is not None
    pid = int(ran.stdout.readline())
    if how in ("interrupt", "kill"):
        ran.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    try:
        code = ran.wait(30)
    finally:
        ran.kill()
    with ran.stdout, ran.stderr:
        said = ran.stderr.read()
    until(lambda: gone(pid), 20)
    codes = {"return": 0, "error": 1, "at once": 5, "interrupt": -signal.SIGINT, "kill": -signal.SIGKILL}
    assert code == codes[how]
    told = {"error": "ValueError: of the program", "interrupt": "KeyboardInterrupt"}
    assert said.strip().endswith(told.get(how, ""))
    assert bool(said) == (how in told)


@pytest.mark.slow
def test_a_fork_has_a_learner_of_its_own(script: Script) -> None:
    steps = script("answer", step=0.5)
    ran = program(
        """
learn._WORKER = "scripted_worker"
from attnswitch.planning import waiting
first = pid()
forked = os.fork()
if forked == 0:
    alone = (waiting.first(), learn._learner)
    other = tuple(torch.randn(2, 4, 300, 32) for _ in range(3))
    torch.set_num_threads(1)
    attnswitch.attention(*other)
    second = pid()
    while attnswitch.explain(*other).news: time.sleep(0.1)
    print(alone, first != second, attnswitch.explain(*other).backend, flush=True)
    sys.exit(0)
_, status = os.waitpid(forked, 0)
while attnswitch.explain(query, key, value).news: time.sleep(0.1)
print(status, attnswitch.explain(query, key, value).backend)
""",
        PYTHONPATH=str(SABOTEURS),
    )
    out, said = ran.communicate(timeout=60)
    assert (sorted(out.splitlines()), said) == (["(None, None) True tiled", "0 tiled"], "")
    assert len(steps.read_text().splitlines()) == 4


# -- the real thing ----------------------------------------------------------------------------------------------------


def plugged_in(folder: Path, name: str, target: str) -> str:
    """A PYTHONPATH on which a package is installed that has a backend."""
    info = folder / "saboteur-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[attnswitch.backends]\n{name} = {target}\n")
    return os.pathsep.join((str(folder), str(SABOTEURS)))


LOOP = """
from attnswitch.planning.choice import Basis
end = time.monotonic() + 240
while attnswitch.explain(query, key, value).basis is not Basis.MEASURED and time.monotonic() < end:
    for _ in range(20):
        call()
for _ in range(20):
    call()
print(attnswitch.explain(query, key, value).backend)
"""


@pytest.mark.slow
def test_programs_that_loop_end_up_with_the_fastest_that_is_right(tmp_path: Path) -> None:
    """Two at once: what one has measured, the other need not. A backend that is fast and wrong is never chosen."""
    path = plugged_in(tmp_path, "hasty", "saboteurs:Hasty")
    both = [program(LOOP, PYTHONPATH=path) for _ in range(2)]
    said = [ran.communicate(timeout=300) for ran in both]
    assert [err for _, err in said] == ["", ""]
    assert [ran.returncode for ran in both] == [0, 0]
    chosen = {out.strip() for out, _ in said}
    records = store.here().read().records
    assert {(v.backend, v.right) for v in records if isinstance(v, Verdict)} == {("hasty", False)}
    names = [record.backend for record in records if not isinstance(record, Verdict)]
    assert sorted(names) == sorted({*names} - {"hasty"})  # each once
    times = {record.backend: record.ms for record in records if isinstance(record, Time)}
    assert chosen == {min(times, key=lambda name: times[name])}
