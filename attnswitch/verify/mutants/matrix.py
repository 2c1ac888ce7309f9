"""The verifier tried on faulty backends: which check catches which mutant, after how many cases, and what survives.

Two things are measured. A run as a user would start it, for each mutant alone, ends at the first failure: that is the
kill. Then, if asked, every check alone looks at the same cases of every mutant: that shows what each check is there
for, and takes twice as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from typing import Any

from attnswitch import child
from attnswitch.errors import VerificationError
from attnswitch.machine import registry
from attnswitch.planning import planner
from attnswitch.verify.checks import CHECKS, LAST
from attnswitch.verify.mutants.catalogue import Mutant, mutants
from attnswitch.verify.mutants.columns import columns
from attnswitch.verify.mutants.kills import Kill, kills
from attnswitch.verify.session.plan import EXAMPLES

__all__ = ["Matrix", "Row", "measure"]

#: The backend that the mutants are edits of, and the cases drawn at the least to see that nothing is wrong with it.
_TRUE, _CONTROL = "tiled", 500
#: Mutants are dealt to so many runs side by side, and their columns to so many parts, whatever the number of workers.
_RUNS, _PARTS = 2, 4
#: Faults in what a call leaves behind: of these each check makes calls of its own, with nothing before them.
_LEAVING = ("memory", "state")

#: Told how many of how many steps are done, and what was.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One mutant: the check that ended the run, None if it survived; after how many cases, and seconds.

    The seconds are those that a run on the true backend needed for the same cases, in the same process.

    ``caught`` has the checks that see it when they look alone, with the number of the case that showed it; it is empty
    where none looked alone.
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
    """All mutants, and the checks that looked at them alone."""

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
    alone: bool = False,
) -> Matrix:
    """Run every mutant (or those of ``names``), and every check on each if ``alone``, in ``workers`` processes.

    The true backend goes the same way. Raises ``VerificationError`` if anything is held against it: what is held
    against a mutant would then mean nothing.
    """
    wanted = None if names is None else set(names)
    chosen = [mutant for mutant in mutants() if wanted is None or mutant.name in wanted]
    checks = tuple(check.name for check in CHECKS if not check.gpu and check not in LAST) if alone else ()
    caught: dict[str, dict[str, int]] = {check: {} for check in checks}
    ended: dict[str, Kill] = {}
    against: set[str] = set()
    tasks = [*_runs(chosen, seed, examples), *(_columns(chosen, checks, seed) if checks else ())]
    for done, (task, found) in enumerate(_carried_out(tasks, workers or os.cpu_count() or 1), 1):
        if task.do is kills:
            against |= {found[_TRUE].check} - {None}
            ended |= found
        else:
            against |= {check for check, seen in found.items() if _TRUE in seen}
            for check in found:
                caught[check] |= found[check]
        progress(done, len(tasks), task.what)
    if against:
        raise VerificationError(f"the true backend fails too, by {', '.join(sorted(against))}: nothing was shown")
    rows = []
    for m in chosen:
        seen = {check: caught[check][m.target] for check in checks if m.target in caught[check]}
        rows.append(Row(m.name, m.family, m.fault, m.seen, *ended[m.target], caught=seen))
    return Matrix(tuple(rows), checks, seed, examples)


@dataclass(frozen=True, slots=True)
class _Task:
    """``do`` with ``given``, in whatever process; ``what`` says it in words."""

    what: str
    do: Callable[..., Any]
    given: tuple[Any, ...]

    def __call__(self) -> Any:
        """Do it with every backend loaded anew: what earlier calls left behind is none of its own."""
        registry.forget()
        planner.forget()
        return self.do(*self.given)


def _runs(chosen: list[Mutant], seed: int, examples: int) -> Iterator[_Task]:
    """The runs on all mutants, dealt out; and one on the true backend, to the end."""
    for n in range(min(_RUNS, len(chosen))):
        part = [mutant.target for mutant in chosen[n::_RUNS]]
        yield _Task(f"runs on {len(part)} mutants", kills, (_TRUE, part, seed, examples))
    yield _Task(f"a run on {_TRUE}", kills, (_TRUE, (), seed, min(examples, _CONTROL)))


def _columns(chosen: list[Mutant], checks: tuple[str, ...], seed: int) -> Iterator[_Task]:
    """The columns of the matrix: of some mutants those of all checks, and of some each alone."""
    far = frozenset([_TRUE, *(mutant.target for mutant in chosen if mutant.family == "long")])
    plain = [mutant.target for mutant in chosen if mutant.family not in _LEAVING]
    leaving = [mutant.target for mutant in chosen if mutant.family in _LEAVING]
    for n in range(min(_PARTS, len(plain))):
        part = [_TRUE, *plain[n::_PARTS]]
        yield _Task(f"every check alone on {len(part)} backends", columns, (checks, part, far, seed))
    for check in checks if leaving else ():
        yield _Task(f"{check} alone", columns, ((check,), [_TRUE, *leaving], far, seed))


def _carried_out(tasks: list[_Task], workers: int) -> Iterator[tuple[_Task, Any]]:
    """Each task with its result, as they are finished."""
    if workers == 1:
        yield from ((task, task()) for task in tasks)
        return
    with child.safe_path():
        executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        with child.safe_path():  # processes are started as tasks are given
            futures = {executor.submit(task): task for task in tasks}
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
