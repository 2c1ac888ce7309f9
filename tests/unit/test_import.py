"""``import attnswitch`` is cheap and shows what it should; each question is asked in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask(program: str) -> Any:
    """What ``program`` prints, as JSON."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_heavy_library_is_loaded() -> None:
    loaded = ask("import attnswitch, json, sys; print(json.dumps(sorted(sys.modules)))")
    assert "attnswitch.api" in loaded
    heavy = {
        "numpy",
        "torch",
        "cupy",
        "jax",
        "hypothesis",
        "rich",
        "typer",
        "ml_dtypes",
        "platformdirs",
        "transformers",
        "diffusers",
    }
    assert not heavy & set(loaded)
    assert not [
        name for name in loaded if name.startswith(("attnswitch.backends.", "attnswitch.cli", "attnswitch.verify"))
    ]


def test_no_slow_module_of_the_standard_library_is_loaded() -> None:
    """A time would be the machine's: each of these is loaded where it is first used."""
    loaded = ask("import attnswitch, json, sys; print(json.dumps(sorted(sys.modules)))")
    slow = {"asyncio", "concurrent.futures", "email", "logging", "multiprocessing", "sqlite3", "subprocess", "unittest"}
    assert not slow & set(loaded)


def test_the_command_line_loads_no_library_of_arrays_that_is_slow() -> None:
    """Each command imports it when it needs it: ``--help`` and a wrong option answer at once."""
    loaded = ask("import attnswitch.cli.app, json, sys; print(json.dumps(sorted(sys.modules)))")
    assert "attnswitch.cli.verify" in loaded
    assert not {"torch", "triton", "cupy", "jax", "matplotlib"} & set(loaded)


def test_all_is_sorted_and_whole() -> None:
    program = """
import json, types, attnswitch
public = [
    name
    for name, value in vars(attnswitch).items()
    if not name.startswith("_") and not (isinstance(value, types.ModuleType) and value.__name__ == f"attnswitch.{name}")
]
print(json.dumps([attnswitch.__all__, sorted(public)]))
"""
    declared, public = ask(program)
    assert declared == sorted(declared)
    assert sorted([*public, "install", "installed", "uninstall"]) == declared


def test_a_name_stays_what_it_is_once_backends_are_loaded() -> None:
    program = """
import contextlib, json, numpy, attnswitch
before = {name: getattr(attnswitch, name) for name in attnswitch.__all__}
named = attnswitch.backends()
query = numpy.zeros((1, 1, 2, 4))
for name, why in named.items():
    if why is None:
        with contextlib.suppress(attnswitch.Unsupported):  # it is loaded all the same
            attnswitch.attention(query, query, query, backend=name)
changed = [name for name, value in before.items() if getattr(attnswitch, name) is not value]
print(json.dumps([changed, list(named), attnswitch.backends() == named]))
"""
    changed, named, same = ask(program)
    assert {"tiled", "reference"} <= set(named)
    assert changed == []  # although there is a package called backends
    assert same


def test_the_version() -> None:
    installed, found = ask(
        "import attnswitch, json; from importlib import metadata;"
        " print(json.dumps([metadata.version('attnswitch'), attnswitch.__version__]))"
    )
    assert found == installed


def test_a_name_that_is_not_there() -> None:
    program = """
import json, attnswitch
try:
    attnswitch.attend
except AttributeError as error:
    print(json.dumps(str(error)))
"""
    assert ask(program) == "module 'attnswitch' has no attribute 'attend'"
