"""What several formats show alike: totals by backend, the state of each check, words for the verdict."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from attnswitch.verify import emulation
from attnswitch.verify.checks import CHECKS, Check
from attnswitch.verify.outcome import Failure
from attnswitch.verify.session.coverage import TRIGGERS
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.session.tally import LOWEST, TILE, Found, Report, Tally

__all__ = [
    "EDGES",
    "OTHERS",
    "TILE_CELL",
    "Place",
    "State",
    "by_backend",
    "checks",
    "coverage",
    "element",
    "emulated",
    "environment_of",
    "found_in",
    "met",
    "number",
    "refused_only",
    "replay_command",
    "says",
    "state",
    "totals",
    "verdict",
    "when",
]

#: Device and backend.
Place = tuple[str, str]
State = Literal["held", "broken", "never"]

#: Upper ends of the bins of error / bound, each included; one more bin holds what is above the last, which is 1.
EDGES = tuple(2.0 ** (power - LOWEST) for power in range(LOWEST + 1))
#: Width in elements of a cell in which the place of a worst element is counted.
TILE_CELL = TILE // 8
#: How a case can fail without a result to look at.
OTHERS = {
    "crash": "the call returns: it raises nothing and its process survives",
    "hang": "the call returns in time",
    "lost": "the device can still be used afterwards",
}
_BY_NAME = {check.name: check for check in CHECKS}


def replay_command(found: Found) -> str:
    """The line that runs a failure again. A target is named in it: replay imports none for a file's sake."""
    if found.replayed_by and found.path:
        return shlex.join((*found.replayed_by, "--corpus", str(found.path.parent.parent)))
    target = ("--backend", found.outcome.backend) if ":" in found.outcome.backend else ()
    options = (*target, *found.replayed_with)
    return shlex.join(("attnswitch", "replay", str(found.path), *options)) if found.path else "(not saved)"


def number(x: float | None) -> float | str | None:
    """JSON has no inf and NaN: they are written as text."""
    return x if x is None or math.isfinite(x) else str(x)


def element(failure: Failure) -> str:
    """The element that is wrong, in numbers; "" where there is none."""
    if failure.index is None or failure.got is None:
        return ""
    within = "" if failure.bound is None else f" within {failure.bound:.3g}"
    expected = "" if failure.expected is None else f", expected {failure.expected!r}{within}"
    return f"element {list(failure.index)} is {failure.got!r}{expected}"


def when(found: Found) -> str:
    """How long it took to find a failure."""
    if found.from_corpus:
        return "a saved case"
    return f"found after {found.after:,} case{'s' * (found.after != 1)}, {found.seconds:.1f} s"


def environment_of(report: Report) -> dict[str, str]:
    """As the processes that ran the kernels saw it; this process's where a run ended before they could say."""
    return report.environment or provenance()


def totals(tallies: Iterable[Tally]) -> Tally:
    """One tally that counts what several did."""
    total = Tally()
    for tally in tallies:
        for name in ("verified", "refused", "mismatched", "unavailable", "gradients", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        if tally.worst > total.worst:
            total.worst, total.worst_case = tally.worst, tally.worst_case
        for counter in ("reasons", "absences", "held", "broken", "variants"):
            getattr(total, counter).update(getattr(tally, counter))
        for name, bins in tally.ratios.items():
            before = total.ratios.get(name, [0] * len(bins))
            total.ratios[name] = [a + b for a, b in zip(before, bins, strict=True)]
        for cell, worst in tally.places.items():
            total.places[cell] = max(total.places.get(cell, 0.0), worst)
    return total


def by_backend(report: Report) -> dict[Place, Tally]:
    """Tallies of each device and backend over all dtypes."""
    grouped: dict[Place, list[Tally]] = {}
    for (device, backend, _), tally in sorted(report.tallies.items()):
        grouped.setdefault((device, backend), []).append(tally)
    return {place: totals(tallies) for place, tallies in grouped.items()}


def checks(tallies: Iterable[Tally], found: Sequence[Found] = ()) -> tuple[str, ...]:
    """Every check in the order they are looked at, then the other ways to fail that occurred."""
    broken = {name for tally in tallies for name in tally.broken}
    broken |= {item.outcome.failure.check for item in found if item.outcome.failure is not None}
    return (*_BY_NAME, *sorted(broken - _BY_NAME.keys()))


def state(tally: Tally, check: str) -> State:
    """Whether a check held wherever it was looked at."""
    return "broken" if tally.broken[check] else "held" if tally.held[check] else "never"


def found_in(report: Report, place: Place, check: str) -> list[Found]:
    """The distinct failures of a check on a device and backend."""
    return [
        item
        for item in report.failures
        if item.outcome.failure is not None
        and (item.outcome.device, item.outcome.backend, item.outcome.failure.check) == (*place, check)
    ]


def says(check: str) -> str:
    """What a check states."""
    known: Check | None = _BY_NAME.get(check)
    return known.says if known is not None else OTHERS.get(check, "")


def coverage(report: Report) -> dict[str, int]:
    """How often each known trigger was met, those never met included."""
    return {name: report.triggers[name] for name in TRIGGERS}


def met(report: Report) -> str:
    """The coverage of triggers in a sentence."""
    counts = coverage(report)
    never = [name for name, count in counts.items() if not count]
    rest = f"; never met: {', '.join(never)}" if never else ""
    return f"{len(counts) - len(never)} of {len(counts)} known triggers were met{rest}"


def emulated(device: str, variables: Mapping[str, str]) -> str:
    """That kernels were emulated, and what that is worth, in a sentence."""
    return (
        f"emulated on {device} ({emulation.text(variables)}): small cases; this says nothing about a compiler or speed,"
        " nor about races that the emulation does not report"
    )


def refused_only(tally: Tally) -> str:
    """Why nothing was verified: the commonest reason."""
    if tally.reasons:
        return tally.reasons.most_common(1)[0][0]
    return "it cannot run here" if tally.unavailable else "nothing was tried on it"


def verdict(report: Report) -> str:
    """The end of a run in a few words."""
    count, refused, never = len(report.failures), len(report.demanded.refused), len(report.demanded.never)
    wrong = [f"{count} distinct mismatch{'es' * (count != 1)}"] if count else []
    lacking = [f"{refused} demanded class{'es' * (refused != 1)} refused"] if refused else []
    return {
        0: "every result is within its error bound",
        1: ", ".join(wrong + lacking),
        2: f"{'not whole' if report.missing else 'interrupted'}; what ran is within its error bound",
        3: f"{never} demanded class{'es' * (never != 1)} never tried" if report.verified else "nothing was verified",
    }[report.exit_code]
