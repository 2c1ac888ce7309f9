"""What the court sees of what a kernel leaves behind in its process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

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


def test_another_function_in_the_same_wrapping_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    wrapping: Any = torch
    monkeypatch.setattr(torch, "manual_seed", wrapping._disable_dynamo(torch.seed))
    assert traces.look(False) == ["it replaced torch.manual_seed"]
    monkeypatch.setattr(torch, "allclose", lambda *_: True)
    assert traces.look(False) == ["it replaced torch.allclose"]
