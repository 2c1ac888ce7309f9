"""A finished run as Markdown, for the step summary of GitHub Actions and for comments."""

from __future__ import annotations

from attnswitch.names import in_a_line, printable
from attnswitch.verify.report import demands, facts
from attnswitch.verify.session.tally import Found, Report

__all__ = ["LIMIT", "to_markdown"]

#: GitHub shows no summary of a step above 1 MiB; other tools may have written to the same one.
LIMIT = 2**19
#: Failures that are shown, and characters of what each says: a message may hold a compiler's whole output.
SHOWN, LONGEST = 10, 2000


def to_markdown(report: Report) -> str:
    """The verdict, a table by device and backend, the first failures, and what was covered."""
    stopped = f", stopped: {report.stopped}" if report.stopped else ""
    lines = [
        "## attnswitch verify",
        "",
        f"**{facts.verdict(report)}**: {report.cases} cases, {report.verified} results verified in"
        f" {report.seconds:.0f} s, seed {report.seed}{_escape(stopped)}",
        "",
        *(f"{_escape(facts.emulated(*item))}\n" for item in report.emulated.items()),
        "| device | backend | verified | with gradients | worst error / bound | refused | wrong |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (device, backend), tally in facts.by_backend(report).items():
        worst = f"{tally.worst:.3f}" if tally.verified else "–"
        wrong = f"**{tally.mismatched}**" if tally.mismatched else "0"
        lines.append(
            f"| {_escape(device)} | {_escape(backend)} | {tally.verified} | {tally.gradients} | {worst}"
            f" | {tally.refused} | {wrong} |"
        )
    lines += _demanded(report)
    for number, found in enumerate(report.failures[:SHOWN], 1):
        lines += ["", *_failure(number, found)]
    if (more := len(report.failures) - SHOWN) > 0:
        lines += ["", f"… and {more} more."]
    environment = ", ".join(f"{name} {value}" for name, value in facts.environment_of(report).items())
    lines += ["", f"Coverage: {_escape(facts.met(report))}.", "", f"Environment: {_escape(environment)}."]
    return _within(lines)


def _demanded(report: Report) -> list[str]:
    """A table of what was demanded, if anything was."""
    rows = [
        f"| {' | '.join(map(_escape, (row.requirement, row.word, row.device, row.backend)))} | {row.share.drawn}"
        f" | {row.share.taken} | {row.percent} | {_escape(row.reason)} |"
        for row in demands.rows(report)
    ]
    head = "| required | demanded | device | backend | drawn | taken | share | refused, mostly |"
    return ["", head, "|---|---|---|---|---:|---:|---:|---|", *rows] if rows else []


def _failure(number: int, found: Found) -> list[str]:
    outcome, failure = found.outcome, found.outcome.failure
    assert failure is not None
    chose = f" (chose {outcome.chosen})" if outcome.chosen not in (None, outcome.backend) else ""
    where = _escape(f"{failure.title}, {outcome.backend} on {outcome.device}{chose}")
    head = f"#### {number}. {where}, {facts.when(found)}"
    body = (str(outcome.case), failure.message, facts.element(failure), facts.replay_command(found))
    # An indented block has no end that a message could hold.
    indented = [f"    {line}" for text in body if text for line in printable(text[:LONGEST]).splitlines()]
    return [head, "", *indented]


def _escape(text: str) -> str:
    """Shown as it is, in a table and outside."""
    text = printable(in_a_line(text[:LONGEST])).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]|~#" else letter for letter in text)


def _within(lines: list[str]) -> str:
    """As many whole lines as the limit allows."""
    kept, size = [], 0
    for line in lines:
        size += len(line.encode(errors="replace")) + 1
        if size > LIMIT - 100:
            kept.append("\n… cut off: the whole is in the JSON and HTML reports.")
            break
        kept.append(line)
    return "\n".join(kept) + "\n"
