"""The court tells each of the hostile kernels by name, and calls none of them right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import hostile
import judging
import pytest

from attnswitch.verify.court import Court, server, sitting
from attnswitch.verify.judge import examine

#: What each is told for: the check, and words of the sentence.
TOLD = {
    "PatchesAbs": r"reference: .* off by more",
    "PatchesAny": r"conduct: it replaced numpy\.any",
    "PatchesAllclose": r"conduct: it replaced numpy\.allclose",
    "PatchesTorch": r"conduct: it replaced torch\.allclose",
    "PatchesAttention": r"conduct: it replaced torch\.nn\.functional\.scaled_dot_product_attention",
    "PatchesTensors": r"conduct: it replaced torch\.Tensor\.__eq__",
    "PatchesBuiltins": r"(conduct: it replaced builtins\.max|crash: its answer is none)",
    "HidesBuiltins": r"conduct: it replaced torch\.nn\.functional\.len",
    "PatchesClocks": r"conduct: it replaced time\.perf_counter",
    "PatchesJson": r"crash: its answer is none",
    "PatchesTheJudge": r"reference: .* off by more",
    "PatchesTheCourt": r"crash: its answer is none: it is to another question",
    "ChangesFolder": r"conduct: it changed the current folder",
    "ChangesUmask": r"conduct: it changed the umask",
    "SilencesNumpy": r"conduct: it changed NumPy's handling of errors",
    "SeedsNumpy": r"conduct: it changed NumPy's random state",
    "SeedsPython": r"conduct: it changed Python's random state",
    "SeedsTorch": r"conduct: it changed torch's random state",
    "LimitsTheJudge": r"conduct: it changed the limits of resources of the process that judges it",
    "LimitsRecursion": r"conduct: it changed the limit of recursion: \d+ became 5000",
    "DefaultsToFloat64": r"conduct: .*it changed torch's default dtype",
    "TakesNoGradients": r"conduct: it changed whether torch takes gradients: True became False",
    "LowersPrecision": r"conduct: it changed torch's precision of float32 products",
    "TakesAllThreads": r"conduct: it changed torch's threads",
    "FlushesDenormals": r"conduct: it changed torch's flushing of denormals",
    "ForbidsFlash": r"conduct: it changed torch's choice of attention",
    "Profiles": r"conduct: it changed the profiler of Python",
    "HandlesSignals": r"conduct: it changed the handlers of signals",
    "CollectsNoGarbage": r"conduct: it changed the collection of garbage",
    "LeavesThread": r"conduct: it left a thread running: late",
    "LeavesTimer": r"conduct: it left a thread running: Thread-",
    "LeavesUnnamed": r"conduct: it left a thread running: one without a name",
    "FinishesLate": r"reference: .* off by more",
    "Forks": r"conduct: it left (a process|\d+ processes) running: a fork of its own",
    "ForksTwice": r"conduct: it left (a process|\d+ processes) running",
    "StartsProgram": r"conduct: it left a process running: sleep 60",
    "LeavesAndRefuses": r"conduct: it left a process running: sleep 60",
    "WantsMemory": r"crash: .*this case is too hard.*, although \d+ MiB could be had on cpu",
    "IsNotThere": r"crash: gone",
    "SaysHalfALetter": r"crash: .*half \? of it",
    "CallsItACompiler": r"conduct: it left a process running: torch/_inductor/compile_worker/__main__.py 60",
    "CallsItATracker": r"conduct: it left a process running: .*python.* -c from multiprocessing.resource_tracker",
    "StopsItself": r"hang: no answer after 4 s; the process was stopped",
    "Hangs": r"hang: no answer after 4 s; the process was running",
    "Segfaults": r"crash: the process died of SIGSEGV",
    "ExitsWell": r"crash: the process ended with exit code 0",
    "KillsItsParent": r"crash: it ended the process that it was forked from",
    "RaisesExit": r"crash: SystemExit: 0 \(harm\)",
    "RaisesInterrupt": r"crash: KeyboardInterrupt",
    "ClosesDescriptors": r"crash: the process ended with exit code 1",
    "ClosesOutput": r"conduct: it changed the descriptors 0 to 2",
    "WritesInputs": r"crash: ValueError: assignment destination is read-only",
    "WritesAndRestores": r"crash: the process died of SIGSEGV, as one does that writes to its inputs",
    "CachesByShape": r"reference: .* off by more",
    "CachesByPointer": r"reference: .* off by more",
    "CachesByFingerprint": r"linearity: ",
    "LeavesItUnwritten": r"reference: ",
    "AsksTorch": r"conduct: it calls torch's own aten::.*attention.*, which is forbidden",
    "MultipliesByTorch": r"conduct: it calls torch's own aten::b?mm, which is forbidden",
    "MultipliesInPlace": r"conduct: it calls torch's own aten::baddbmm_, which is forbidden",
    "ConvolvesByTorch": r"conduct: it calls torch's own aten::.*conv.*, which is forbidden",
    "ForgesAnswer": r"crash: its answer is none: it is to another question",
    "FloodsAnswers": r"crash: its answer is none: it answers more often than it was asked",
    "WritesToAllFiles": r"crash: its answer is none: ",
    "SendsPickle": r"crash: its answer is none: it is not JSON",
    "SendsNumbers": r"crash: its answer is none: it is not JSON",
    "SaysItEnded": r"crash: its answer is none: it says that the process ended, which runs",
    "ReturnsTooMuch": r"crash: .*a result of 134,217,728 bytes",
    "ReturnsNone": r"crash: it answered without an output",
    "ReturnsAnother": r"crash: ",
    "LiesAboutItself": r"crash: .*accumulator is 'float128'",
}


#: Those with a test of their own.
OTHERS = {"CutsInputs", "ErrsOnce", "ExitsAfterwards", "ForksUnmarked"}


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    with server.kept():
        yield


def is_told(name: str, told: Callable[[str, str, bool], list[str]] = judging.told) -> None:
    """Raise an ``AssertionError`` if it is not."""
    found = told(name, TOLD[name], "forbidden" in TOLD[name])
    assert re.match(TOLD[name], found[-1]), f"told for {found}"


def test_every_kernel_of_the_gallery_is_told_for_something() -> None:
    assert set(hostile.GALLERY) == set(TOLD) | OTHERS
    assert len(TOLD) >= 40


@pytest.mark.parametrize("name", TOLD)
def test_a_hostile_kernel_is_told_by_name(name: str) -> None:
    is_told(name)


@pytest.fixture(scope="module")
def judge() -> Iterator[ProcessPoolExecutor]:
    """A process in which courts may begin."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in server.PLACE.items():
            patch.setenv(*variable)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool


#: Those that meet what a fork has of its parent.
FORKED = ("ClosesDescriptors", "ForksTwice", "KillsItsParent", "StopsItself", "WritesToAllFiles")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FORKED else pytest.mark.slow) for name in TOLD]
)
def test_a_hostile_kernel_is_told_where_the_court_is_forked(name: str, judge: ProcessPoolExecutor) -> None:
    is_told(name, lambda *asked: judge.submit(judging.told_by_a_fork, *asked).result())


def test_a_process_without_a_mark_is_told_where_the_judge_starts_no_others(judge: ProcessPoolExecutor) -> None:
    """By its command line, or what it has of one as it comes to be."""
    asked = "ForksUnmarked", "conduct", False
    found = judge.submit(judging.told_by_a_fork, *asked).result()
    assert re.match(r"conduct: it left a process running: (sleep 61\.5|\[|a fork)", found[-1]), found
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert b"61.5" not in entry.read_bytes()


def test_a_kernel_that_behaves_is_right() -> None:
    with sitting(Court(("tiled", "reference"), timeout=20.0)):
        outcomes = [outcome for case in judging.CASES for outcome in examine(case, ("tiled", "reference"))]
    assert {outcome.verdict for outcome in outcomes} == {"verified"}
    assert all("conduct" in outcome.checks for outcome in outcomes)


def test_nothing_that_was_left_running_outlives_the_court() -> None:
    with server.kept():
        assert any("it left a process running" in sentence for sentence in judging.told("ForksTwice", "conduct"))
        last = server.taken(None)
        last.end()
    assert judging.outlived(last.mark) == []


def test_what_was_seen_is_not_held_against_the_next_case() -> None:
    """Its first answer is wrong, and it changes the umask with it; then it behaves."""
    target = "hostile:ErrsOnce"
    with sitting(Court((target,), timeout=4.0)):
        outcomes = [examine(case, (target,))[0] for case in judging.CASES]
    assert [outcome.failure and outcome.failure.check for outcome in outcomes] == ["reference", None, None]


def test_a_candidate_that_ended_between_two_questions_is_told_so() -> None:
    target = "hostile:ExitsAfterwards"
    with sitting(Court((target,), timeout=4.0)):
        found = []
        for case in judging.CASES:
            (outcome,) = examine(case, (target,))
            found.append(outcome.failure.message if outcome.failure else outcome.verdict)
            time.sleep(0.5)
    assert {text.removeprefix("it failed while planning: Gone: ") for text in found} <= {
        "verified",
        "the process died of SIGALRM",
    }
    assert any("SIGALRM" in text for text in found)


def test_files_that_are_cut_short_end_nobody_but_the_candidate() -> None:
    target = "hostile:CutsInputs"
    with sitting(Court((target,), timeout=4.0)):
        outcomes = [examine(case, (target,))[0] for case in judging.CASES]
    assert {outcome.verdict for outcome in outcomes} <= {"verified", "mismatch"}
