"""``Subject``: a case with its data and the exact answer. ``Trial``: a subject on one backend, and running it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from attnswitch.arrays import Array
from attnswitch.errors import BackendUnavailable, Unsupported
from attnswitch.machine import registry
from attnswitch.machine.backend import Config, Precision
from attnswitch.machine.device import Device
from attnswitch.planning.planner import make_plan
from attnswitch.verify import terms
from attnswitch.verify.demands.precision import demanded
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.launch.call import (
    Around,
    Placed,
    Returned,
    call,
    finite_check,
    hosted,
    malformed,
    place_operands,
)
from attnswitch.verify.outcome import Failure
from attnswitch.verify.truth.exact import Exact
from attnswitch.verify.truth.oracle import visible_positions

__all__ = ["KernelFailed", "NotApplicable", "Subject", "Trial"]


#: Answers to what a check made of a case are held against the second reference once in so many cases; to drawn cases,
#: always.
_CROSS_CHECKED = 4


class KernelFailed(Exception):
    """What a backend raised when it was run again; a finding, unlike what a check raises itself."""


class NotApplicable(Exception):
    """A check says nothing about this case after all."""


class Subject:
    """A case and the float64 values of its operands. What is derived from it is shared by all backends."""

    def __init__(self, case: Case, data: dict[str, Array] | None = None) -> None:
        self.case = case
        self.derived: dict[str, Subject] = {}
        self._given = data

    @functools.cached_property
    def data(self) -> dict[str, Array]:
        """Values of the operands by role, (B, H, L, D), exact in the storage types."""
        return operands(self.case) if self._given is None else self._given

    @functools.cached_property
    def visible(self) -> Any:
        """Which key each query sees, (B, Hq, Lq, Lk), written out."""
        return visible_positions(self.case, self.data.get("attn_mask"))

    @functools.cached_property
    def exact(self) -> Exact:
        """The exact answer. Not for dropout without a seed, whose mask the backend draws."""
        trusted = self._given is not None and self.case.data_seed % _CROSS_CHECKED != 0
        return Exact(self.case, self.data, trusted=trusted)

    def derive(self, name: str, make: Callable[[], tuple[Case, dict[str, Array]]]) -> Subject:
        """The subject that ``make`` gives, made once under ``name``."""
        if name not in self.derived:
            self.derived[name] = Subject(*make())
        return self.derived[name]

    def with_data(self, **changes: Array) -> tuple[Case, dict[str, Array]]:
        """The same case with some operands changed; they then lie plainly, since their values may not repeat."""
        return plainly_placed(self.case, set(changes)), {**self.data, **changes}


def plainly_placed(case: Case, roles: set[str]) -> Case:
    """``case`` with the operands of ``roles`` contiguous where they were expanded."""
    expanded = {
        role: "contiguous"
        for role in ("query", "key", "value", "grad_out")
        if role in roles and getattr(case.placing, role).startswith("expanded")
    }
    return case.replace(placing=case.placing.replace(**expanded)) if expanded else case


class Trial:
    """One subject on one backend of one device: what came back, in the caller's arrays and as float64."""

    def __init__(self, subject: Subject, backend: str, device: str, placed: Placed | None, returned: Returned) -> None:
        """``placed`` is None where only a check that makes its own operands will look."""
        self.subject = subject
        self.case = subject.case
        self.backend = backend
        self.device = device
        self._placed = placed
        self.returned = returned
        self.chosen = returned.chosen
        self.seconds = 0.0
        #: What was found beside the results.
        self.overrun: Failure | None = None
        #: Worst error / bound of each result and the element it is at; filled in by the reference check.
        self.ratios: dict[str, tuple[float, tuple[int, ...]]] = {}

    @property
    def data(self) -> dict[str, Array]:
        """Values of the operands by role."""
        return self.subject.data

    @property
    def placed(self) -> Placed:
        """The operands as the caller held them."""
        assert self._placed is not None
        return self._placed

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """Results by name in (B, H, L, D) order, as float64 in NumPy."""
        return hosted(self.returned.results)

    @functools.cached_property
    def _backend(self) -> Any:
        backend = registry.loaded(self.chosen)
        return backend

    @functools.cached_property
    def _device(self) -> Device:
        return Device.parse(self.device)

    def precision(self, case: Case) -> Precision:
        """What the backend is held to for ``case``: the stricter of what it promises and what the run demands."""
        declared: Precision = self._backend.precision(case.problem(), self._device)
        return demanded(declared, terms.now().precision, case.dtype)

    def takes(self, case: Case) -> bool:
        """Whether the backend takes ``case``, as far as its problem says."""
        return make_plan(case.problem(), self._device, self.chosen).chosen is not None

    @functools.cached_property
    def variant(self) -> str:
        """The kernel that ran: its config, where the backend has more than one."""
        plan = make_plan(self.case.problem(), self._device, self.chosen)
        if plan.chosen is not None and plan.chosen.config:
            return plan.chosen.config
        config = next(iter(self._backend.configs(self.case.problem(), self._device)), None)
        return "" if config is None or type(config) is Config else str(config)

    @property
    def repeats(self) -> bool:
        """Whether the backend promises the same bits when it is run again."""
        return self.takes(self.case.replace(deterministic=True))

    def repeatable(self, subject: Subject) -> Subject:
        """``subject``, asked for the same bits every time where the backend promises them.

        A backend may have a faster way for whoever does not ask, which sums in no order.
        """
        if subject.case.deterministic or not self.repeats:
            return subject
        return subject.derive("deterministic", lambda: (subject.case.replace(deterministic=True), subject.data))

    @functools.cached_property
    def repeatable_results(self) -> dict[str, Any]:
        """``results``, with the same bits every time where the backend promises them."""
        same = self.repeatable(self.subject)
        return self.results if same is self.subject else self.run(same)

    def limits(self, subject: Subject | None = None) -> dict[str, Any]:
        """Error bounds of a subject's results under this backend; without one, of its own."""
        subject = subject or self.subject
        return subject.exact.limits(self.precision(subject.case))

    def apart(self, exact: Exact, other: Case) -> dict[str, Any]:
        """How far this backend's results of its own case and of ``other`` may lie apart, where both have this truth.

        A backend may compute them in unlike precision: by their lengths, say.
        """
        mine, others = (exact.limits(self.precision(case)) for case in (self.case, other))
        return {name: limit + others[name] for name, limit in mine.items()}

    def run(self, subject: Subject, around: Around = lambda run: run()) -> dict[str, Any]:
        """Results of this backend on another subject, as float64 in NumPy.

        Raises ``NotApplicable`` if the backend does not take it.
        """
        with finite_check(subject.case.poison):
            try:
                placed = place_operands(subject.case, subject.data, self.device)
                results = call(subject.case, placed, self.chosen, around).results
                if odd := malformed(subject.case, results):
                    raise ValueError(odd)
                return hosted(results)
            except (Unsupported, BackendUnavailable) as refusal:
                raise NotApplicable(str(refusal)) from None
            except MemoryError:
                raise
            except Exception as error:
                raise KernelFailed(str(error)) from error
