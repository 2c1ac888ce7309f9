"""A run as a picture: TFLOP/s over the sequence length, the roofline, and the speed beside torch's own choice.

Drawn by matplotlib, which the extra ``plot`` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnswitch.bench.compare import records
from attnswitch.bench.record import PASSES, Record
from attnswitch.errors import AttnswitchError, InvalidProblem
from attnswitch.names import printable
from attnswitch.problem import Problem, cost

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KINDS", "draw"]

_STYLE = "tableau-colorblind10"
_MARKERS = "osD^vPX*"
#: Inches of a panel.
_WIDTH, _HEIGHT = 4.6, 3.4
#: The peer that speed is set against.
_BASE = "torch"


def draw(kind: str, document: dict[str, Any], path: Path) -> None:
    """Draw the run ``document`` as ``kind``, one of ``KINDS``, into a PNG, SVG or PDF file.

    Raises:
        AttnswitchError: matplotlib is not installed.
        InvalidProblem: the run holds nothing that could be drawn so, or the file's name ends in another way.
        OSError: it cannot be written.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AttnswitchError(f"plots need matplotlib ({error}): pip install 'attnswitch[plot]'") from None
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidProblem(f"{path}: expected a name that ends in .png, .svg or .pdf")
    found = [record for record in records(document) if record.status == "measured" and record.ms]
    with style.context(_STYLE):
        figure = Figure(layout="constrained")
        KINDS[kind](figure, found, document)
        figure.suptitle(_title(document), fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(path, dpi=160)
        except ValueError as error:
            raise InvalidProblem(f"{path}: this run makes no picture, as matplotlib says: {error}") from None


def _title(document: dict[str, Any]) -> str:
    environment = document["environment"]
    where = environment.get("gpu") if document["device"] != "cpu" else environment.get("system")
    return _text(f"{where or document['device']}, torch {environment.get('torch', '?')}, {document['date']}")


def _text(words: str) -> str:
    """Words of a document as they are, which matplotlib would take for formulas between two dollar signs."""
    return printable(words).replace("$", r"\$")


def _throughput(figure: Figure, found: list[Record], document: dict[str, Any]) -> None:
    """A panel for each kind of problem, its length along the axis; a line for each candidate."""
    panels = {title: lines for title, lines in _lines(found).items() if any(map(_has_lengths, lines.values()))}
    if not panels:
        raise InvalidProblem("no problem of this run was measured at more than one length, which a line needs")
    names = sorted({name for lines in panels.values() for name in lines})
    for axes, ((title, unit), lines) in zip(_grid(figure, len(panels)), panels.items(), strict=True):
        for name, line in lines.items():
            axes.plot(*zip(*sorted(line), strict=True), label=_text(name), **_look(names, name))
        limit = document["limits"]["tflops" if unit == "TFLOP/s" else "gbps"]
        axes.axhline(limit, color="0.5", linestyle="--", linewidth=1, label="measured limit")
        axes.set(title=_text(title), xlabel="keys", ylabel=unit, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.title.set_fontsize("small")
    _legend(figure)


#: Numbers of keys and rates, by panel (its title and unit) and candidate.
_Lines = dict[tuple[str, str], dict[str, list[tuple[int, float]]]]


def _lines(found: list[Record]) -> _Lines:
    """The rates. Batch and heads are left out of what a panel is about, unless two of its problems differ in them only.

    A suite often has fewer sequences where they are longer, so that every call has as many tokens. Queries that are
    fewer or more than the keys have a panel for each number of them.
    """
    rated = [(record, Problem.parse(record.problem)) for record in found if record.tflops or record.gbps]
    places: dict[tuple[str, int], set[str]] = {}
    for record, p in rated:
        places.setdefault((_subject(p, record), p.seq_k), set()).add(record.problem)
    crowded = {subject for (subject, _), problems in places.items() if len(problems) > 1}
    lines: _Lines = {}
    for record, p in rated:
        title = _subject(p, record)
        if title in crowded:
            title = f"b{p.batch}.h{p.heads_q}/{p.heads_kv}: {title}"
        unit, rate = ("GB/s", record.gbps) if record.gbps else ("TFLOP/s", record.tflops)
        lines.setdefault((title, unit), {}).setdefault(record.candidate, []).append((p.seq_k, rate or 0.0))
    return lines


def _has_lengths(line: list[tuple[int, float]]) -> bool:
    return len({length for length, _ in line}) > 1


def _roofline(figure: Figure, found: list[Record], document: dict[str, Any]) -> None:
    """Each result at its operations a byte, under the roof of what was measured in the same run."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in found:
        problem, passes = Problem.parse(record.problem), PASSES[record.direction]
        work = sum(cost.flops(problem, backward=backward) for backward in passes)
        if record.ms is not None and work:
            intensity = work / sum(cost.least_bytes(problem, backward=backward) for backward in passes)
            points.setdefault(record.candidate, []).append((intensity, work / record.ms / 1e9))
    if not points:
        raise InvalidProblem("this run holds no time that could stand on a roofline")
    tflops, gbps = document["limits"]["tflops"], document["limits"]["gbps"]
    if not (tflops > 0 and gbps > 0):
        raise InvalidProblem(f"limits of {tflops} TFLOP/s and {gbps} GB/s make no roofline")
    (axes,) = _grid(figure, 1)
    names = sorted(points)
    for name in names:
        across, up = zip(*points[name], strict=True)
        axes.plot(across, up, label=_text(name), **_look(names, name) | {"linestyle": ""})
    ridge = 1e3 * tflops / gbps
    every = [across for line in points.values() for across, _ in line]
    first, last = min(*every, ridge) / 2, max(*every, ridge) * 2
    roof = [min(tflops, x * gbps / 1e3) for x in (first, ridge, last)]
    axes.plot([first, ridge, last], roof, color="0.4", linewidth=1, label="measured limits")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte, each operand moved once", ylabel="TFLOP/s")
    _legend(figure)


def _speedup(figure: Figure, found: list[Record], document: dict[str, Any]) -> None:
    """A bar for each row and candidate: how many times as fast as torch's own choice."""
    base = {record.group: record.ms for record in found if record.candidate == _BASE and record.ms}
    bars: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in found:
        if record.candidate != _BASE and record.ms and record.group in base:
            bars.setdefault(record.group, {})[record.candidate] = base[record.group] / record.ms
    if not bars:
        raise InvalidProblem(f"this run holds nothing beside the peer {_BASE!r}: measure with --peer {_BASE}")
    names = sorted({name for row in bars.values() for name in row})
    figure.set_size_inches(2 * _WIDTH, 1.6 + len(bars) * (0.1 + 0.16 * len(names)))
    axes = figure.subplots()
    thick = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [(place, row[name]) for place, row in enumerate(bars.values()) if name in row]
        heights = [place + (number - (len(names) - 1) / 2) * thick for place, _ in places]
        axes.barh(heights, [speed for _, speed in places], thick, color=f"C{number % 10}", label=_text(name))
    axes.axvline(1.0, color="0.4", linewidth=1)
    several = len({suite for suite, _, _ in bars}) > 1
    labels = [f"{suite}: {row}, {way}" if several else f"{row}, {way}" for suite, row, way in bars]
    axes.set_yticks(range(len(bars)), [_text(label) for label in labels], fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xlabel=f"times as fast as {_BASE}'s own choice")
    _legend(figure)


Draw = Callable[["Figure", list[Record], dict[str, Any]], None]
#: What can be drawn, by name.
KINDS: dict[str, Draw] = {"throughput": _throughput, "roofline": _roofline, "speedup": _speedup}


def _subject(problem: Problem, record: Record) -> str:
    """What a panel is about: everything but batch, head counts and keys."""
    rest = str(problem).split(".", 3)[3]  # after batch, heads and lengths
    parts = [f"{problem.group} heads on 1"] if problem.group > 1 else []
    if problem.seq_q != problem.seq_k:
        parts.append("1 query" if problem.seq_q == 1 else f"{problem.seq_q} queries")
    return ", ".join((*parts, rest, record.direction))


def _grid(figure: Figure, count: int) -> Sequence[Axes]:
    """``count`` panels, at most three side by side."""
    across = min(count, 3)
    down = -(-count // across)
    figure.set_size_inches(_WIDTH * across, _HEIGHT * down + 0.4)
    return [figure.add_subplot(down, across, place + 1) for place in range(count)]


def _look(names: Sequence[str], name: str) -> dict[str, Any]:
    number = names.index(name)
    return {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4}


def _legend(figure: Figure) -> None:
    """One for all panels."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip((str(label) for label in labels), handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=4, fontsize="small")
