"""A finished run of ``attnswitch verify`` on the terminal."""

from __future__ import annotations

from attnswitch.verify.report import facts
from attnswitch.verify.session.shard import WHOLE
from attnswitch.verify.session.tally import Report, Tally

from . import demands, render
from . import speed as speeds

__all__ = ["show"]

#: Reasons that are shown of a backend which refused most of what was asked of it.
_REASONS = 3


def show(report: Report) -> None:
    """Counts, checks, demands, speeds, failures, what is missing, and the verdict."""
    render.show(render.counts(report))
    render.console.print(
        "[dim]grads: verified with gradients; error/bound: the worst element, right up to 1; refused: not run, with a"
        " reason[/]",
        soft_wrap=True,
    )
    render.matrix(report)
    demands.show(report)
    speeds.show(report)
    render.failures(report.failures)
    rate = report.cases / report.seconds if report.seconds else 0.0
    under_way = "" if report.pace is None else f", {report.pace:.0f} once under way"
    part = "" if report.shard == WHOLE else f", shard {report.shard}"
    stopped = f", stopped: {report.stopped}" if report.stopped else ""
    replayed = f", {report.replayed} saved cases replayed" if report.replayed else ""
    for (device, backend), tally in facts.by_backend(report).items():
        _refused(device, backend, tally)
    for sentence in report.passed_over:
        render.console.print(f"[yellow]passed over[/] {render.escape(sentence)}", soft_wrap=True)
    for device, backend, name in report.stale:
        render.console.print(
            f"[yellow]stale divergence[/] {name} of {render.escape(backend)} on {device}: its cases are right in these"
            " versions; end the version range of its entry",
            soft_wrap=True,
        )
    for sentence in report.missing:
        render.console.print(f"[bold red]missing[/] {render.escape(sentence)}", soft_wrap=True)
    render.console.print(
        f"\n{report.cases} cases{replayed}; {report.verified} results verified in {report.seconds:.0f} s"
        f" ({rate:.0f} cases/s{under_way}), seed {report.seed}{part}{stopped}",
        soft_wrap=True,
    )
    render.verdict(report)


def _refused(device: str, backend: str, tally: Tally) -> None:
    """Why nothing was verified, or less than was refused."""
    reasons = (tally.absences + tally.reasons).most_common(_REASONS)
    if not reasons or tally.refused + tally.unavailable <= tally.verified + tally.mismatched:
        return
    name, where = render.escape(backend), render.escape(device)
    if not tally.verified and not tally.mismatched:
        text = f"[dim]nothing verified of {name} on {where}, mostly:[/] {render.escape(reasons[0][0])}"
    else:
        mostly = "; ".join(f"{count} times {render.escape(reason)}" for reason, count in reasons)
        text = f"[dim]refused by {name} on {where}, mostly:[/] {mostly}"
    render.console.print(text, soft_wrap=True)
