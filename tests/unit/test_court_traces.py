"""What the court sees of what a kernel leaves behind in its process."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from attnswitch.verify.court.traces import Traces

#: Imports what ``torch.compile`` does as it is first used, in a process that has not used it.
IMPORTING = """
import torch
from attnswitch.verify.court.traces import Traces
traces = Traces()
import torch._dynamo
print(traces.look(False))
"""


@pytest.mark.slow
def test_torch_may_wrap_its_own_functions_as_it_begins_to_compile() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


@pytest.mark.parametrize("name", ["all", "map", "zip", "sorted", "len"])
def test_what_compares_is_not_what_a_kernel_put_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    with monkeypatch.context() as patched:
        patched.setattr(np, "any", lambda *_: False)
        patched.setattr(builtins, name, lambda *_: [])
        told = traces.look(False)
    assert {"it replaced numpy.any", f"it replaced builtins.{name}"} <= set(told)


def test_a_value_that_says_it_is_the_function_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same:
        def __call__(self) -> None: ...

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    traces = Traces()
    monkeypatch.setattr(np, "any", Same())
    assert traces.look(False) == ["it replaced numpy.any"]


def test_another_function_in_the_same_wrapping_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    wrapping: Any = torch
    monkeypatch.setattr(torch, "manual_seed", wrapping._disable_dynamo(torch.seed))
    assert traces.look(False) == ["it replaced torch.manual_seed"]
    monkeypatch.setattr(torch, "allclose", lambda *_: True)
    assert traces.look(False) == ["it replaced torch.allclose"]
