"""Kernels that are compiled before a call needs them, side by side: what fails or is alone is left to the call."""

from __future__ import annotations

import functools
import importlib
import threading
from pathlib import Path
from typing import Any

import pytest

from attnswitch import CompileError
from attnswitch.machine import builds, registry
from attnswitch.machine.builds import side_by_side
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

H200 = Device.named("h200")


def test_builds_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "cores", lambda: 2)
    barrier = threading.Barrier(2)
    side_by_side([functools.partial(barrier.wait, 10)] * 2)
    assert not barrier.broken


def test_no_more_run_at_once_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "cores", lambda: 2)
    running, most = 0, 0
    lock, pause = threading.Lock(), threading.Event()

    def build() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pause.wait(0.005)
        with lock:
            running -= 1

    side_by_side([build] * 8)
    assert most == 2


def test_one_that_fails_stops_no_other() -> None:
    done: list[int] = []

    def fails() -> None:
        raise ValueError("no kernel")

    side_by_side([fails, functools.partial(done.append, 1), fails, functools.partial(done.append, 2)])
    assert sorted(done) == [1, 2]


def test_one_alone_is_left_to_the_call() -> None:
    done: list[int] = []
    side_by_side([functools.partial(done.append, 1)])
    side_by_side([])
    assert done == []


# -- what cuda builds --------------------------------------------------------------------------------------------------


def kernel_of(text: str) -> Any:
    problem, backend = Problem.parse(text), registry.loaded("cuda")
    return backend.compile(problem, H200, next(backend.configs(problem, H200)))


def test_a_training_step_needs_nothing_more_once_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    run = importlib.import_module("attnswitch.backends.cuda.launching.run")
    cubins = importlib.import_module("attnswitch.backends.cuda.compiling.cubins")
    nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
    monkeypatch.setattr(run, "_built", set())
    kernel = kernel_of("b1.h1.s16.d16.fp32.grad")
    assert len(kernel.builds()) == len(kernel.variants()) == 4
    side_by_side(kernel.builds())
    assert kernel.builds() == []
    assert kernel_of("b2.h4.s16.d16.fp32.grad").builds() == []
    monkeypatch.setattr(nvrtc, "_compile", None)  # nothing is compiled again
    for variant in kernel.variants():
        assert next(cubins.cubins(variant, H200.capability))[:4] == b"\x7fELF"


def test_what_does_not_compile_is_told_of_by_the_call_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    run = importlib.import_module("attnswitch.backends.cuda.launching.run")
    cubins = importlib.import_module("attnswitch.backends.cuda.compiling.cubins")
    sources = importlib.import_module("attnswitch.backends.cuda.compiling.sources")
    monkeypatch.setattr(run, "_built", set())
    broken = {name: text + "\n#error broken" for name, text in sources.of_gpus().items()}
    monkeypatch.setattr(sources, "of_gpus", lambda: broken)
    kernel = kernel_of("b1.h1.s16.d16.fp32.grad")
    side_by_side(kernel.builds())
    assert len(kernel.builds()) == 4
    with pytest.raises(CompileError, match="broken"):
        next(cubins.cubins(kernel.variants()[0], H200.capability))


def test_threads_that_want_one_file_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    cache = importlib.import_module("attnswitch.backends.cuda.compiling.cache")
    made: list[int] = []
    barrier, found = threading.Barrier(4), list[bytes]()

    def make() -> bytes:
        made.append(1)
        threading.Event().wait(0.05)
        return b"content"

    def want() -> None:
        barrier.wait()
        found.append(cache.kept(("same",), ".so", make))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [b"content"] * 4
