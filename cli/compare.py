"""``attnswitch bench compare``: two runs held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnswitch.bench import compare as comparing
from attnswitch.bench.compare import Pair, Rule

from . import render

__all__ = ["compare"]

#: Facts of the environment that say nothing about the comparison.
_OWN = ("attnswitch",)


def compare(
    before: Annotated[Path, typer.Argument(help="JSON of an earlier run.", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="JSON of a later one.", exists=True, dir_okay=False)],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="slower=1.10, larger=1.05 (memory), missing or wrong: exit code 1 if it is so (repeatable)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two runs, candidate by candidate and row by row.

    A time counts as slower only if the two are further apart than their spread (20th to 80th percentile) as well.
    Exit code 0: no condition of --fail-if is met. 1: one is. 2: the tool could not do its work. 3: nothing in common.
    """
    rules = [Rule.parse(text) for text in fail_if or ()]
    one, two = comparing.load(before), comparing.load(after)
    found = comparing.pairs(one, two)
    broken = {index: [rule.name for rule in rules if rule.broken(pair)] for index, pair in enumerate(found)}
    notes = comparing.differences(one, two, _OWN)
    if json:
        document = [_plain(pair) | {"broken": broken[index]} for index, pair in enumerate(found)]
        render.write_json({"pairs": document, "differences": notes, "means": _means(found)}, None)
    else:
        _show(found, broken, notes)
    both = any(pair.ratio is not None for pair in found)
    raise typer.Exit(1 if any(broken.values()) else 0 if both else 3)


def _show(found: list[Pair], broken: dict[int, list[str]], notes: list[str]) -> None:
    columns = ("suite", "row", "", "candidate", "before", "after", "ratio")
    rows = render.table(*columns, "what", right=("before", "after", "ratio"))
    for index, pair in enumerate(found):
        r = pair.record
        before, after = (_value(pair, value) for value in pair.values)
        cells = (r.suite, r.row, r.direction, r.candidate, before, after)
        rows.add_row(*map(render.escape, cells), *_judged(pair, broken[index]))
    render.whole(rows)
    for mean in _means(found):
        suite, candidate = render.escape(mean["suite"]), render.escape(mean["candidate"])
        render.console.print(
            f"{suite} {mean['direction']}: {candidate} takes [bold]{mean['ratio']:.3f}[/] times as much as before"
            f" (geometric mean, rows: {mean['rows']})",
            soft_wrap=True,
        )
    for note in notes:
        render.console.print(f"[yellow]not the same[/] {render.escape(note)}", soft_wrap=True)
    count = sum(map(bool, broken.values()))
    if count:
        render.console.print(f"[bold red]{count} of {len(found)} meet a condition of --fail-if[/]", soft_wrap=True)


def _judged(pair: Pair, broken: list[str]) -> tuple[str, str]:
    if pair.ratio is None:
        state = "not there" if pair.after is None else pair.after.status if pair.before is not None else "new"
        return "", f"[bold red]{state}[/]" if broken else f"[dim]{state}[/]"
    colour = "" if not pair.apart else "[green]" if pair.ratio < 1 else "[red]"
    ratio = f"{colour}{pair.ratio:.3f}{'[/]' if colour else ''}"
    return ratio, f"[bold red]{', '.join(broken)}[/]" if broken else "" if pair.apart else "[dim]within the spread[/]"


def _value(pair: Pair, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.4g} MiB" if pair.measure == "memory" else f"{value:.4g} ms"


def _means(found: list[Pair]) -> list[dict[str, Any]]:
    return [
        {"suite": suite, "direction": direction, "candidate": candidate, "ratio": round(ratio, 4), "rows": rows}
        for (suite, direction, candidate), (ratio, rows) in comparing.means(found).items()
    ]


def _plain(pair: Pair) -> dict[str, Any]:
    r = pair.record
    before, after = pair.values
    named = {"suite": r.suite, "row": r.row, "direction": r.direction, "candidate": r.candidate, "problem": r.problem}
    return {
        **named,
        "measure": pair.measure,
        "before": before,
        "after": after,
        "ratio": pair.ratio,
        "apart": pair.apart,
    }
