"""Measuring within an application, at its first call of each class of problems."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch

from attnswitch.bench.measure import Budget
from attnswitch.planning.plan import Plan
from attnswitch.tune import trial
from attnswitch.tune.trial import Effort
from attnswitch.verify.judge import examine
from attnswitch.wisdom import view
from attnswitch.wisdom.classes import speed_class

__all__ = ["EFFORT", "measure"]

#: How long a class is measured for that nobody asked to have measured by itself.
EFFORT = Effort(Budget(5.0, 20.0), search=0.0, device=0.0)
#: One thread measures at a time: two would slow each other down.
_lock = threading.Lock()


def measure(plan: Plan, where: str) -> bool:
    """Measure the problem of ``plan`` on the device that torch calls ``where``; return whether that was possible now.

    Each class is measured once, whatever comes of it. Nothing is measured while a CUDA graph is captured, which would
    record the launches.
    """
    if where.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        return False
    with _lock:
        key, sighted = (speed_class(plan.problem), plan.device), view.current().sighted
        if key not in sighted:
            sighted.add(key)
            with _aside(where):
                tried = trial.run(plan.problem, where, EFFORT, examine)
            try:
                view.remember(tried.lasting, brief=True)
            except TimeoutError as error:
                warnings.warn(f"what was measured counts in this process alone: {error}", RuntimeWarning, stacklevel=2)
            except OSError:  # it counts in this process all the same
                pass
    return True


@contextlib.contextmanager
def _aside(where: str) -> Iterator[None]:
    """Shield the application from the trial, and the other way round: autograd mode, autocast, random generators."""
    kind, _, index = where.partition(":")
    devices = [int(index or 0)] if kind == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(kind, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield
