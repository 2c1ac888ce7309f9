"""One report of several logs (``ndjson``): of the shards of a run, or of runs on several machines.

A log is whole up to its last outcome however its run ended, so that a shard which was killed loses its own part alone.
What is missing is said in ``Report.missing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.names import shown
from attnswitch.verify.demands.figures import Demanded
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Failure, Outcome, Verdict
from attnswitch.verify.report.ndjson import SCHEMA
from attnswitch.verify.session.counting import Counts
from attnswitch.verify.session.explore import Source
from attnswitch.verify.session.shard import Shard
from attnswitch.verify.session.tally import INTERRUPTED, Found, Report

__all__ = ["joined"]

#: Of a plan, what each shard may have of its own.
_OWN = frozenset(("shard", "corpus", "pass_over", "workers", "timeout", "isolate", "keep_worst", "remember", "seconds"))
_SOURCES = {source.name.lower(): source for source in Source}
_OUTCOME: dict[str, Any] = {
    "backend": str,
    "device": str,
    "verdict": Verdict,
    "chosen": str | None,
    "variant": str | None,
    "checks": list[str] | None,
    "ratios": dict[str, Any] | None,
    "worst": dict[str, list[int]] | None,
    "failure": dict[str, Any] | None,
    "reasons": list[int] | None,
    "seconds": float | None,
}


@dataclass(slots=True)
class _Run:
    """One run of a log: the lines that are its own, what its start says, and how far it came."""

    path: Path
    first: int
    plan: dict[str, Any]
    environment: dict[str, Any]
    shard: Shard
    last: int = 0
    cases: int = 0
    seconds: float = 0.0
    end: dict[str, Any] | None = None
    error: str = ""

    @property
    def place(self) -> Shard | Path:
        """What it is a run of: a shard, wherever that was tried, or all there is, by one machine."""
        return self.shard if self.shard.count > 1 else self.path

    @property
    def what(self) -> str:
        """It, at the beginning of a sentence."""
        return f"shard {self.shard}" if self.shard.count > 1 else str(self.path)


def joined(paths: Sequence[Path]) -> Report:
    """The report of the runs in ``paths``; of a shard that was tried several times, that of its best try.

    Raises ``InvalidProblem`` for what is no log, and for shards of different runs.
    """
    best: dict[Shard | Path, _Run] = {}
    without: list[Path] = []
    for path in dict.fromkeys(paths):
        found = list(_runs(path))
        if not found:
            without.append(path)
        for run in found:
            other = best.get(run.place)
            if other is None or (run.end is not None, run.cases) >= (other.end is not None, other.cases):
                best[run.place] = run
    runs = list(best.values())
    if not runs:
        empty = f" in {', '.join(map(str, without))}" if without else ""
        raise InvalidProblem(f"there is no run to join{empty}: name logs that attnswitch verify --ndjson wrote")
    _check_alike([run for run in runs if run.shard.count > 1])
    if len({run.shard.count for run in runs}) > 1:
        raise InvalidProblem(f"{runs[0].path} and others: shards of a run, and whole runs, are two reports")
    report = _blank(runs)
    report.missing += [f"{path}: no run began there" for path in without]
    counts = Counts(report)
    for run in runs:
        _Reader(run, report, counts).read()
    return report


def _check_alike(shards: Sequence[_Run]) -> None:
    for other in shards[1:]:
        for name in shards[0].plan:
            if name not in _OWN and shards[0].plan[name] != other.plan.get(name):
                raise InvalidProblem(
                    f"{shards[0].path} and {other.path} are shards of different runs: their {name} differ"
                )
        if shards[0].shard.count != other.shard.count:
            raise InvalidProblem(
                f"{shards[0].path} and {other.path} are shards of different runs: {shards[0].shard} and {other.shard}"
            )


def _blank(runs: Sequence[_Run]) -> Report:
    """A report that has counted nothing, with all that does not come from cases."""
    requirements = [Requirement.parse(text) for text in runs[0].plan.get("requirements") or ()]
    report = Report(runs[0].plan.get("seed") or 0, missing=list(_missing(runs)))
    held: dict[tuple[str, str], None] = {}
    for run in runs:
        for target in run.plan["targets"]:
            if target["recipes"] > 1:
                report.recipes[target["device"]] = target["recipes"]
            if target["emulation"]:
                report.emulated[target["device"]] = target["emulation"]
            named = run.plan.get("held") or target["backends"]
            held |= {(target["device"], name): None for name in target["backends"] if name in named}
        report.seconds = max(report.seconds, run.seconds)
        for name, value in run.environment.items():
            known = report.environment.get(name, "").split(" and ")
            if str(value) not in known:
                report.environment[name] = " and ".join([*filter(None, known), str(value)])
    ends = [run.end for run in runs if run.end is not None]
    report.workers = sum(end["workers"] for end in ends)
    report.passed_over = [sentence for end in ends for sentence in end["passed_over"]]
    stopped = [f"{run.what}: {run.end['stopped']}" for run in runs if run.end is not None and run.end["stopped"]]
    report.stopped = "; ".join(text for text in stopped if not text.endswith(INTERRUPTED))
    report.demanded = Demanded(requirements, held)
    return report


def _missing(runs: Sequence[_Run]) -> Iterator[str]:
    """What was not done, in sentences."""
    count = runs[0].shard.count
    absent = [str(Shard(n, count)) for n in range(1, count + 1) if n not in {run.shard.number for run in runs}]
    if count > 1 and absent:
        yield f"shard{'s' * (len(absent) > 1)} {', '.join(absent)}: there is no log"
    for run in runs:
        if run.error:
            yield f"{run.what}: after {run.cases} cases it ended by {run.error} ({run.path})"
        elif run.end is None:
            yield f"{run.what}: its log ends after {run.cases} cases, as if it was killed or still runs ({run.path})"
        elif run.end["stopped"] == INTERRUPTED:
            yield f"{run.what}: it was interrupted after {run.cases} cases ({run.path})"


def _runs(path: Path) -> Iterator[_Run]:
    """The runs of a log, in their order."""
    run: _Run | None = None
    for number, event in _events(path):
        kind = event.get("event")
        if kind == "start":
            if run is not None:
                yield run
            run = _started(path, number, event)
        elif run is None:
            raise InvalidProblem(f"{path}, line {number}: a log begins with a start, and this is {shown(kind)}")
        else:
            run.last = number
            run.cases += kind == "case"
            run.seconds = _at(path, number, event, {"at": float})["at"]
            if kind == "end":
                wanted = {"workers": int, "stopped": str, "passed_over": list[str], "environment": dict[str, str]}
                run.end = _at(path, number, event, wanted)
                run.environment = run.end["environment"]
            elif kind == "error":
                run.error = _at(path, number, event, {"error": str})["error"]
    if run is not None:
        yield run


def _started(path: Path, number: int, event: dict[str, Any]) -> _Run:
    found = _at(path, number, event, {"schema": int, "plan": dict[str, Any], "environment": dict[str, Any]})
    if found["schema"] != SCHEMA:
        raise InvalidProblem(f"{path}, line {number}: schema {found['schema']}, and this version reads {SCHEMA}")
    plan = found["plan"]
    options = {"seed": int | None, "held": list[str] | None, "requirements": list[str] | None}
    _at(path, number, plan, {"targets": list[dict[str, Any]], "shard": str, **options})
    target = {"device": str, "backends": list[str], "recipes": int, "emulation": dict[str, str]}
    for each in plan["targets"]:
        _at(path, number, each, target)
    try:
        shard = Shard.parse(plan["shard"])
        for text in plan.get("requirements") or ():
            Requirement.parse(text)
    except InvalidProblem as error:
        raise InvalidProblem(f"{path}, line {number}: {error}") from None
    return _Run(path, number, plan, found["environment"], shard, number)


@dataclass(slots=True)
class _Reader:
    """Adds the events of one run to a report."""

    run: _Run
    report: Report
    counts: Counts
    reasons: dict[int, str] = field(default_factory=dict)
    source: Source = Source.DRAWN
    case: Case = field(default_factory=Case)

    def read(self) -> None:
        """All lines that are this run's."""
        for number, event in _events(self.run.path):
            if self.run.first < number <= self.run.last:
                try:
                    self._take(event)
                except InvalidProblem as error:
                    raise InvalidProblem(f"{self.run.path}, line {number}: {error}") from None

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "reason":
            found = reading.table(event, {"id": int, "text": str})
            self.reasons[found["id"]] = found["text"]
        elif kind == "case":
            found = reading.table(event, {"source": Literal[*_SOURCES], "case": dict})
            self.source, self.case = _SOURCES[found["source"]], Case.from_json(found["case"])
            self.counts.case(self.source, self.case)
        elif kind == "outcome":
            self.counts.add(self.source, self._outcome(reading.table(event, _OUTCOME)))
        elif kind == "divergence":
            found = reading.table(event, {"device": str, "backend": str, "id": str, "shows": bool})
            self.report.divergences.append((found["device"], found["backend"], found["id"], found["shows"]))
        elif kind == "failure":
            self._failed(event)

    def _outcome(self, found: dict[str, Any]) -> Outcome:
        reasons = []
        for number in found["reasons"] or ():
            if number not in self.reasons:
                raise InvalidProblem(f"reason {number} was not said before")
            reasons.append(self.reasons[number])
        if without := (found["worst"] or {}).keys() - (found["ratios"] or {}).keys():
            raise InvalidProblem(f"worst has {shown(min(without))}, of which ratios has nothing")
        return Outcome(
            self.case,
            found["backend"],
            found["device"],
            found["verdict"],
            found["chosen"] or found["backend"],
            tuple(reasons),
            _ratios(found["ratios"] or {}),
            None if found["failure"] is None else _failure(found["failure"]),
            tuple(found["checks"] or ()),
            {name: tuple(where) for name, where in (found["worst"] or {}).items()},
            found["variant"] or "",
            found["seconds"] or 0.0,
        )

    def _failed(self, event: dict[str, Any]) -> None:
        wanted = {
            "backend": str,
            "device": str,
            "chosen": str | None,
            "variant": str,
            "ratios": dict[str, Any],
            "failure": dict[str, Any],
            "case": dict,
            "seconds": float,
            "cases_before": int,
            "from_corpus": bool,
            "path": str | None,
            "replayed_with": list[str],
        }
        found = reading.table(event, wanted)
        case, failure = Case.from_json(found["case"]), _failure(found["failure"])
        place = found["backend"], found["device"]
        more = {"ratios": _ratios(found["ratios"]), "failure": failure, "variant": found["variant"]}
        outcome = Outcome(case, *place, "mismatch", found["chosen"], **more)
        if outcome.kind not in {known.outcome.kind for known in self.report.failures}:
            path = None if found["path"] is None else Path(found["path"])
            rest = found["from_corpus"], found["seconds"], found["cases_before"], tuple(found["replayed_with"])
            self.report.failures.append(Found(outcome, path, *rest))


def _failure(found: dict[str, Any]) -> Failure:
    given = (name for name in ("got", "expected", "bound") if found.get(name) is not None)
    return reading.made(Failure, found | {name: _number(found[name], name) for name in given}, "failure")


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    return {name: _number(ratio, f"ratios.{name}") for name, ratio in found.items()}


def _number(value: Any, name: str) -> float:
    """As ``facts.number`` writes it."""
    number: float = float(value) if value in ("inf", "-inf", "nan") else reading.checked(value, float, name)
    return number


def _at(path: Path, number: int, event: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        return reading.table(event, wanted)
    except InvalidProblem as error:
        raise InvalidProblem(f"{path}, line {number}: {error}") from None


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a log, from 1 on. A process that is killed leaves half a line; another start may follow it."""
    torn: tuple[int, InvalidProblem] | None = None
    for number, line in enumerate(_lines(path), 1):
        try:
            event = reading.checked(reading.parse(line), dict, "a line")
        except InvalidProblem as error:
            _raise(path, torn)
            torn = number, error
            continue
        if event.get("event") != "start":
            _raise(path, torn)
        torn = None
        yield number, event


def _raise(path: Path, torn: tuple[int, InvalidProblem] | None) -> None:
    if torn is not None:
        raise InvalidProblem(f"{path}, line {torn[0]}: {torn[1]}")


def _lines(path: Path) -> Iterable[bytes]:
    """Each read up to as much as such a line has."""
    try:
        with path.open("rb") as file:
            while line := file.readline(reading.SIZE):
                yield line
    except OSError as error:
        raise InvalidProblem(f"{path}: it cannot be read: {error.strerror}") from None
