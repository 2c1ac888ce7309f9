"""CUDA sources become cubins without a GPU: kept by what they depend on, errors with the compiler's log."""

from __future__ import annotations

import importlib
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnswitch import CompileError

pytest.importorskip("cupy")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
cache = importlib.import_module("attnswitch.backends.cuda.compiling.cache")
sys.path.append(str(Path(__file__).parents[2] / "fixtures"))
cubin = importlib.import_module("cubin")
sources = importlib.import_module("attnswitch.backends.cuda.compiling.sources")

PLAIN = 'extern "C" __global__ void plain(float* x) { x[threadIdx.x] *= FACTOR; }'
#: More numbers than a thread has registers for, indexed so that none can be left out.
HEAVY = """
extern "C" __global__ void heavy(float* x, int n) {
    float a[512];
    for (int i = 0; i < 512; i++) a[i] = x[i * n];
    for (int i = 0; i < n; i++) a[(i * 7) % 512] += x[i];
    for (int i = 0; i < 512; i++) x[i * n + 1] = a[i];
}
"""
#: Two limits, of which one is asked about; a GPU read past the end of a mask by what ptxas made of it.
CLAMPED = """
extern "C" __global__ void clamped(int* x, const int* y, int n, long long step) {
    const int first = 16 * threadIdx.x, count = max(min(16, n - first), 0);
    x[threadIdx.x] = count == 16 && step == 1 ? y[threadIdx.x] + count : count;
}
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    return tmp_path


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.cubin"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_it_compiles_for_gpus_that_are_not_here(arch: str) -> None:
    assert nvrtc.honours(arch)
    assert nvrtc.compiled(PLAIN, arch, ("-DFACTOR=2.0f",))[:4] == b"\x7fELF"


def test_instructions_of_sm_90a_are_there_and_only_there() -> None:
    assert nvrtc.compiled(nvrtc._HOPPER_ONLY, "sm_90a")
    with pytest.raises(CompileError, match=r"wgmma.*not supported on .target 'sm_90'"):
        nvrtc.compiled(nvrtc._HOPPER_ONLY, "sm_90")


def test_a_library_that_compiles_nothing_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its builtins are missing: it is asked for a probe before anything is known of it."""
    library = nvrtc._library()

    def fails(*_: Any) -> None:
        raise library.NVRTCError(7)

    broken = SimpleNamespace(**{name: getattr(library, name) for name in dir(library) if not name.startswith("__")})
    broken.compileProgram = fails
    monkeypatch.setattr(nvrtc, "_library", lambda: broken)
    major, minor = library.getVersion()
    assert nvrtc._asked() == ((major, minor), tuple(library.getSupportedArchs()), False)
    with pytest.raises(CompileError, match=rf"NVRTC {major}\.{minor} could not compile broken\.cu"):
        nvrtc._compile(PLAIN, ("-arch=sm_80",), "broken.cu", "broken.cu")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((8, 99), "sm_89"),
        ((99, 0), None),
    ],
)
def test_a_gpu_gets_its_own_architecture_or_one_that_it_runs(capability: tuple[int, int], arch: str | None) -> None:
    assert nvrtc.architecture(capability) == arch


def test_a_build_is_kept_by_all_that_it_depends_on(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.compiled(PLAIN, "sm_80", ("-DFACTOR=2.0f",))
    assert len(kept(empty_cache)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("it was compiled again"))
        assert nvrtc.compiled(PLAIN, "sm_80", ("-DFACTOR=2.0f",)) == first
    nvrtc.compiled(PLAIN, "sm_80", ("-DFACTOR=3.0f",))
    nvrtc.compiled(PLAIN, "sm_86", ("-DFACTOR=2.0f",))
    nvrtc.compiled(PLAIN + " ", "sm_80", ("-DFACTOR=2.0f",))
    monkeypatch.setattr(sources, "of_gpus", lambda: {"other.cuh": "// a header"})
    nvrtc.compiled(PLAIN, "sm_80", ("-DFACTOR=2.0f",))
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    nvrtc.compiled(PLAIN, "sm_80", ("-DFACTOR=2.0f",))
    assert len(kept(empty_cache)) == 6


def test_many_processes_build_at_once(empty_cache: Path) -> None:
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        building = [pool.submit(nvrtc.compiled, PLAIN, "sm_80", ("-DFACTOR=2.0f",)) for _ in range(8)]
        made = [future.result() for future in building]
    assert len(set(made)) == 1
    assert len(made[0]) > 1000
    assert len(kept(empty_cache)) == 1
    assert not [path for path in empty_cache.rglob("*") if path.is_file() and path.suffix not in (".cubin", ".json")]


def test_half_a_file_is_never_seen(empty_cache: Path) -> None:
    def fail() -> bytes:
        raise CompileError("no")

    with pytest.raises(CompileError):
        cache.kept(("a",), ".cubin", fail)
    assert not kept(empty_cache)


def test_the_log_is_in_the_error() -> None:
    with pytest.raises(CompileError) as error:
        nvrtc.compiled('extern "C" __global__ void k() { nonsense(); }', "sm_80", name="mine.cu")
    for part in ("mine.cu", "nonsense", "-arch=sm_80", "NVRTC"):
        assert part in str(error.value)


def test_the_sources_include_nothing_of_others() -> None:
    for name, text in sources.of_gpus().items():
        for line in text.splitlines():
            if line.startswith("#include"):
                included = line.split('"')[1]
                assert included in sources.files(), f"{name} includes {included}"


# -- what a cubin says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_registers_and_spills_are_read(arch: str) -> None:
    light = cubin.usage(nvrtc.compiled(PLAIN, arch, ("-DFACTOR=2.0f",)))
    heavy = cubin.usage(nvrtc.compiled(HEAVY, arch))
    assert 0 < light.registers < 32
    assert light.local == 0
    assert light.registers < heavy.registers <= 255
    assert heavy.local >= 2048  # the array has no other place


def test_a_clamp_that_loses_an_answer_is_seen() -> None:
    known = {(13, 0): 1, (13, 2): 1, (13, 5): 0}
    if nvrtc.version() in known:
        assert cubin.lost_answers(nvrtc.compiled(CLAMPED, "sm_90a")) == known[nvrtc.version()]
    assert cubin.lost_answers(nvrtc.compiled(HEAVY, "sm_90a")) == 0


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x01" + bytes(80), b"MZ" + bytes(80)])
def test_what_is_no_cubin_is_said(content: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        cubin.usage(content)


def test_usage_is_what_the_assembler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas prints its own count, if asked."""
    library: Any = nvrtc._library()
    program = library.createProgram(HEAVY, "heavy.cu", (), ())
    library.compileProgram(program, ("-arch=sm_90a", "--ptxas-options=-v"))
    log = library.getProgramLog(program)
    used = cubin.usage(library.getCUBIN(program))
    library.destroyProgram(program)
    assert f"Used {used.registers} registers" in log
    assert f"{used.local} bytes stack frame" in log
