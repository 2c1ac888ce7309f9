"""The kill of each mutant of the parallel layer: what a run on it alone ends with, and after how many cases."""

from __future__ import annotations

from collections.abc import Sequence

from attnswitch.errors import VerificationError
from attnswitch.verify.mutants.matrix import Matrix, Progress, Row
from attnswitch.verify.ranks.conductor import Conductor
from attnswitch.verify.ranks.run import plan, run

__all__ = ["measure"]


def measure(
    conductor: Conductor,
    methods: Sequence[str],
    seed: int,
    examples: int,
    progress: Progress = lambda done, total, what: None,
) -> Matrix:
    """Run every mutant of ``methods`` until it is caught or the examples are over.

    The true layer goes through as many cases as it took to catch the last. Raises ``VerificationError`` if anything is
    held against it: what is held against a mutant would then mean nothing.
    """
    from attnswitch.verify.ranks.faults import FAULTS  # loads torch, which most commands have no need of

    chosen = [name for name, fault in FAULTS.items() if fault.method in methods]
    rows = []
    for n, name in enumerate(chosen):
        fault = FAULTS[name]
        progress(n, len(chosen), name)
        alone = plan((f"{fault.method}:{name}",), conductor, examples, seed, None, None, 1, 0)
        report = run(alone, conductor)
        found = report.failures[0] if report.failures else None
        check = None if found is None or found.outcome.failure is None else found.outcome.failure.check
        rows.append(Row(name, fault.method, fault.what, "", check, report.cases, report.seconds))
    most = max((row.cases for row in rows), default=1)
    progress(len(chosen), len(chosen), "the true layer")
    true = run(plan(methods, conductor, most, seed, None, None, 1, 0), conductor)
    if true.failures:
        raise VerificationError(f"the true layer fails as well: {true.failures[0].outcome.failure}")
    return Matrix(tuple(rows), (), seed, examples)
