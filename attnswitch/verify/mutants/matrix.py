"""The verifier tried on faulty backends: which check catches which mutant, after how many cases, and what survives.

Two things are measured. A run as a user would start it, for each mutant alone, ends at the first failure: that is the
kill. Then every check alone looks at the same cases of every mutant: that shows what each check is there for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import active_children, get_context
from typing import Any

from attnswitch.errors import VerificationError
from attnswitch.verify.checks import CHECKS, named
from attnswitch.verify.drawing import lattice
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.judge import examine
from attnswitch.verify.mutants.catalogue import mutants
from attnswitch.verify.session.conduct import run
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import EXAMPLES, Plan, targets

__all__ = ["Matrix", "Row", "measure"]

#: Drawn cases that every check looks at alone, of so many that it may apply to.
COLUMN_CASES, _DRAWN = 40, 400
#: The backend that the mutants are edits of, and the cases drawn to see that nothing is wrong with it.
_TRUE, _CONTROL = "tiled", 500
#: They are small: a check that needs great lengths gets those of the lattice besides.
_SPACE = Space(work=2**17, longest=300)

#: Told how many of how many steps are done, and what was.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One mutant: the check that ended the run, after how many cases and seconds; None if it survived.

    ``caught`` has the checks that see it when they look alone, with the number of the case that showed it.
    """

    name: str
    family: str
    fault: str
    seen: str
    first: str | None
    cases: int
    seconds: float
    caught: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Matrix:
    """All mutants, and the checks that looked at them."""

    rows: tuple[Row, ...]
    checks: tuple[str, ...]
    seed: int
    examples: int

    @property
    def survivors(self) -> tuple[Row, ...]:
        """Mutants that the run did not catch."""
        return tuple(row for row in self.rows if row.first is None)

    def alone(self, check: str) -> tuple[str, ...]:
        """Mutants that no other check sees."""
        return tuple(row.name for row in self.rows if set(row.caught) == {check})

    @property
    def median_seconds(self) -> float:
        """Median time to the first counterexample."""
        ordered = sorted(row.seconds for row in self.rows)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def to_json(self) -> dict[str, Any]:
        """The matrix as data."""
        rows = [
            {name: getattr(row, name) for name in ("name", "family", "fault", "seen", "first", "cases", "caught")}
            | {"seconds": round(row.seconds, 3)}
            for row in self.rows
        ]
        return {
            "seed": self.seed,
            "examples": self.examples,
            "median_seconds": round(self.median_seconds, 3),
            "survivors": [row.name for row in self.survivors],
            "alone": {check: list(self.alone(check)) for check in self.checks},
            "mutants": rows,
        }


def measure(
    seed: int = 0,
    examples: int = EXAMPLES,
    names: Iterable[str] | None = None,
    workers: int | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Matrix:
    """Run every mutant (or those of ``names``), and every check on each, in ``workers`` processes.

    The true backend goes the same way. Raises ``VerificationError`` if anything is held against it: what is held
    against a mutant would then mean nothing.
    """
    wanted = None if names is None else set(names)
    chosen = [mutant for mutant in mutants() if wanted is None or mutant.name in wanted]
    checks = tuple(check.name for check in CHECKS if not check.gpu)
    workers = workers or os.cpu_count() or 1
    total = len(chosen) + len(checks) + 1
    kills: dict[str, tuple[str | None, int, float]] = {}
    columns: dict[str, dict[str, int]] = {}
    every = [_TRUE, *(m.target for m in chosen)]
    far = [m.target for m in chosen if m.family == "long"]
    tasks: list[tuple[Any, ...]] = [(_column, check, every, far, seed) for check in checks]
    tasks += [(_killed, _TRUE, _TRUE, seed, min(examples, _CONTROL))]
    tasks += [(_killed, mutant.name, mutant.target, seed, examples) for mutant in chosen]
    for done, ((do, name, *_), result) in enumerate(_carried_out(tasks, workers), 1):
        (kills if do is _killed else columns)[name] = result
        progress(done, total, name)
    against = [kills[_TRUE][0], *(check for check in checks if _TRUE in columns[check])]
    if any(against):
        raise VerificationError(f"the true backend fails too, by {', '.join(filter(None, against))}: nothing was shown")
    rows = []
    for m in chosen:
        first, cases, seconds = kills[m.name]
        caught = {check: columns[check][m.target] for check in checks if m.target in columns[check]}
        rows.append(Row(m.name, m.family, m.fault, m.seen, first, cases, seconds, caught))
    return Matrix(tuple(rows), checks, seed, examples)


def _carried_out(tasks: list[tuple[Any, ...]], workers: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each task with its result, as they are finished."""
    if workers == 1:
        yield from ((task, task[0](*task[1:])) for task in tasks)
        return
    executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        futures = {executor.submit(task[0], *task[1:]): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:  # Ctrl-C does not wait for the tasks that are left
        executor.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        raise
    executor.shutdown()


def _one_thread() -> None:
    """The processes share the cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _killed(name: str, target: str, seed: int, examples: int) -> tuple[str | None, int, float]:
    """A run on one mutant: the check that ended it, the cases before, and the seconds."""
    plan = Plan(targets(["cpu"], [target]), examples, seed, max_failures=1, shrink_tries=0, lattice=True)
    report = run(plan)
    if not report.failures:
        return None, report.cases, report.seconds
    found = report.failures[0]
    assert found.outcome.failure is not None
    return found.outcome.failure.check, found.after, found.seconds


@functools.cache
def _drawn(seed: int) -> list[Case]:
    """The cases that every check chooses from."""
    return draw(_SPACE, seed, _DRAWN)


def _column(check: str, every: list[str], far: list[str], seed: int) -> dict[str, int]:
    """One check alone on every mutant: those that it sees, with the number of the case.

    Only the mutants of ``far``, which show at great lengths, get the cases of the lattice as well.
    """
    left, found = list(every), dict[str, int]()
    cases = (case.replace(check=check) for case in _drawn(seed))
    suiting = (case for case in cases if named(check).suits(case, "cpu"))
    drawn = ((case, every) for case in islice(suiting, COLUMN_CASES))
    fixed = (*lattice.probes(Space(), False), *lattice.long(Space(), False), *lattice.extremes(Space()))
    seen = chain(drawn, ((case, far) for case in fixed if case.check == check))
    for number, (case, wanted) in enumerate(seen, 1):
        left = [target for target in left if target in wanted]
        for outcome in examine(case, left, only=True) if left else ():
            if outcome.verdict == "mismatch":
                found[outcome.backend] = number
        left = [target for target in left if target not in found]
    return found
