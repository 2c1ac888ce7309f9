"""``Conductor``: gives each case to all ranks, and makes one outcome of what they answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Failure, Outcome
from attnswitch.verify.ranks.judge import judged
from attnswitch.verify.ranks.mail import come, drop, key_of, put, take
from attnswitch.verify.ranks.task import Answer, Task, fitted

__all__ = ["Conductor"]

#: Seconds between two looks at what has come.
_GLANCE = 0.001
#: Seconds that ranks are waited for when one has failed: they may wait for it in turn.
_GRACE = 2.0


class Conductor:
    """Tries cases on all ranks, through the ``store`` that their supervisors look at."""

    def __init__(self, store: Any, ranks: int, device: str) -> None:
        self._store, self._ranks, self.device = store, ranks, device
        self._number, self._generation = 0, 0

    def __str__(self) -> str:
        return f"{self._ranks} over {'gloo' if self.device == 'cpu' else 'nccl'}"

    @property
    def launcher(self) -> tuple[str, ...]:
        """What starts such a run again."""
        return ("torchrun", "--nproc-per-node", str(self._ranks), "-m", "attnswitch", "verify")

    def examine(self, case: Case, backends: Sequence[str], device: str, only: bool = False) -> list[Outcome]:
        """The verdict on each way of computing ``case`` over ranks: a method, or "method:mutant"."""
        return [self._tried(case, name, device) for name in backends]

    def end(self) -> None:
        """Have the supervisors end."""
        put(self._store, key_of("task", self._number), None)

    def _tried(self, case: Case, name: str, device: str) -> Outcome:
        method, _, fault = name.partition(":")
        task = Task(fitted(case, method, self._ranks), method, fault, self._generation)  # type: ignore[arg-type]
        began = time.perf_counter()
        answers = self._asked(task)
        return replace(self._verdict(task, name, device, answers), seconds=time.perf_counter() - began)

    def _verdict(self, task: Task, name: str, device: str, answers: Sequence[Answer]) -> Outcome:
        failed = [answer.failed for answer in sorted(answers, key=lambda answer: answer.after) if answer.failed]
        if failed:
            self._generation += 1
            check = "hang" if any(answer.hung for answer in answers) else "crash"
            return Outcome(task.case, name, device, "mismatch", failure=Failure(check, "; ".join(failed)))
        refused = [answer.refused for answer in answers]
        if all(refused):
            return Outcome(task.case, name, device, "refused", reasons=(refused[0],))
        if any(refused):
            self._generation += 1
            some = next(text for text in refused if text)
            return Outcome(task.case, name, device, "mismatch", failure=Failure("form", f"some ranks refused: {some}"))
        return judged(task, name, device, answers)

    def _asked(self, task: Task) -> list[Answer]:
        """The answers of all ranks."""
        number = self._number
        self._number += 1
        put(self._store, key_of("task", number), task)
        keys = [key_of("answer", number, rank) for rank in range(self._ranks)]
        answers: dict[int, Answer] = {}
        over = 0.0
        while len(answers) < self._ranks:
            waiting = [rank for rank in range(self._ranks) if rank not in answers]
            time.sleep(_GLANCE)
            for rank in waiting:
                if come(self._store, keys[rank]):
                    answers[rank] = take(self._store, keys[rank])
                    drop(self._store, keys[rank])
            if any(answer.failed for answer in answers.values()):
                over = over or time.monotonic() + _GRACE
                if time.monotonic() > over and not come(self._store, key_of("over", number)):
                    put(self._store, key_of("over", number), None)
        drop(self._store, key_of("task", number))
        return [answers[rank] for rank in range(self._ranks)]
