"""The wheel: it holds the tree and nothing else, and it works where the tree is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"attnswitch": "attnswitch", "backends": "attnswitch/backends", "cli": "attnswitch/cli"}
DATA = {
    "attnswitch/bench/peaks.toml",
    "attnswitch/py.typed",
    *(f"attnswitch/{path.relative_to(ROOT)}" for path in (ROOT / "backends/cuda/src").rglob("*.*")),
    "attnswitch/backends/cuda/compiling/usual.toml",
    "attnswitch/backends/cuda/portable/registers.json",
    "attnswitch/backends/sdpa/divergences.toml",
    "attnswitch/bench/suites.toml",
    "attnswitch/planning/forecast/sm90.npz",
    "attnswitch/tune/catalogue.toml",
    "attnswitch/tune/models.toml",
    "attnswitch/verify/drawing/activations.npz",
    "attnswitch/verify/demands/profiles.toml",
    "attnswitch/verify/mutants/mutants.toml",
    "attnswitch/verify/report/page.html.j2",
}


def python(script: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a script, with only ``path`` before what is installed; warnings are errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def build(source: Path, kind: str, target: Path) -> Path:
    """Build by the hook that installers call (PEP 517), without a network: setuptools is what the tests run with."""
    target.mkdir()
    script = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    python(script, f"build_{kind}", str(target), cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from: building leaves traces."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "wheel", tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into a folder, which for pure Python is to unpack it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def wanted() -> set[str]:
    """Files of the tree by their names once installed."""
    return DATA | {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }


def test_the_wheel_holds_the_tree(wheel: Path) -> None:
    assert names(wheel) == wanted()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_source_distribution_makes_the_same_wheel(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build(source, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names(build(unpacked, "wheel", tmp_path / "dist")) == wanted()


def test_packs_that_are_there_go_into_the_wheel(source: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(source, tmp_path / "tree")
    packs = tree / "backends/cuda/packs"
    packs.mkdir()
    (packs / "sm_90a.zip").write_bytes(b"cubins")
    assert names(build(tree, "wheel", tmp_path / "dist")) == wanted() | {"attnswitch/backends/cuda/packs/sm_90a.zip"}


def test_the_wheel_names_its_command_and_licence(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "attnswitch = attnswitch.cli.app:main" in texts["entry_points.txt"].splitlines()
    assert "Apache License" in texts["LICENSE"]
    assert f"Version: {project['version']}" in texts["METADATA"].splitlines()
    for dependency in project["dependencies"]:
        assert f"Requires-Dist: {dependency}" in texts["METADATA"].splitlines()


def test_the_wheel_works_elsewhere(site: Path, tmp_path: Path) -> None:
    script = """
import sys, attnswitch, attnswitch.cli.app, attnswitch.verify
from attnswitch.machine import registry
assert all(not isinstance(registry.load(name), str) for name in registry.names())
print(attnswitch.plan("b1.h2.s8.d8.fp32.causal").backend in registry.names())
print(attnswitch.verify.check(attnswitch.verify.Case(data="activations"), "tiled").verdict)
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] in ("attnswitch", "backends", "cli"):
        print(module.__file__)
"""
    plan, verdict, *files = python(script, cwd=tmp_path, path=site).splitlines()
    assert (plan, verdict) == ("True", "verified")
    assert len(files) > 30
    for file in files:
        assert Path(file).is_relative_to(site / "attnswitch")


@pytest.mark.slow
def test_the_command_works_elsewhere(site: Path, tmp_path: Path) -> None:
    script = """
import sys
from attnswitch.cli.app import main
sys.argv = ["attnswitch", "verify", "--backend", "reference", "--device", "cpu", "--examples", "5", "--no-corpus"]
main()
"""
    assert "every result is within its error bound" in python(script, cwd=tmp_path, path=site)
    assert list(tmp_path.iterdir()) == []
