"""What becomes of a case: which backend answers for it, and what is no fault of a kernel."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnswitch import Device, Problem
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Inputs, Kernel
from attnswitch.verify import Case, judge, room
from attnswitch.verify.drawing.case import Placing
from attnswitch.verify.drawing.placings import FAR
from attnswitch.verify.judge import check, examine
from attnswitch.verify.outcome import AUTO, Failure, Outcome
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.signature import Signature, sign

CASE = Case.of(Problem.parse("b1.h2.s16.d8.fp32.grad")).replace(library="numpy")


def remember(backend: str, problem: Problem, ms: float) -> None:
    signature = sign(backend, Device.cpu())
    assert isinstance(signature, Signature)
    view.remember([Time(problem, backend, "", ms, ms, ms, 30, 2, signature, "2026-11-24T10:00:00")])


def test_one_backend_answers_for_output_and_gradients_of_arrays_without_autograd() -> None:
    """The choice for a forward alone may be another: found on an H100, where cuDNN's bits were taken for cuda's."""
    step = CASE.problem()
    forward = step.replace(grads="")
    for backend, of_forward, of_step in (("sdpa-flash", 5.0, 5.0), ("reference", 1.0, 9.0), ("tiled", 9.0, 1.0)):
        remember(backend, forward, of_forward)
        remember(backend, step, of_step)
    outcome = check(CASE, AUTO)
    assert (outcome.verdict, outcome.chosen) == ("verified", "tiled")
    assert check(CASE.replace(grads=""), AUTO).chosen == "reference"


@pytest.mark.parametrize(
    ("failure", "sort"),
    [
        (Failure("reference", "2 of 8 are off", "out", (0,), 1.0, 2.0, 0.1), "out"),
        (Failure("reference", "8 of 8 are off", "out", (0,), math.nan, 2.0, 0.1), "out, not finite"),
        (Failure("reference", "8 of 8 are off", "lse", (0,), math.inf, 2.0, 0.1), "lse, not finite"),
        (Failure("reference", "8 of 8 are off", "lse", (0,), 3.0, -math.inf, 0.1), "lse"),
        (Failure("reference", "8 of 8 are off", "lse", (0,), math.nan, -math.inf, 0.1), "lse"),
        (Failure("crash", "ValueError: heads of 24: not taken (launch)"), "ValueError"),
        (Failure("crash", "it failed while planning: ZeroDivisionError: halved"), ""),
        (Failure("crash", "it was ended by SIGSEGV"), ""),
        (Failure("form", "ValueError: of a message"), ""),
    ],
)
def test_failures_of_a_check_are_told_apart(failure: Failure, sort: str) -> None:
    assert Outcome(CASE, "one", "cpu", "mismatch", failure=failure).kind == ("cpu", "one", failure.check, sort)


class _Hungry(Kernel):
    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        raise RuntimeError(Hungry.said)


class Hungry(Backend):
    """Asks for more memory than there is."""

    name = f"{__name__}:Hungry"
    library = "numpy"
    said = ""

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from ()

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return _Hungry()


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("Triton Error [CUDA]: out of memory", "refused"),
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", "refused"),
        ("cuLaunchKernelEx: CUDA_ERROR_OUT_OF_MEMORY", "refused"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.", "refused"),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.", "refused"),
        ("CUDA error: an illegal memory access was encountered", "mismatch"),
    ],
)
def test_a_want_of_memory_is_no_fault_of_a_kernel(said: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none to be had."""
    monkeypatch.setattr(Hungry, "said", said)
    monkeypatch.setattr(room, "had", lambda *_: "")
    outcome = check(CASE.replace(grads=""), f"{__name__}:Hungry")
    assert outcome.verdict == verdict
    if verdict == "refused":
        assert outcome.reasons[0].startswith("out of memory")
        assert "\n" not in outcome.reasons[0]


def test_who_wants_memory_that_there_is_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked twice: others may have had it. A long case may take more than is there."""
    times: list[object] = []

    def wants(_: object, inputs: Inputs) -> tuple[Any, Any]:
        times.append(inputs)
        raise MemoryError("never enough")

    monkeypatch.setattr(_Hungry, "forward", wants)
    outcome = check(CASE.replace(grads=""), f"{__name__}:Hungry")
    assert (outcome.verdict, len(times)) == ("mismatch", 2)
    assert outcome.failure is not None
    assert outcome.failure.check == "crash"
    assert "MemoryError: never enough (wants), although 1 MiB could be had on cpu" in outcome.failure.message
    long = Case(seq_q=20_000, seq_k=20_000)
    assert not room.had(long, "cpu")
    monkeypatch.setattr(room, "_pages", lambda _: 4096)
    assert not room.had(CASE, "cpu")


def test_who_wants_memory_in_a_check_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there was enough for the first call."""
    right, times = registry.loaded("reference"), []
    case = CASE.replace(grads="", check="repeat")

    def then(_: object, inputs: Inputs) -> Any:
        times.append(1)
        if len(times) > 1:
            raise MemoryError("not again")
        problem = case.problem()
        return right.compile(problem, Device.cpu(), next(right.configs(problem, Device.cpu()))).forward(inputs)

    monkeypatch.setattr(_Hungry, "forward", then)
    outcome = check(case, f"{__name__}:Hungry")
    assert (outcome.verdict, len(times)) == ("mismatch", 3)
    assert outcome.failure is not None
    assert "not again (then), although 1 MiB could be had" in outcome.failure.message
    times.clear()
    monkeypatch.setattr(room, "had", lambda *_: "")
    outcome = check(case, f"{__name__}:Hungry")
    assert (outcome.verdict, outcome.starved) == ("refused", True)


def test_nothing_of_the_attempt_before_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel had when it found no memory is free again when it runs once more."""
    right, before = registry.loaded("reference"), list[Any]()

    def once(_: object, inputs: Inputs) -> Any:
        room_of_its_own = np.zeros(8)
        if not before:
            before.append(weakref.ref(room_of_its_own))
            raise MemoryError("busy")
        assert before[0]() is None
        problem = CASE.replace(grads="").problem()
        return right.compile(problem, Device.cpu(), next(right.configs(problem, Device.cpu()))).forward(inputs)

    monkeypatch.setattr(_Hungry, "forward", once)
    assert check(CASE.replace(grads=""), f"{__name__}:Hungry").verdict == "verified"


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_that_lie_far_apart_take_little_memory(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GiB for each backend, and two workers at a time, were more than a machine of 24 had."""
    most = 0
    attempt = judge._attempt

    def measured(*given: Any) -> Any:
        nonlocal most
        made = attempt(*given)
        most = max(most, resident())
        return made

    monkeypatch.setattr(judge, "_attempt", measured)
    far = Case(seq_q=2, seq_k=65, dtype="float16", library=library, placing=Placing(value=FAR), grads="qkv")
    examine(far.replace(placing=Placing()), ("tiled", "sdpa-flash", AUTO))
    before, most = resident(), 0
    outcomes = examine(far, ("tiled", "sdpa-flash", AUTO))
    assert {outcome.verdict for outcome in outcomes} <= {"verified", "refused"}
    assert most - before < 2**29


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_who_finds_memory_the_second_time_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    right, times = registry.loaded("reference"), []

    def once(_: object, inputs: Inputs) -> Any:
        times.append(inputs)
        if len(times) == 1:
            raise MemoryError("not yet")
        problem = CASE.replace(grads="").problem()
        return right.compile(problem, Device.cpu(), next(right.configs(problem, Device.cpu()))).forward(inputs)

    monkeypatch.setattr(_Hungry, "forward", once)
    outcome = check(CASE.replace(grads=""), f"{__name__}:Hungry")
    assert outcome.verdict == "verified"
