"""Packs: kernels that were compiled ahead are taken in place of compiling, and nothing else is."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnswitch import CompileError, Problem
from attnswitch.machine import registry
from attnswitch.machine.device import KNOWN, Device
from attnswitch.wisdom import signature
from attnswitch.wisdom.signature import sign

pytest.importorskip("cupy")
app = importlib.import_module("attnswitch.cli.app").app
ahead = importlib.import_module("attnswitch.backends.cuda.compiling.ahead")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
cubins = importlib.import_module("attnswitch.backends.cuda.compiling.cubins")
families = importlib.import_module("attnswitch.backends.cuda.families")
nvrtc = importlib.import_module("attnswitch.backends.cuda.compiling.nvrtc")
packs = importlib.import_module("attnswitch.backends.cuda.compiling.packs")
run = importlib.import_module("attnswitch.backends.cuda.launching.run")

H200, A10 = Device.named("h200"), Device.named("a10")
SMALL = Problem.parse("b1.h1.s16.d32.fp32.grad")
CACHES = (
    packs._opened,
    cubins.packed,
    backend._unavailable,
    nvrtc.unavailable,
    nvrtc._facts,
    nvrtc._remembered,
    families._missing,
)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(packs, "OWN", tmp_path / "own")
    monkeypatch.setattr(ahead, "usual", lambda: iter([SMALL]))
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in (*CACHES, signature._sign):
        cached.cache_clear()


def packed(*devices: Device, folder: Path | None = None) -> list[Any]:
    return list(registry.loaded("cuda").pack(devices, folder, lambda *_: None))


def kernels(problem: Problem, device: Device) -> tuple[Any, ...]:
    cuda: Any = registry.loaded("cuda")
    found: tuple[Any, ...] = cuda.compile(problem, device, next(cuda.configs(problem, device))).variants()
    return found


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of NVRTC."""
    asked: list[str] = []
    cubin = nvrtc.cubin

    def ask(variant: Any, arch: str) -> bytes:
        asked.append(arch)
        found: bytes = cubin(variant, arch)
        return found

    monkeypatch.setattr(nvrtc, "cubin", ask)
    return asked


@pytest.mark.parametrize("own", [False, True])
def test_a_pack_gives_what_would_be_compiled(own: bool, compiles: list[str]) -> None:
    (pack,) = packed(H200, folder=packs.OWN if own else None)
    assert pack.path == (packs.OWN if own else packs.cached()) / "sm_90a.zip"
    assert (pack.arch, pack.kernels, len(compiles)) == ("sm_90a", 4, 4)
    variants = kernels(SMALL, H200)
    taken = [next(cubins.cubins(variant, (9, 0))) for variant in variants]
    assert len(compiles) == 4
    assert taken == [nvrtc.cubin(variant, "sm_90a") for variant in variants]
    assert run.builds(variants, (9, 0)) == []


def test_what_a_pack_lacks_is_compiled(compiles: list[str]) -> None:
    packed(H200)
    del compiles[:]
    other = kernels(SMALL.replace(softcap=3.0), H200)[0]
    assert next(cubins.cubins(other, (9, 0)))[:4] == b"\x7fELF"
    assert compiles == ["sm_90a"]
    assert next(cubins.cubins(kernels(SMALL, A10)[0], (8, 6)))[:4] == b"\x7fELF"
    assert compiles == ["sm_90a", "sm_86"]


def test_kernels_of_other_sources_are_not_taken(compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    packed(H200)
    del compiles[:]
    cubins.packed.cache_clear()
    monkeypatch.setattr(nvrtc, "headers", lambda: "others")
    next(cubins.cubins(kernels(SMALL, H200)[0], (9, 0)))
    assert compiles == ["sm_90a"]


def test_gpus_of_8_6_and_8_9_take_what_is_compiled_for_8_0(compiles: list[str]) -> None:
    (pack,) = packed(A10, Device.named("l4"), Device.named("a100"))
    assert pack.arch == "sm_80"
    del compiles[:]
    for capability in ((8, 0), (8, 6), (8, 9)):
        next(cubins.cubins(kernels(SMALL, A10)[0], capability))
    assert compiles == []


def test_another_gpu_of_the_architecture_adds_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = SMALL.replace(dim_qk=128, dim_v=128, dtype="float32", grads="")
    monkeypatch.setattr(ahead, "usual", lambda: iter([wide]))
    a100 = Device.named("a100")
    other = [variant for variant in kernels(wide, A10) if variant not in kernels(wide, a100)]
    assert other
    one, both = packed(a100)[0].kernels, packed(A10)[0].kernels
    assert both == one + len(other)
    assert all(cubins.packed(variant, (8, 0)) for variant in (*kernels(wide, a100), *kernels(wide, A10)))
    monkeypatch.setattr(nvrtc, "headers", lambda: "others")
    assert packed(A10)[0].kernels == len(kernels(wide, A10))


def test_the_same_kernels_are_the_same_bytes(tmp_path: Path) -> None:
    paths = tmp_path / "one.zip", tmp_path / "two.zip"
    packs.write(paths[0], "NVRTC 1.2", "sources", {"b": b"second", "a": b"first"})
    packs.write(paths[1], "NVRTC 1.2", "sources", {"a": b"first", "b": b"second"})
    assert paths[0].read_bytes() == paths[1].read_bytes()
    pack = packs.Pack(paths[0])
    assert (pack.compiler, len(pack), pack.take("a"), "c" in pack) == ("NVRTC 1.2", 2, b"first", False)


def test_a_kernel_that_is_not_what_was_put_in_is_compiled(compiles: list[str]) -> None:
    (pack,) = packed(H200)
    with zipfile.ZipFile(pack.path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(pack.path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content if name == "index.json" else content[:-1] + b"?")
    packs._opened.cache_clear()
    del compiles[:]
    with pytest.warns(RuntimeWarning, match=r"sm_90a.zip: .* is damaged; its kernels are compiled instead"):
        next(cubins.cubins(kernels(SMALL, H200)[0], (9, 0)))
    assert compiles == ["sm_90a"]


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive at all"])
def test_a_damaged_pack_is_told_of_once(content: bytes, compiles: list[str]) -> None:
    path = packs.cached() / "sm_90a.zip"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="`attnswitch build` makes it anew") as warned:
        taken = [next(cubins.cubins(variant, (9, 0))) for variant in kernels(SMALL, H200)]
    assert len(taken) == 4
    assert len(warned) == 1
    assert compiles == ["sm_90a"] * 4


# -- without NVRTC -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none, with an H200."""

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "_library", missing)
    monkeypatch.setattr(backend, "_no_gpu", lambda: None)
    for path in packs.cached().parent.rglob("*"):
        if path.is_file() and path.suffix != ".zip":
            path.unlink()
    for cached in CACHES:
        cached.cache_clear()


HERE = Device("cuda", "NVIDIA H200", (9, 0), 132, H200.memory, H200.shared_memory, present=True)


def test_without_a_compiler_a_pack_is_enough(request: pytest.FixtureRequest) -> None:
    packed(H200)
    request.getfixturevalue("no_nvrtc")
    cuda = registry.loaded("cuda")
    assert cuda.unavailable() is None
    assert cuda.supports(SMALL, HERE) == ()
    (reason,) = cuda.supports(SMALL.replace(softcap=3.0), HERE)
    assert "no pack has its kernels: NVRTC, which compiles the kernels, cannot be loaded" in reason
    assert next(cubins.cubins(kernels(SMALL, H200)[0], (9, 0)))[:4] == b"\x7fELF"
    huge = SMALL.replace(seq_q=4 * 10**9, seq_k=4 * 10**9)
    assert not any("pack" in reason for reason in cuda.supports(huge, HERE))
    with pytest.raises(CompileError, match=r"forward float32 .*generic.*libnvrtc\.so\.13"):
        next(cubins.cubins(kernels(SMALL.replace(softcap=3.0), H200)[0], (9, 0)))


@pytest.mark.usefixtures("no_nvrtc")
def test_without_both_it_says_what_to_install() -> None:
    assert "libnvrtc.so.13" in str(registry.loaded("cuda").unavailable())
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.13"):
        packed(H200)


def test_the_hopper_family_needs_no_compiler_where_there_is_a_pack(request: pytest.FixtureRequest) -> None:
    half = Problem.parse("b4.h16.s2048.d64.bf16")
    packs.write(packs.cached() / "sm_90a.zip", "NVRTC 1.2", "sources", {})
    request.getfixturevalue("no_nvrtc")
    assert families.against_hopper(half, HERE) == ()


# -- what NVRTC says of itself -----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="which file is loaded is read from /proc")
def test_what_is_known_of_nvrtc_is_kept_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> None:
        nvrtc._facts.cache_clear()
        nvrtc._remembered.cache_clear()

    assert not nvrtc.known()
    version, hopper = nvrtc.version(), nvrtc.honours("sm_90a")
    again()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_library", lambda: pytest.fail("it was loaded"))
        assert nvrtc.known()
        assert (nvrtc.version(), nvrtc.honours("sm_90a")) == (version, hopper)
    again()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    assert not nvrtc.known()
    assert nvrtc.version() == version


@pytest.mark.skipif(sys.platform != "linux", reason="which file is loaded is read from /proc")
def test_names_of_any_bytes_may_be_mapped(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.bin"
    with open(path, "wb") as written:
        written.write(b"x" * 4096)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert nvrtc.unavailable() is None
    assert nvrtc._kept().exists()


def test_a_library_that_is_gone_since_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.version()

    def gone() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(nvrtc, "_library", gone)
    with pytest.raises(CompileError, match="cannot be loaded: undefined symbol"):
        next(cubins.cubins(kernels(SMALL, H200)[0], (9, 0)))


@pytest.mark.parametrize("kept", ["", "[]", "{}", '{"file": null, "surroundings": []}'])
def test_what_is_not_understood_is_asked_again(kept: str) -> None:
    path = nvrtc._kept()
    path.parent.mkdir(parents=True)
    path.write_text(kept)
    assert not nvrtc.known()
    assert nvrtc.version() == tuple(nvrtc._library().getVersion())


# -- wisdom ------------------------------------------------------------------------------------------------------------


def signed(device: Device) -> Any:
    signature._sign.cache_clear()
    packs._opened.cache_clear()
    return sign("cuda", device)


def repacked(path: Path, compiler: str, sources: str = "") -> None:
    pack = packs.Pack(path)
    packs.write(path, compiler, sources or pack.sources, {digest: pack.take(digest) for digest in pack})


def test_wisdom_holds_for_the_compiler_of_the_pack() -> None:
    here, elsewhere = replace(H200, present=True), replace(A10, present=True)
    before, other = signed(here), signed(elsewhere)
    assert dict(before.versions)["kernels"] == nvrtc.full_name()
    packed(H200)
    assert signed(here) == before  # the same kernels, which need no compiling
    path = packs.cached() / "sm_90a.zip"
    repacked(path, "NVRTC 99.1")
    changed = signed(here)
    assert changed.source == before.source
    assert re.search(r"measured with kernels NVRTC \d+\.\d+, and here it is NVRTC 99\.1", before.differs(changed))
    assert signed(elsewhere) == other  # of another architecture
    repacked(path, "NVRTC 99.1", "of other sources")
    assert signed(here) == before  # its kernels are never taken


def test_a_pack_that_grows_is_no_other() -> None:
    here = replace(H200, present=True)
    packed(H200)
    before = signed(here)
    packed(H200, replace(H200, name="H100"))
    assert signed(here) == before


def test_a_pack_of_another_compiler_is_not_mixed_with() -> None:
    packed(H200)
    path = packs.cached() / "sm_90a.zip"
    kernels = {digest: packs.Pack(path).take(digest) for digest in packs.Pack(path)}
    packs.write(path, "NVRTC 99.1", nvrtc.headers(), kernels | {"another": b"of that compiler"})
    packed(H200)
    assert {*packs.Pack(path)} == {*kernels}
    assert packs.Pack(path).compiler == nvrtc.full_name()


def test_beside_a_pack_nvrtc_is_not_loaded_to_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    packed(H200)
    monkeypatch.setattr(nvrtc, "_facts", lambda: pytest.fail("it was asked"))
    assert "kernels" in dict(signed(replace(H200, present=True)).versions)


def test_without_any_compiler_there_is_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC")
    assert "kernels" not in dict(signed(replace(H200, present=True)).versions)
    assert "kernels" not in dict(signed(Device.cpu()).versions)


def test_a_backend_that_cannot_tell_is_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Device) -> dict[str, str]:
        raise OSError("gone")

    monkeypatch.setattr(registry.loaded("cuda"), "toolchain", broken)
    assert "cannot say what compiled its kernels: OSError: gone" in str(signed(replace(H200, present=True)))


# -- launches ----------------------------------------------------------------------------------------------------------


def test_where_the_driver_does_not_know_a_pack_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []

    def load(cubin: bytes) -> int:
        loaded.append(cubin)
        if cubin == b"newer":
            raise run.driver.DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return 7

    variant = kernels(SMALL, H200)[0]
    monkeypatch.setattr(run.driver, "load", load)
    monkeypatch.setattr(cubins, "cubins", lambda *_: iter([b"newer", b"own"]))
    assert run._module(variant, (9, 0)) == 7
    assert loaded == [b"newer", b"own"]
    monkeypatch.setattr(cubins, "cubins", lambda *_: iter([b"newer"]))
    with pytest.raises(run.driver.DriverError):
        run._module(variant, (9, 0))


# -- the usual, and the command ----------------------------------------------------------------------------------------


def test_the_usual_problems_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cuda, usual = registry.loaded("cuda"), list(ahead.usual())
    assert len(usual) == len(set(usual)) > 80
    for device in (device for device in map(Device.named, KNOWN) if (device.capability or (0, 0)) >= (8, 0)):
        refused = [problem for problem in usual if cuda.supports(problem, device)]
        # Hopper's kernel alone has room for wide heads.
        assert refused == [p for p in usual if p.dim_qk > 256 and device.capability != (9, 0)]


def test_the_command_builds_packs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["build", "--device", "h200", "--device", "a10", "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    built = json.loads(ran.output)
    assert [(pack["arch"], pack["kernels"]) for pack in built] == [("sm_90a", 4), ("sm_80", 4)]
    assert {path.name for path in out.iterdir()} == {"sm_90a.zip", "sm_80.zip"}
    for pack in built:
        assert pack["bytes"] > pack["compressed"] == Path(pack["path"]).stat().st_size
    assert not packs.cached().exists()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["cpu"], "expected an NVIDIA GPU, by one of .*h200"),
        (["all", "abacus"], "'abacus' is not known"),
        (["h200", "v100"], "no kernels for .*V100.*: .*needs compute capability 7.5"),
    ],
)
def test_the_command_says_which_devices_there_are(devices: list[str], said: str, compiles: list[str]) -> None:
    ran = CliRunner().invoke(app, ["build", *(word for device in devices for word in ("--device", device))])
    assert ran.exit_code != 0
    assert re.search(said, ran.output + str(ran.exception))
    assert compiles == []


def test_the_command_finds_out_beforehand_that_it_cannot_write(tmp_path: Path, compiles: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    ran = CliRunner().invoke(app, ["build", "--device", "all", "--device", "h200", "--out", str(file)])
    assert isinstance(ran.exception, FileExistsError)
    assert compiles == []


@pytest.mark.parametrize("what", ["pack", "folder"])
def test_a_pack_that_another_user_may_have_written_is_not_used(
    what: str, tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (pack,) = packed(H200)
    del compiles[:]
    packs._opened.cache_clear()
    (pack.path if what == "pack" else tmp_path).chmod(0o777)
    told = pytest.warns(RuntimeWarning, match="can be written by other users") if what == "pack" else nullcontext()
    with told:
        assert next(cubins.cubins(kernels(SMALL, H200)[0], (9, 0)))[:4] == b"\x7fELF"
    assert compiles == ["sm_90a"]
    if what == "folder":
        with pytest.raises(CompileError, match="can be written by other users: nothing compiled is kept there"):
            packed(H200)
