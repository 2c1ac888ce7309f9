"""What there is to do in a run with new cases, in its order: demanded, drawn, the lattice, the rest of the drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from attnswitch.verify.demands import steering
from attnswitch.verify.drawing import lattice
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import AUTO
from attnswitch.verify.session.explore import Drawn, Given, Job, Source
from attnswitch.verify.session.plan import Plan, Target

__all__ = ["demanded", "fresh"]

#: Cases of one job. Between two jobs the time is checked, and the worker learns of the failures of others. Where each
#: problem compiles for seconds a job is one problem, or the last of them would keep the others waiting.
_CHUNK = 50
#: The same where kernels are emulated and a case takes a second or more.
_SLOW_CHUNK = 10
#: Cases of a job of demanded ones, where each has a problem of its own.
_FEW = 8
#: Jobs of drawn cases before the lattice.
_FIRST_CHUNKS = 8


def demanded(plan: Plan, target: Target) -> Iterator[Given]:
    """The jobs of cases within each requirement of the plan, on the backends that are held to it.

    They are drawn as they are asked for. Raises ``InvalidProblem`` at once if the words of one exclude each other.
    """
    held = plan.held_on(target)
    each, recipes = plan.wanted(target), target.recipes
    every = [
        steering.cases(requirement, target.space, plan.seed, each, recipes)
        for requirement in (plan.requirements if held else ())
    ]
    return (job for cases in every for job in _within(plan, target, cases, held))


def _within(plan: Plan, target: Target, cases: Iterator[Case], held: tuple[str, ...]) -> Iterator[Given]:
    """Those of one requirement. Cases that share a problem, and so its kernels, are of one job."""
    each, first = plan.wanted(target), 0
    sharing = steering.shared(each, target.recipes)
    few = max(1, min(_FEW, each // plan.shard.count))  # each part is to have some
    while given := tuple((case, held) for case in islice(cases, sharing if sharing > 1 else few)):
        yield Given(target.device, given, first, Source.DEMANDED)
        first += len(given)


def fresh(plan: Plan, target: Target, drawn: Callable[[int, int], Drawn]) -> Iterator[Job]:
    """The jobs of ``target``; ``drawn`` makes that of so many drawn cases from a number on."""
    chunks = _chunks(plan, target, drawn)
    if plan.lattice:  # most faults show in the first drawn cases, and sooner there
        yield from islice(chunks, _FIRST_CHUNKS)
        yield from _lattice(target)
    yield from chunks


def _chunks(plan: Plan, target: Target, drawn: Callable[[int, int], Drawn]) -> Iterator[Job]:
    first, limit = 0, plan.problems(target)
    usual = 1 if target.recipes > 1 else _SLOW_CHUNK if target.emulation else _CHUNK
    parts = plan.shard.count
    chunk = max(1, min(usual // parts, usual if limit is None else limit // parts))  # each part is to have some
    while limit is None or first < limit:
        count = chunk if limit is None else min(chunk, limit - first)
        yield drawn(first, count)
        first += count


def _lattice(target: Target) -> Iterator[Job]:
    """The probes, then the long cases, on every backend; not on the dispatcher's choice, which is one of them."""
    backends = tuple(name for name in target.backends if name != AUTO) or target.backends
    if target.emulation:
        probes, laws = [(case, True) for case in lattice.short(target.space)], []
    else:
        probes = [(case, True) for case in lattice.probes(target.space, target.on_gpu)]
        laws = [(case, False) for case in lattice.heads(target.space)]
        laws += [(case, False) for case in lattice.sums(target.space)]
        laws += [(case, False) for case in lattice.long(target.space, target.on_gpu)]
        laws += [(case, False) for case in lattice.extremes(target.space)]
    for number, (case, only) in enumerate(probes + laws):
        for backend in backends:
            yield Given(target.device, ((case, (backend,)),), number, only=only)
