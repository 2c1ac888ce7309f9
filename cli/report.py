"""A finished run of ``attnswitch verify`` on the terminal."""

from __future__ import annotations

from attnswitch.verify.report import facts
from attnswitch.verify.session.shard import WHOLE
from attnswitch.verify.session.tally import Report

from . import demands, render
from . import speed as speeds

__all__ = ["show"]


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
        reasons = (tally.absences + tally.reasons).most_common(1)
        if not tally.verified and not tally.mismatched and reasons:
            why = render.escape(reasons[0][0])
            render.console.print(
                f"[dim]nothing verified of {render.escape(backend)} on {device}, mostly:[/] {why}", soft_wrap=True
            )
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
