"""The source tree against the package: nothing is left out of the wheel, and the core knows no backend by import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
#: Where the packages lie in the tree.
FOLDERS = {"attnswitch": "attnswitch", "attnswitch.backends": "backends", "attnswitch.cli": "cli"}


def modules() -> dict[str, Path]:
    """Every module by its name once installed; a package goes by the name of its folder."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()
#: What several backends share, which is none itself.
OWN = "attnswitch.backends.own"
BACKENDS = [name for name in MODULES if name.startswith("attnswitch.backends.")]
CORE = [name for name in MODULES if not name.startswith("attnswitch.backends")]


def imports(name: str) -> Iterator[str]:
    """Absolute names of what a module imports anywhere in it, functions and TYPE_CHECKING included."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parent, *([base] if base else [])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_the_packages_listed_are_the_folders_there_are() -> None:
    there = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(there)
    assert SETUPTOOLS["packages"] == sorted(SETUPTOOLS["packages"])
    assert SETUPTOOLS["package-dir"] == {name: folder for name, folder in FOLDERS.items() if name != "attnswitch"}


def test_every_folder_with_modules_is_a_package() -> None:
    for path in MODULES.values():
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


@pytest.mark.parametrize(
    "pattern",
    [
        "py.typed",
        "bench/peaks.toml",
        "bench/suites.toml",
        "planning/forecast/sm90.npz",
        "tune/catalogue.toml",
        "tune/models.toml",
        "verify/drawing/activations.npz",
        "verify/mutants/mutants.toml",
        "verify/report/page.html.j2",
    ],
)
def test_data_files_are_listed(pattern: str) -> None:
    """setuptools takes what pyproject.toml lists, for the package that it is listed under."""
    path = PurePosixPath("attnswitch") / pattern
    assert (ROOT / path).is_file()
    listed = [
        PurePosixPath(*package.split("."), *PurePosixPath(glob).parts)
        for package, globs in SETUPTOOLS["package-data"].items()
        for glob in globs
    ]
    assert any(path.match(str(glob)) for glob in listed)


def test_other_files_in_the_packages_are_listed() -> None:
    """Whatever is not Python, tests and caches apart, is data that somebody will miss in the wheel."""
    names = {glob.rpartition("/")[2] for globs in SETUPTOOLS["package-data"].values() for glob in globs}
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".md"):
                assert any(path.match(name) for name in names), path


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_backend(name: str) -> None:
    assert [target for target in imports(name) if f"{target}.".startswith("attnswitch.backends.")] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_no_backend_imports_another(name: str) -> None:
    """Relative imports stay within a backend's own folder, or what it shares with others."""
    own = ".".join(name.split(".")[:3])
    others = [target for target in imports(name) if f"{target}.".startswith("attnswitch.backends.")]
    if MODULES[name].parent == ROOT / "backends":
        assert others == []
    assert [target for target in others if not f"{target}.".startswith((f"{own}.", f"{OWN}."))] == []
    assert [target for target in imports(name) if target.startswith(("attnswitch.verify", "attnswitch.cli"))] == []
    assert [target for target in imports(name) if target.split(".")[0] in ("backends", "cli", "tests")] == []


#: All that a backend may know of the rest: the ground, the problem and the machine.
BELOW_BACKENDS = ("arrays", "errors", "files", "machine", "problem", "backends")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_nothing_above_machine(name: str) -> None:
    """``lint-imports`` sees the package in its own folder only; this, and what follows, holds for the other two."""
    rooms = {target.split(".")[1] for target in imports(name) if target.startswith("attnswitch.")}
    assert rooms <= set(BELOW_BACKENDS)


CUDA = "attnswitch.backends.cuda"
#: Its rooms and the files beside them, from the top down.
CUDA_FLOORS = (
    {"backend"},
    {"kernel"},
    {"config"},
    {"families"},
    {"fused", "hopper", "portable"},
    {"launching"},
    {"compiling"},
    {"classes"},
)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name.startswith(f"{CUDA}.")])
def test_imports_between_the_rooms_of_cuda_run_down(name: str) -> None:
    """A room knows those on the floors below it: none above, and none beside it."""
    floors = {room: floor for floor, rooms in enumerate(CUDA_FLOORS) for room in rooms}
    own = name.split(".")[3]
    others = {target.split(".")[3] for target in imports(name) if target.startswith(f"{CUDA}.")} - {own}
    assert [room for room in others if floors[room] <= floors[own]] == []


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("attnswitch.cli")])
def test_nothing_imports_the_commands(name: str) -> None:
    if name != "attnswitch.__main__":
        assert [target for target in imports(name) if f"{target}.".startswith("attnswitch.cli.")] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_long(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= 400


def python(script: str, tmp_path: Path) -> str:
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_no_top_level_module_is_called_like_a_folder(tmp_path: Path) -> None:
    """``import backends`` would be a second copy of every backend."""
    script = f"""
import importlib, sys
for name in {sorted(MODULES)!r}:
    of = ("diffusers", "jax", "transformers", "yunchang")  # which are no dependencies
    if not name.startswith(tuple("attnswitch.integrations." + name for name in of)):
        importlib.import_module(name)
print(sorted({{"backends", "cli", "tests", "fixtures"}} & {{name.split(".")[0] for name in sys.modules}}))
"""
    assert python(script, tmp_path).strip() == "[]"


def test_importing_the_package_imports_no_array_library(tmp_path: Path) -> None:
    script = """
import sys, attnswitch
print(sorted({"torch", "numpy", "cupy", "jax", "hypothesis"} & sys.modules.keys()))
"""
    assert python(script, tmp_path).strip() == "[]"


def test_public_names_mean_the_same_after_a_backend_was_loaded(tmp_path: Path) -> None:
    """A subpackage becomes an attribute of its package when it is imported, whatever stood under that name."""
    script = """
import attnswitch
from attnswitch.machine import registry
before = {name: callable(getattr(attnswitch, name)) for name in attnswitch.__all__}
for name in registry.names():
    registry.load(name)
print([name for name in attnswitch.__all__ if callable(getattr(attnswitch, name)) != before[name]])
print(list(attnswitch.backends()) == list(registry.names()))
"""
    assert python(script, tmp_path).splitlines() == ["[]", "True"]
