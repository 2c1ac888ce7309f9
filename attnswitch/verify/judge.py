"""One case on some backends: run through the public calls, looked at by the checks, and given a verdict each."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

from attnswitch import child
from attnswitch.call import recording
from attnswitch.errors import BackendUnavailable, Unsupported, VerificationError, out_of_memory
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.names import in_a_line
from attnswitch.planning.plan import Plan
from attnswitch.planning.planner import make_plan
from attnswitch.verify import court, room
from attnswitch.verify.checks import ALWAYS, LAST, Check, named
from attnswitch.verify.court.proxy import Proxy, Raising
from attnswitch.verify.court.server import Gone
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.placings import FAR
from attnswitch.verify.launch.call import Returned, allocated, call, finite_check, malformed, place_operands
from attnswitch.verify.launch.neighbours import Neighbours
from attnswitch.verify.outcome import AUTO, Failure, Outcome, Verdict
from attnswitch.verify.trial import KernelFailed, NotApplicable, Subject, Trial

__all__ = ["apart", "check", "crash", "examine"]

#: One in so many cases is called even if its problem says that it will be refused.
_ASKED = 4
#: Results of more bytes than this are not laid between neighbours.
_SURROUNDED = 2**24


def check(case: Case, backend: str, device: str = "cpu") -> Outcome:
    """Run ``case`` with ``backend`` (or ``AUTO``) on ``device`` and judge what comes back."""
    return examine(case, (backend,), device)[0]


@recording.paused()
def examine(
    case: Case,
    backends: Sequence[str],
    device: str = "cpu",
    only: bool = False,
    before: Callable[[str], None] = lambda backend: None,
) -> list[Outcome]:
    """``check`` with several backends, which share the reference.

    Every candidate runs first: a reference cannot have left the right answer in memory for one to find. Where all have
    processes of their own, which cannot read this one's memory, the reference is computed while the first kernel runs.
    ``only`` looks at ``case.check`` alone; ``before`` is told each backend whose kernels are about to run.

    Raises:
        InvalidProblem: a backend's name is not known.
        VerificationError: the references disagree, or a check failed itself.
    """
    for backend in backends:
        if backend != AUTO:
            registry.load(backend)  # an unknown name is the caller's mistake, not a finding
    if too_large := room.lacking(case):
        return [Outcome(case, b, device, "refused", reasons=(too_large,), starved=True) for b in backends]
    if len(backends) > 1 and FAR in astuple(case.placing):  # operands of gigabytes, for each
        return [outcome for backend in backends for outcome in examine(case, (backend,), device, only, before)]
    checks = [named(case.check)] if only else [*ALWAYS, *([] if (c := named(case.check)).always else [c]), *LAST]
    checks = [c for c in checks if c.suits(case, device)]
    if only and not checks:
        return []
    subject = Subject(case)
    if only and checks[0].alone:
        return [
            _unjudged(case, backend, device) or _probed(subject, backend, device, checks, before)
            for backend in backends
        ]
    ran = []
    answers = not only and not case.unseeded and all(map(court.seated, backends)) and child.is_hidden()
    for backend in backends:
        before(backend)
        ran.append(_unjudged(case, backend, device) or _attempt(subject, backend, device, answers))
    judged = []
    for run in ran:
        if isinstance(run, Trial):
            before(run.backend)
            run = _judged(run, checks)
        judged.append(run)
    return judged


def _unjudged(case: Case, backend: str, device: str) -> Outcome | None:
    """No verdict on a backend that is off by more than rounding: no bound follows from what it promises."""
    loaded = registry.load(backend) if backend != AUTO else None
    if not (isinstance(loaded, Backend) and loaded.approximate):
        return None
    why = "approximate: it is off by more than rounding, so that no bound tells right from wrong"
    return Outcome(case, backend, device, "refused", reasons=(why,))


@recording.paused()
def apart(case: Case, wanted: Mapping[str, Sequence[str]], device: str = "cpu") -> list[tuple[str, Outcome]]:
    """Checks that look alone, by their names for each backend: what each of them says of one run of the backend.

    As in ``examine`` every backend runs first, and a check that makes its own operands needs no run. Checks that do
    not apply to the case say nothing; where the backend did not run, each has that for its outcome.
    """
    subject, ran, said = Subject(case), dict[str, Trial | Outcome](), list[tuple[str, Outcome]]()
    looking = {backend: [c for c in map(named, names) if c.suits(case, device)] for backend, names in wanted.items()}
    for backend, checks in looking.items():
        if not all(c.alone for c in checks):
            ran[backend] = _attempt(subject, backend, device)
    for backend, checks in looking.items():
        for c in checks:
            if c.alone:
                found = _probed(subject, backend, device, [c], lambda backend: None)
            else:
                run = ran[backend]
                found = _judged(run, [c]) if isinstance(run, Trial) else run
            said.append((c.name, found))
    return said


def _probed(
    subject: Subject, backend: str, device: str, checks: Sequence[Check], before: Callable[[str], None]
) -> Outcome:
    """A check that makes its own operands needs no run on those of the case."""
    before(backend)
    case = subject.case
    forced = None if backend == AUTO else backend
    plan = make_plan(case.problem(), Device.parse(device), forced)
    if plan.backend is None:
        return _not_run(plan, case, backend, device)
    outcome = _judged(Trial(subject, backend, device, None, Returned({}, plan.backend)), checks)
    if outcome.failure is None and not outcome.checks:
        return Outcome(case, backend, device, "refused", plan.backend, ("it does not take the probe",))
    return outcome


def _attempt(
    subject: Subject, backend: str, device: str, answers: bool = False, *, again: bool = False
) -> Trial | Outcome:
    """Run the backend once; an outcome says why there is nothing to judge.

    It runs ``again`` if it found no memory and there was some. That happens once: others may have had it meanwhile.
    ``answers``: the reference may be computed while its kernel runs.
    """
    case = subject.case
    forced = None if backend == AUTO else backend
    started, spent = time.perf_counter(), 0.0

    def answering() -> None:
        nonlocal spent
        began = time.perf_counter()
        try:
            subject.exact  # noqa: B018
        finally:
            spent = time.perf_counter() - began

    if case.data_seed % _ASKED:  # a refusal follows from the problem; that the call says so too is seen on the others
        plan = make_plan(case.problem(), Device.parse(device), forced)
        if plan.backend is None:
            return _not_run(plan, case, backend, device)
    with finite_check(case.poison):
        try:
            placed = place_operands(case, subject.data, device)
            neighbours = _surround(case, forced, device)
            with court.meanwhile(backend, answering) if answers else contextlib.nullcontext():
                returned = call(case, placed, forced)
        except Unsupported as refusal:
            return _behaved(Outcome(case, backend, device, "refused", reasons=_reasons(refusal, forced)))
        except BackendUnavailable as absence:
            plan = absence.plan  # none where the kernel raised it
            if plan is None or any(c.broken for c in plan.candidates if c.backend == backend):  # it is here
                court.conduct(backend)
                return Outcome(case, backend, device, "mismatch", failure=Failure("crash", str(absence)))
            return Outcome(case, backend, device, "unavailable", reasons=(str(absence),))
        except Exception as error:  # whatever a kernel raises is a finding
            failure = _raised(error, case, backend, device)
            if failure is None:
                reasons = (f"out of memory: {in_a_line(str(error))}",)
                return _behaved(Outcome(case, backend, device, "refused", reasons=reasons, starved=True))
            if again or not out_of_memory(error):
                court.conduct(backend)  # which is not to be held against the next case
                return Outcome(case, backend, device, "mismatch", forced, failure=failure)
            returned = None
    if returned is None:
        return _attempt(subject, backend, device, again=True)
    trial = Trial(subject, backend, device, placed, returned)
    trial.seconds = time.perf_counter() - started - spent
    if neighbours is not None and (beside := neighbours.look(returned.results)):
        trial.overrun = Failure("inputs", "memory beside it was written to", beside)
    return trial


def _behaved(refused: Outcome) -> Outcome:
    """The same, unless the kernel was begun and did what none may."""
    told = court.conduct(refused.backend)
    if not told:
        return refused
    return replace(refused, verdict="mismatch", reasons=(), starved=False, failure=Failure("conduct", told))


def _not_run(plan: Plan, case: Case, backend: str, device: str) -> Outcome:
    """Why nothing was launched: the plan chose nothing."""
    forced = None if backend == AUTO else backend
    named = next((c for c in plan.candidates if c.backend == forced and not c.reasons), None)
    if named is None or named.unavailable is None:
        return Outcome(case, backend, device, "refused", reasons=_refusals(plan, forced))
    if named.broken:  # it is there, and raised where it should have answered
        return Outcome(case, backend, device, "mismatch", failure=Failure("crash", named.unavailable))
    return Outcome(case, backend, device, "unavailable", reasons=(named.unavailable,))


def _surround(case: Case, backend: str | None, device: str) -> Neighbours | None:
    """Known bytes around the results, in the memory of the library that will allocate them."""
    chosen = registry.load(backend) if backend else Missing("")
    if case.work > _SURROUNDED or isinstance(chosen, Proxy):  # which allocates none of them here
        return None
    library = case.library if isinstance(chosen, Missing) else chosen.native(case.library)
    return Neighbours(allocated(case), library, device)


def _judged(trial: Trial, checks: Sequence[Check]) -> Outcome:
    case = trial.case
    failure, looked = trial.overrun, []
    for c in checks:
        if failure is not None:
            break
        try:
            failure = _held(c, trial)
            looked.append(c.name)
        except NotApplicable:
            continue
        except VerificationError:
            raise
        except (Gone, Raising) as error:
            failure = crash(error)
        except KernelFailed as failed:
            cause = failed.__cause__
            if not isinstance(cause, Exception):
                raise
            failure = _raised(cause, case, trial.backend, trial.device)
        except Exception as error:
            if out_of_memory(error):
                failure = _raised(error, case, trial.backend, trial.device)
                if failure is not None:
                    break
                reasons = (f"out of memory while {c.name} was looked at: {in_a_line(str(error))}",)
                refused = Outcome(case, trial.backend, trial.device, "refused", trial.chosen, reasons, starved=True)
                return _behaved(refused)
            # What is not what was asked for may make a check fail in any way; otherwise the mistake is the check's.
            odd = malformed(case, trial.returned.results) if trial.returned.results else ""
            if c.name != "form" and not odd:
                raise VerificationError(f"the check {c.name} failed itself on {case}: {error!r}") from error
            failure = Failure("crash", odd) if odd else crash(error)
    if LAST[0].name not in looked:
        court.conduct(trial.chosen)  # which is not to be held against the next case
    verdict: Verdict = "mismatch" if failure else "verified"
    ratios = {name: ratio for name, (ratio, _) in trial.ratios.items()}
    worst = {name: where for name, (_, where) in trial.ratios.items()}
    return Outcome(
        case,
        trial.backend,
        trial.device,
        verdict,
        trial.chosen,
        (),
        ratios,
        failure,
        tuple(looked),
        worst,
        _variant(trial),
        trial.seconds,
    )


def _held(c: Check, trial: Trial) -> Failure | None:
    """What ``c`` says; once more where its kernel found no memory that there was, which others may have had."""
    try:
        return c.holds(trial)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, KernelFailed) else error
        if not (isinstance(cause, Exception) and out_of_memory(cause)):
            raise
        if _raised(cause, trial.case, trial.backend, trial.device) is None:
            raise
    return c.holds(trial)


def _raised(error: Exception, case: Case, backend: str, device: str) -> Failure | None:
    """The finding that a kernel raised ``error``; None for a want of memory, unless a target's that could be had.

    A backend of the registry is taken at its word.
    """
    failure = crash(error)
    if not out_of_memory(error):
        return failure
    there = room.had(case, device) if ":" in backend else ""
    return replace(failure, message=f"{failure.message}, although {there}") if there else None


def _variant(trial: Trial) -> str:
    """The kernel that ran, where its backend can still say so."""
    try:
        return trial.variant
    except (Gone, Raising):
        return ""


def crash(error: BaseException) -> Failure:
    """The finding that a kernel raised ``error``."""
    if isinstance(error, Gone):
        return Failure(error.check, str(error))
    if isinstance(error, Raising):
        return Failure("crash", f"{error} ({error.where})")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Failure("crash", f"{type(error).__name__}: {error} ({last.name})")


def _reasons(refusal: Unsupported, backend: str | None) -> tuple[str, ...]:
    return (in_a_line(str(refusal)),) if refusal.plan is None else _refusals(refusal.plan, backend)


def _refusals(plan: Plan, backend: str | None) -> tuple[str, ...]:
    """Why the backend, or each of them, does not take the problem of a plan."""
    asked = (candidate for candidate in plan.candidates if backend in (None, candidate.backend))
    return tuple(in_a_line(reason) for candidate in asked for reason in plan.why_not(candidate))
