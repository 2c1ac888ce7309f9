"""Checks that Triton interprets, in a process of their own: it has TRITON_INTERPRET=1 before Triton is imported.

A file of tests, run as a script, tells what its checks raised there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from attnswitch.machine import registry

__all__ = ["VARIABLE", "raised", "tell"]

VARIABLE = "TRITON_INTERPRET"
_ROOT = Path(__file__).parents[2]


def raised(script: str, *names: str) -> dict[str, str]:
    """What each check of ``script``, or those named, raised in the process that interprets, "" for nothing.

    Skips where the interpreter does not work: that of Triton 3.6 with NumPy 2.4, for one.
    """
    ran = subprocess.run(
        [sys.executable, script, *names],
        env={**os.environ, VARIABLE: "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    if isinstance(said, str):
        pytest.skip(said)
    found: dict[str, str] = said
    return found


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
