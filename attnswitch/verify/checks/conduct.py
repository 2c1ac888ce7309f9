"""What a kernel may not do beside computing: leave threads, processes, patched functions or changed state behind."""

from __future__ import annotations

from attnswitch.verify import court
from attnswitch.verify.checks.check import Check
from attnswitch.verify.outcome import Failure
from attnswitch.verify.trial import NotApplicable, Trial

__all__ = ["CHECKS"]


def _conduct(trial: Trial) -> Failure | None:
    told = court.conduct(trial.chosen)
    if told is None:
        raise NotApplicable("its kernels run in the judge's own process")
    return Failure("conduct", told) if told else None


CHECKS = (
    Check(
        "conduct",
        "a call leaves its process as it found it, but for its results",
        "What a kernel patches, forks or leaves running spoils the program around it, whatever its numbers are.",
        lambda case: True,
        _conduct,
        always=True,
        varlen=True,
    ),
)
