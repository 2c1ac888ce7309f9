"""Each optional package absent in turn: what needs it says so, and all else holds. The rest of the suite has them all.

A process that lacks a package, and its children, have the folder ``absent`` before all others: see its two files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = Path(__file__).parent / "absent"
#: Packages by the name of the first, each with what is installed by it.
PACKAGES: dict[str, tuple[str, ...]] = {
    "triton": ("triton",),
    "cupy": ("cupy", "cupy_backends", "cupyx"),
    "jax": ("jax", "jaxlib"),
    "matplotlib": ("matplotlib", "mpl_toolkits"),
    "transformers": ("transformers",),
    "diffusers": ("diffusers",),
    "accelerate": ("accelerate",),
    "timm": ("timm",),
    "open_clip": ("open_clip",),
}
#: What a backend says that lacks its package.
REASONS = {
    "triton": r"Triton is not installed; install triton",
    "cuda": r"CuPy is not installed; pip install attnswitch\[cuda13\]",
}
NEEDS = {"triton": "triton", "cuda": "cupy"}
RUN_HERE = {"sdpa-flash", "sdpa-math", "tiled", "reference"}
#: Exit codes: all right, and nothing verified.
RIGHT, NOTHING = 0, 3

pytestmark = pytest.mark.slow


def environment(package: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ABSENT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "HIDDEN": " ".join(PACKAGES.get(package, ())), "PYTHONPATH": paths}


def probed(package: str, *backends: str) -> Any:
    """What ``absent/probe.py`` finds where ``package`` is hidden; "" hides none."""
    command = [sys.executable, str(ABSENT / "probe.py"), *backends]
    ran = subprocess.run(command, env=environment(package), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["found"] == []
    for name, error in found["imported"].items():
        assert error == f"ModuleNotFoundError: No module named '{name}'"
    for name, error in found["integrations"].items():
        lacks = None if name == "torch" or there(name, package) else f"ModuleNotFoundError: No module named '{name}'"
        assert error == lacks
    return found


def there(name: str, hidden: str) -> bool:
    return name != hidden and importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("package", ["", "triton", "cupy", "jax", "matplotlib"])
def test_with_one_package_absent(package: str) -> None:
    found = probed(package, "tiled", *(["triton"] if package == "triton" else []))
    for backend, reason in REASONS.items():
        assert bool(re.match(reason, found["backends"][backend] or "")) is not there(NEEDS[backend], package)
    assert {name for name, how in found["calls"].items() if how == "right"} >= RUN_HERE
    assert set(found["calls"].values()) <= {"right", "says so", "refuses float64"}
    assert ("pip install 'attnswitch[plot]'" in found["plot"]) is not there("matplotlib", package)
    assert found["verify"] == {"tiled": RIGHT} | ({"triton": NOTHING} if package == "triton" else {})


@pytest.mark.parametrize("package", ["transformers", "diffusers", "accelerate", "timm", "open_clip"])
def test_with_one_package_of_models_absent(package: str) -> None:
    """Its integration says so, and the files of tests/model that need it are left out, which the report tells."""
    pytest.importorskip(package)
    probed(package)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "tests/model"]
    ran = subprocess.run(command, cwd=ROOT, env=environment(package), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (f"is left out: no {package}" in ran.stdout) is (package != "accelerate")  # which no file needs itself
