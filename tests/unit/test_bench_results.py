"""What is made of a run that was measured: CSV, comparisons with another, and plots."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attnswitch import AttnswitchError, InvalidProblem
from attnswitch.bench import compare, document, plots
from attnswitch.bench.compare import Pair, Rule
from attnswitch.bench.measure import Budget, Limits
from attnswitch.bench.record import Record
from attnswitch.bench.table import to_csv

LIMITS = Limits(100.0, 1000.0, 1024, "bfloat16", 2**26)


def record(candidate: str = "triton", length: int = 1024, ms: float = 1.0, **changes: Any) -> Record:
    problem = f"b1.h16.s{length}.d128.bf16"
    made = Record("grid", f"S {length}", problem, "speed", "forward", candidate, "measured")
    return replace(made, ms=ms, ms_low=0.97 * ms, ms_high=1.03 * ms, runs=30, tflops=80.0 / ms, **changes)


def failed(status: Any, **changes: Any) -> Record:
    blank = replace(record(**changes), status=status, why="for a reason")
    return replace(blank, ms=None, ms_low=None, ms_high=None, tflops=None)


def run(*records: Record, limits: Limits = LIMITS, device: str = "cuda:0", **environment: str) -> dict[str, Any]:
    facts = {"torch": "2.11.0", "gpu": "NVIDIA H200", **environment}
    made = document.to_json(
        records,
        device=device,
        limits=limits,
        budget=Budget(),
        environment=facts,
        command="attnswitch bench",
        seconds=1.0,
    )
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_a_line_for_each_record() -> None:
    one, two = csv.DictReader(to_csv([record(), failed("refused", candidate="flex")]).splitlines())
    assert (one["candidate"], float(one["ms"]), one["why"]) == ("triton", 1.0, "")
    assert (two["status"], two["ms"], two["why"]) == ("refused", "", "for a reason")


# -- what the choice costs ---------------------------------------------------------------------------------------------


def test_regret_is_against_the_fastest_backend_of_each_row() -> None:
    records = []
    for length, times in {1024: (1.1, 2.0, 1.0, 3.0), 2048: (2.0, 2.0, 2.5, 0.5)}.items():
        names = ("auto", "triton", "sdpa-flash", "torch")
        records += [record(name, length, ms) for name, ms in zip(names, times, strict=True)]
    records += [record("triton", 4096, 1.0), failed("refused", candidate="auto", length=4096)]
    records += [failed("wrong", candidate="cuda", length=1024)]
    auto, torch = document.regrets(records)
    assert (auto["suite"], auto["direction"], auto["of"], auto["rows"]) == ("grid", "forward", "auto", 2)
    assert auto["regret"] == round((1.1 * 1.0) ** 0.5, 4)
    assert (auto["worst"], auto["worst_row"]) == (1.1, "S 1024")
    assert (torch["of"], torch["regret"], torch["worst"]) == ("torch", round((3.0 * 0.25) ** 0.5, 4), 3.0)
    assert run(*records)["regrets"] == [auto, torch]
    assert document.regrets([record("triton")]) == []


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_a_document_is_read_back() -> None:
    for made in (record(deviation=float("nan")), failed("wrong"), record(memory=2**20)):
        assert str(compare.records(run(made))) == str([made])


def test_pairs_and_ratios() -> None:
    before = run(record(ms=1.0), record("flex", ms=2.0), record("gone"))
    after = run(record(ms=1.5), record("flex", ms=2.02), record("new"))
    found = {pair.record.candidate: pair for pair in compare.pairs(before, after)}
    assert list(found) == ["triton", "flex", "new", "gone"]
    assert [pair.ratio for pair in found.values()] == [1.5, 1.01, None, None]
    assert [pair.apart for pair in found.values()] == [True, False, False, False]
    means = compare.means(found.values())
    assert [key[2] for key in means] == ["triton", "flex"]
    assert [round(mean, 6) for mean, _ in means.values()] == [1.5, 1.01]
    assert [rows for _, rows in means.values()] == [1, 1]


SLOWER = Pair(record(ms=1.0), record(ms=1.2))
FASTER = Pair(record(ms=1.2), record(ms=1.0))
NOISY = Pair(record(ms=1.0), replace(record(ms=1.2), ms_low=0.9))
LARGER = Pair(record(memory=100, kind="memory"), record(memory=120, kind="memory"))


@pytest.mark.parametrize(
    ("text", "pair", "broken"),
    [
        ("slower=1.10", SLOWER, True),
        ("slower=1.25", SLOWER, False),
        ("slower=1.10", FASTER, False),
        ("slower=1.10", NOISY, False),
        ("slower=1.10", LARGER, False),
        ("larger=1.10", LARGER, True),
        ("larger=1.30", LARGER, False),
        ("missing", Pair(record(), None), True),
        ("missing", Pair(record(), failed("failed")), True),
        ("missing", Pair(failed("refused"), failed("refused")), False),
        ("missing", Pair(None, record()), False),
        ("wrong", Pair(record(), failed("wrong")), True),
        ("wrong", SLOWER, False),
    ],
)
def test_a_rule(text: str, pair: Pair, broken: bool) -> None:
    assert Rule.parse(text).broken(pair) is broken


@pytest.mark.parametrize("text", ["slower", "slower=", "slower=fast", "slower=0.9", "slower=inf", "missing=1", "late"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(InvalidProblem, match="expected slower=F or larger=F"):
        Rule.parse(text)


def test_what_two_runs_did_not_have_in_common() -> None:
    slower = replace(LIMITS, tflops=80.0)
    notes = compare.differences(run(torch="2.11.0"), run(torch="2.15.0", limits=slower, device="cuda:1"))
    assert notes == [
        "device: cuda:0, then cuda:1",
        "torch: 2.11.0, then 2.15.0",
        "measured limit: 100 TFLOP/s, then 80",
    ]
    assert compare.differences(run(), run()) == []
    halted = replace(LIMITS, gbps=0.0)  # as slow as that, to three digits
    assert compare.differences(run(limits=halted), run()) == ["measured limit: 0 GB/s, then 1000"]


def changed(**changes: Any) -> str:
    """A run with other parts, or without those that are None."""
    return json.dumps({name: value for name, value in {**run(record()), **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("[]", r"it is \[\]: expected an object"),
        ("{}", "it has no field 'schema'"),
        ('{"schema": 2}', "it is of schema 2, and this version reads schema 1"),
        ('{"schema": 1, "records": [], "environment": {}}', "it has no field 'device'"),
        ("[" * 100_000, "it is not JSON that can be read: nested more than 32 deep"),
        (changed(date=None), "it has no field 'date'"),
        (changed(records=[{**record().to_json(), "direction": "up"}]), "direction is 'up': expected one of forward"),
        (changed(records=[{**record().to_json(), "tflops": "many"}]), "tflops is 'many': expected a number"),
        (changed(records=None), "it has no field 'records'"),
        (changed(records={}), "records is {}: expected a list"),
        (changed(records=[1]), r"records\[0\] is 1: expected an object"),
        (changed(records=[{"suite": "x"}]), r"records\[0\] has no field 'row'"),
        (changed(records=[{**record().to_json(), "ms": "fast"}]), r"records\[0\].ms is 'fast': expected a number"),
        (changed(records=[{**record().to_json(), "ms": 10**400}]), "it has an integer of 401 digits"),
        (changed(records=[{**record().to_json(), "ms": 5e-324}]), r"records\[0\].ms is 5e-324: expected a number from"),
        (changed(records=[{**record().to_json(), "ms": "nan"}]), r"records\[0\].ms is nan: expected a number from"),
        (changed(records=[{**record().to_json(), "memory": -1}]), r"records\[0\].memory is -1: expected a number"),
        (changed(records=[{**record().to_json(), "suite": []}]), r"records\[0\].suite is \[\]: expected text"),
        (changed(limits={"tflops": 1e300, "gbps": 1}), "limits.tflops is 1e[+]300: expected a number from"),
        (changed(environment={"torch": 2}), "environment.torch is 2: expected text"),
        (changed(environment="here"), "environment is 'here': expected an object"),
        (changed(limits={"tflops": 1.0}), "limits has no field 'gbps'"),
        (json.dumps({"schema": 1, "costs": []}), "it is one of `attnswitch bench overhead`"),
    ],
)
def test_what_is_no_run(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InvalidProblem, match=f"run.json is no result of `attnswitch bench run --json`: .*{why}"):
        compare.load(tmp_path / "run.json")


# -- plots -------------------------------------------------------------------------------------------------------------


RUN = run(
    *(
        record(name, length, ms)
        for length, ms in ((1024, 1.0), (4096, 0.9))
        for name, ms in (("triton", ms), ("torch", 1.2 * ms))
    ),
    failed("refused", candidate="flex"),
)


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("kind", plots.KINDS)
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_run_is_drawn(kind: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / f"run.{ending}"
    plots.draw(kind, RUN, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":  # text is drawn as shapes, each with its text in a comment
        for word in (b"triton", b"NVIDIA H200, torch 2.11.0"):
            assert b"<!-- " + word in content


@pytest.mark.usefixtures("matplotlib")
def test_the_lines_are_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Any] = []
    figure = importlib.import_module("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    for kind in plots.KINDS:
        plots.draw(kind, RUN, tmp_path / "run.png")
    throughput, roofline, speedup = (made.axes[0] for made in figures)
    lines = {line.get_label(): line for line in throughput.lines}
    assert list(lines["triton"].get_xdata()) == [1024, 4096]
    assert list(lines["triton"].get_ydata()) == pytest.approx([80.0, 80.0 / 0.9])
    assert set(lines["measured limit"].get_ydata()) == {100.0}
    points = {line.get_label(): line for line in roofline.lines}
    assert list(points["torch"].get_xdata()) == [512, 2048]
    assert list(points["torch"].get_ydata()) == pytest.approx(
        [4 * 16 * n * n * 128 / ms / 1e9 for n, ms in ((1024, 1.2), (4096, 1.08))]
    )
    assert max(points["measured limits"].get_ydata()) == 100.0
    assert [bar.get_width() for bar in speedup.patches] == pytest.approx([1.2, 1.2])


def test_problems_that_differ_in_batch_alone_have_panels_of_their_own() -> None:
    decode = [
        replace(record(ms=1.0), problem=f"b{b}.h32/8.s1x{n}.d128.bf16", kind="decode", tflops=None, gbps=float(b * n))
        for b, n in ((1, 1024), (1, 4096), (16, 1024), (16, 4096))
    ]
    assert plots._lines(decode) == {
        (f"b{b}.h32/8: 4 heads on 1, 1 query, d128.bf16, forward", "GB/s"): {
            "triton": [(1024, b * 1024.0), (4096, b * 4096.0)]
        }
        for b in (1, 16)
    }
    grid = [replace(record(length=n), problem=f"b{16384 // n}.h16.s{n}.d128.bf16") for n in (1024, 4096)]
    assert list(plots._lines(grid)) == [("d128.bf16, forward", "TFLOP/s")]


def test_no_point_takes_the_place_of_another() -> None:
    texts = ("b1.h8.s128x1024.d64.bf16", "b1.h8.s1024.d64.bf16", "b1.h8.s1x1024.d64.bf16", "b1.h8.s2048.d64.bf16")
    found = [replace(record(), problem=text, tflops=float(place)) for place, text in enumerate(texts, 1)]
    found.append(replace(found[1], suite="again", tflops=9.0))
    lines = plots._lines(found[1:] + found[:1])
    assert lines == {
        ("d64.bf16, forward", "TFLOP/s"): {"triton": [(1024, 2.0), (2048, 4.0), (1024, 9.0)]},
        ("1 query, d64.bf16, forward", "TFLOP/s"): {"triton": [(1024, 3.0)]},
        ("128 queries, d64.bf16, forward", "TFLOP/s"): {"triton": [(1024, 1.0)]},
    }


@pytest.mark.usefixtures("matplotlib")
def test_rows_of_two_suites_that_are_named_alike_have_a_bar_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Any] = []
    figure = importlib.import_module("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    grid = [record("triton", ms=1.0), record("torch", ms=2.0)]
    plots.draw("speedup", run(*grid, *(replace(one, suite="quick", ms=3.0) for one in grid)), tmp_path / "run.png")
    (axes,) = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 1.0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["grid: S 1024, forward", "quick: S 1024, forward"]


#: Text that a terminal, rich, matplotlib or XML would act on.
NASTY = "[/] [bold]x[/bold] $x^^$ \x1b]0;title\x07\x1b[31m \x00 \u202e <a> \\"


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("kind", plots.KINDS)
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_words_of_a_run_are_drawn_as_they_are(kind: str, ending: str, tmp_path: Path) -> None:
    made = [replace(record(name, length), suite=NASTY, row=NASTY) for length in (64, 128) for name in (NASTY, "torch")]
    document = {**run(*made, gpu=NASTY, torch=NASTY), "date": NASTY}
    plots.draw(kind, document, tmp_path / f"run.{ending}")
    assert (tmp_path / f"run.{ending}").stat().st_size > 1000
    if ending == "svg":
        ElementTree.parse(tmp_path / "run.svg")


@pytest.mark.usefixtures("matplotlib")
def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    for kind, made, message in (
        ("throughput", run(record()), "at more than one length"),
        ("roofline", run(failed("wrong")), "no time"),
        ("speedup", run(record()), "measure with --peer torch"),
        ("roofline", run(record(), limits=replace(LIMITS, gbps=0.0)), "make no roofline"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            plots.draw(kind, made, tmp_path / "run.png")
    with pytest.raises(InvalidProblem, match=r"ends in \.png, \.svg or \.pdf"):
        plots.draw("speedup", RUN, tmp_path / "run.bmp")


def test_matplotlib_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AttnswitchError, match=r"pip install 'attnswitch\[plot\]'"):
        plots.draw("speedup", RUN, tmp_path / "run.png")


# -- commands ----------------------------------------------------------------------------------------------------------


Cli = Callable[..., Any]


@pytest.fixture
def cli(command: Callable[[str], Cli]) -> Cli:
    Path("a.json").write_text(json.dumps(run(record(ms=1.0), record("flex", ms=1.0))))
    Path("b.json").write_text(json.dumps(run(record(ms=1.2), record("flex", ms=1.01), torch="2.15.0")))
    Path("part.json").write_text(json.dumps({"schema": 1, "records": [], "environment": {}}))
    return command("bench")


def test_compare(cli: Cli) -> None:
    ran = cli("compare", "a.json", "b.json")
    assert ran.code == 0
    assert "1.200" in ran.out
    assert "within the spread" in ran.out
    assert "not the same torch: 2.11.0, then 2.15.0" in ran.out
    ran = cli("compare", "a.json", "b.json", "--fail-if", "slower=1.10")
    assert (ran.code, "1 of 2 meet a condition of --fail-if" in ran.out) == (1, True)
    assert cli("compare", "b.json", "a.json", "--fail-if", "slower=1.10", "--fail-if", "missing").code == 0
    read = json.loads(cli("compare", "a.json", "b.json", "--fail-if", "slower=1.10", "--json").out)
    assert [pair["broken"] for pair in read["pairs"]] == [["slower"], []]
    assert [mean["ratio"] for mean in read["means"]] == [1.2, 1.01]


def test_words_of_a_run_are_printed_as_they_are(cli: Cli) -> None:
    made = [replace(record(NASTY, ms=ms), suite=NASTY, row=NASTY) for ms in (1.0, 2.0)]
    for name, one in zip("ab", made, strict=True):
        Path(f"{name}.json").write_text(json.dumps({**run(one, torch=f"{name}{NASTY}"), "device": f"{name}{NASTY}"}))
    ran = cli("compare", "a.json", "b.json")
    assert ran.code == 0
    assert r"[/] [bold]x[/bold] $x^^$ \x1b]0;title\x07\x1b[31m \x00 \u202e <a>" in ran.out
    assert not {*"\x1b\x07\x00\u202e"} & {*ran.out}


def test_compare_what_has_nothing_in_common(cli: Cli) -> None:
    Path("b.json").write_text(json.dumps(run(record("another"))))
    assert cli("compare", "a.json", "b.json").code == 3
    assert cli("compare", "a.json", "b.json", "--fail-if", "missing").code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "a.json", "c.json"), "does not exist"),
        (("compare", "a.json", "b.json", "--fail-if", "late"), "expected slower=F"),
        (("compare", "a.json", "part.json"), "it has no field 'device'"),
        (("plot", "a.json", "a.bmp"), "ends in .png"),
        (("plot", "a.json", "a.png", "--kind", "pie"), "Invalid value for '--kind'"),
    ],
)
def test_a_mistake_is_explained(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    if message == "ends in .png":
        pytest.importorskip("matplotlib")
    ran = cli(*arguments)
    assert (ran.code, message in " ".join(ran.out.split())) == (2, True)


@pytest.mark.usefixtures("matplotlib")
def test_plot(cli: Cli) -> None:
    ran = cli("plot", "a.json", "a.svg", "--kind", "roofline")
    assert (ran.code, Path("a.svg").is_file()) == (0, True)


def test_a_run_writes_csv_and_needs_no_command(cli: Cli) -> None:
    small = ("--problem", "b1.h1.s16.d8.fp32", "--direction", "forward", "--peer", "none", "--backend", "tiled")
    for command in ((), ("run",)):
        ran = cli(*command, "--device", "cpu", "--budget", "1", *small, "--csv", "run.csv")
        assert ran.code == 0
        with Path("run.csv").open(newline="") as file:
            (line,) = csv.DictReader(file)
        assert (line["candidate"], line["status"]) == ("tiled", "measured")
    out = cli("-h").out
    assert all(word in out for word in ("run", "compare", "plot"))
