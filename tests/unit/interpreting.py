"""Checks that Triton interprets, in a process of their own: it has TRITON_INTERPRET=1 before Triton is imported.

A file of tests, run as a script, tells what its checks raised there.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attnswitch import files
from attnswitch.machine import registry

__all__ = ["VARIABLE", "raised", "tell"]

VARIABLE = "TRITON_INTERPRET"
_ROOT = Path(__file__).parents[2]


def raised(script: str, *names: str) -> dict[str, str]:
    """What each check of ``script``, or those named, raised in the process that interprets, "" for nothing.

    Skips where the interpreter does not work: that of Triton 3.6 with NumPy 2.4, for one. Processes of pytest that run
    side by side, and turn from file to file, find what one of them was told in this run.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    told = hashlib.sha256("\n".join((run, script, *names)).encode()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"attnswitch-interpreted-{told}.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        said = _said(script, *names)
        files.replace(path, json.dumps(said).encode())
    if isinstance(said, str):
        pytest.skip(said)
    found: dict[str, str] = said
    return found


def _said(script: str, *names: str) -> Any:
    ran = subprocess.run(
        [sys.executable, script, *names],
        env={**os.environ, VARIABLE: "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def tell(checks: Mapping[str, Callable[[], None]]) -> None:
    """Print that, in that process: or why there is no interpreter."""
    absence = registry.loaded("triton").unavailable()
    print(json.dumps(absence or {name: _outcome(checks[name]) for name in sys.argv[1:] or checks}))


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # whatever it raises is told
        return traceback.format_exc()
    return ""
