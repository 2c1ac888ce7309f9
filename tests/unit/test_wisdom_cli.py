"""``attnswitch wisdom`` as it is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnswitch import Device, Problem, explain
from attnswitch.wisdom import exchange, store, view
from attnswitch.wisdom.record import Time, Untimed, Verdict
from attnswitch.wisdom.signature import Signature, sign

PROBLEM = Problem.parse("b2.h4.s64.d32.fp32")


Cli = Callable[..., Any]


def plain(row: str) -> str:
    """``row`` without colours."""
    return re.sub("\x1b.*?m", "", row)


@pytest.fixture
def cli(command: Callable[[str], Cli]) -> Cli:
    return command("wisdom")


def signature() -> Signature:
    signed = sign("tiled", Device.cpu())
    assert isinstance(signed, Signature)
    return signed


def time(ms: float, backend: str = "tiled", problem: Problem = PROBLEM, date: str = "2026-11-01") -> Time:
    return Time(problem, backend, "", ms, ms, ms, 30, 2, signature(), date)


STALE = replace(time(9.0), signature=replace(signature(), source="0123456789ab"))
FAULT = Verdict(PROBLEM, "tiled", False, "tiled-cpu.json", "reference: out", signature(), "2026-11-01")


def test_nothing_measured(cli: Cli) -> None:
    ran = cli("show")
    assert ran.code == 0
    assert "nothing was measured yet" in ran.out


def test_what_holds_and_what_does_not(cli: Cli) -> None:
    view.remember([time(1.5), FAULT, STALE, replace(time(2.0), backend="bygone")])
    with store.here().path.open("ab") as file:
        file.write(b"written by hand\n")
    ran = cli("show")
    assert ran.code == 0
    assert "1.5" in ran.out
    assert "wrong tiled on cpu" in ran.out
    assert "(case tiled-cpu.json)" in ran.out
    assert "1 line not used tiled: the backend's source has changed since (hash 0123456789ab" in ran.out
    assert "backend 'bygone' is not known here" in ran.out
    assert "line 5: it is not JSON" in ran.out
    document = json.loads(cli("show", "--json").out)
    assert [record.get("ms") for record in document["records"]] == [1.5, None]
    assert len(document["unused"]) == 2
    assert len(document["damaged"]) == 1


def test_words_of_wisdom_are_printed_as_they_are(cli: Cli) -> None:
    nasty = "[/] [bold] \x1b[31m \x07 \u202e \\"
    view.remember(
        [
            replace(FAULT, why=nasty, case=nasty),
            Untimed(PROBLEM, "tiled", nasty, signature(), "2026-11-02"),
            replace(time(1.0), backend=nasty),
            replace(time(1.0), signature=replace(signature(), device=nasty)),
            replace(time(1.0), signature=replace(signature(), versions=((nasty, nasty),))),
        ]
    )
    ran = cli("show")
    assert ran.code == 0
    assert ran.out.count(r"[/] [bold] \x1b[31m \x07 \u202e") >= 5
    assert not {*"\x1b\x07\u202e"} & {*ran.out}
    assert cli("show", "--json").code == 0


def test_times_of_a_class_are_ranked_as_the_planner_ranks_them(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """By milliseconds an operation: what is measured of a class may be of problems of unlike size."""
    coloured = Console(force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.setattr("attnswitch.cli.render.console", coloured)
    small, large = Problem.parse("b1.h8.s92.d64.fp32"), Problem.parse("b1.h8.s180.d64.fp32")
    signed = sign("reference", Device.cpu())
    assert isinstance(signed, Signature)
    view.remember([time(0.1, problem=small), replace(time(0.2, "reference", large), signature=signed)])
    assert explain("b1.h8.s130.d64.fp32", policy="wisdom-only").backend == "reference"
    rows = [line for line in cli("show").out.splitlines() if "fp32" in line]
    assert [[name for name in ("tiled", "reference") if f" {name} " in plain(row)] for row in rows] == [
        ["reference"],
        ["tiled"],
    ]
    assert (str(large) in plain(rows[0]), str(small) in plain(rows[1])) == (True, True)
    assert ["\x1b[32m" in row for row in rows] == [True, False]
    wrong = Verdict(Problem.parse("b1.h1.s8.d8.fp32"), "reference", False, "a.json", "out", signed, "2026-11-01")
    view.remember([wrong])
    assert explain("b1.h8.s130.d64.fp32", policy="wisdom-only").backend == "tiled"
    rows = [line for line in cli("show").out.splitlines() if " ms" not in line and "h8" in line]
    assert ["\x1b[32m" in row for row in rows] == [False, True]


def test_a_newer_time_of_a_class_takes_the_place_of_another(cli: Cli) -> None:
    newer = time(9.0, problem=PROBLEM.replace(seq_q=60, seq_k=60), date="2026-11-02")
    view.remember([time(1.0), newer])
    assert [record["ms"] for record in json.loads(cli("show", "--json").out)["records"]] == [9.0]
    assert "1 line forgotten" in cli("forget", "--stale").out
    assert store.here().read().records == [newer]


def test_export_and_import(cli: Cli, no_wisdom: Path) -> None:
    view.remember([time(1.0), time(2.0, date="2026-11-02"), FAULT])
    assert cli("export", "out.jsonl").code == 0
    assert cli("forget", "--all").code == 0
    assert store.here().read().records == []
    ran = cli("import", "out.jsonl")
    assert (ran.code, "2 lines taken" in ran.out) == (0, True)
    assert set(store.here().read().records) == {time(2.0, date="2026-11-02"), FAULT}


def test_an_export_has_what_holds_here_and_is_taken_where_it_was_made(cli: Cli) -> None:
    view.remember([time(1.0), STALE, FAULT, replace(time(2.0), backend="bygone")])
    ran = cli("export", "out.jsonl")
    assert (ran.code, "2 lines written to out.jsonl" in ran.out) == (0, True)
    assert "1 line left out tiled: the backend's source has changed since (hash 0123456789ab" in ran.out
    assert "1 line left out bygone: backend 'bygone' is not known here" in ran.out
    ran = cli("import", "out.jsonl")
    assert (ran.code, "2 lines taken" in ran.out) == (0, True)


def test_an_export_of_nothing_is_told(cli: Cli) -> None:
    ran = cli("export", "out.jsonl")
    assert (ran.code, "0 lines written" in ran.out, "nothing was measured yet" in ran.out) == (0, True, True)


@pytest.mark.parametrize("arguments", [("export", "."), ("import", "."), ("merge", ".", "in"), ("merge", "out", ".")])
def test_a_folder_is_no_file(arguments: tuple[str, ...], cli: Cli) -> None:
    Path("in").touch()
    ran = cli(*arguments)
    assert (ran.code, "'.' is a directory" in ran.out) == (2, True)


def test_an_export_to_standard_output(cli: Cli, tmp_path: Path) -> None:
    view.remember([time(1.0), STALE])
    cli("export", "out.jsonl")
    whole = (tmp_path / "out.jsonl").read_text()
    assert cli("merge", "-", "out.jsonl").out == whole
    out = cli("export", "-").out  # standard error comes after standard output
    assert out.startswith(whole)
    assert out.removeprefix(whole).startswith("1 line left out tiled: the backend's source has changed")
    assert not (tmp_path / "-").exists()


def test_an_import_from_elsewhere(cli: Cli) -> None:
    exchange.write([time(1.0), STALE], Path("in.jsonl"))
    ran = cli("import", "in.jsonl")
    assert ran.code == 2
    assert "line 3 (tiled): the backend's source has changed since" in ran.out
    assert store.here().read().records == []


def test_a_merge_keeps_the_newest_of_any_machine(cli: Cli) -> None:
    exchange.write([time(1.0), STALE], Path("a.jsonl"))
    exchange.write([time(2.0, date="2026-11-02")], Path("b.jsonl"))
    assert cli("merge", "both.jsonl", "a.jsonl", "b.jsonl").code == 0
    assert set(exchange.read(Path("both.jsonl"))) == {STALE, time(2.0, date="2026-11-02")}
    Path("a.jsonl").write_text("nothing")
    assert cli("merge", "both.jsonl", "a.jsonl").code == 2


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (("--stale",), {1.0, 3.0, 4.0}),
        (("--backend", "reference"), {1.0, 4.0, 9.0}),
        (("--problem", "b2.h4.s60.d32.fp32"), {4.0}),
        (("--all",), set()),
    ],
)
def test_forget(arguments: tuple[str, ...], left: set[float], cli: Cli) -> None:
    other = Problem.parse("b2.h4.s512.d32.fp32")
    signed = sign("reference", Device.cpu())
    assert isinstance(signed, Signature)
    reference = replace(time(3.0), backend="reference", signature=signed)
    view.remember([time(1.0), STALE, reference, time(4.0, problem=other)])
    ran = cli("forget", *arguments)
    assert (ran.code, f"{4 - len(left)} line" in ran.out) == (0, True)
    assert {record.ms for record in store.here().read().records if isinstance(record, Time)} == left


def test_a_mismatch_of_other_versions_stands_in_every_command(cli: Cli) -> None:
    """What a backend is left out for is shown as that, carried elsewhere, and not dropped as stale."""
    old = replace(FAULT, signature=STALE.signature)
    view.remember([old])
    assert view.current().fault("tiled", PROBLEM, Device.cpu()) == old
    ran = cli("show")
    assert ("wrong tiled on cpu" in ran.out, "not used" in ran.out) == (True, False)
    assert cli("export", "out.jsonl").code == 0
    assert "0 lines forgotten" in cli("forget", "--stale").out
    assert view.current().fault("tiled", PROBLEM, Device.cpu()) == old
    assert cli("forget", "--all").code == 0
    assert "1 line taken" in cli("import", "out.jsonl").out
    assert view.current().fault("tiled", PROBLEM, Device.cpu()) == old


def test_a_mismatch_that_another_version_got_right_is_stale(cli: Cli) -> None:
    mended = replace(FAULT, right=True)
    view.remember([replace(FAULT, signature=STALE.signature), mended])
    assert "1 line not used tiled: the backend's source has changed since" in cli("show").out
    assert "1 line forgotten" in cli("forget", "--stale").out
    assert store.here().read().records == [mended]


def test_lines_of_another_schema_are_kept_but_where_everything_is_forgotten(cli: Cli) -> None:
    view.remember([time(1.0)])
    path = store.here().path
    line = json.dumps({**json.loads(path.read_text()), "schema": 3}) + "\n"
    path.write_text(path.read_text() + line)
    assert "not used " in (out := cli("show").out)
    assert ("line 2: it is of schema 3" in out, "damaged" in out) == (True, False)
    assert "1 line forgotten" in cli("forget", "--backend", "tiled").out
    assert path.read_text() == line
    assert "1 line forgotten" in cli("forget", "--all").out
    assert path.read_text() == ""


def test_what_stands_in_the_administrators_file_is_told(cli: Cli, no_wisdom: Path) -> None:
    lower = store.Store(no_wisdom / "system" / "attnswitch" / "wisdom.jsonl")
    lower.append([FAULT, STALE, time(1.0)])
    assert store.here().lower().records == [FAULT, STALE, time(1.0)]
    view.reload()
    view.remember([time(2.0, date="2026-11-02")])
    ran = cli("forget", "--backend", "tiled")
    assert ran.code == 2
    assert "1 line forgotten" in ran.out
    assert f"2 lines hold here that stand in {lower.path}, which is for all users and left as it is" in ran.out
    assert view.current().fault("tiled", PROBLEM, Device.cpu()) == FAULT
    ran = cli("forget", "--problem", str(PROBLEM))
    assert (ran.code, "1 line holds here that stands in" in ran.out) == (2, True)
    assert cli("forget", "--stale").code == 0  # what does not hold does no harm there
    assert cli("forget", "--backend", "reference").code == 0


def test_forget_asks_what(cli: Cli) -> None:
    ran = cli("forget")
    assert ran.code == 2
    assert "say what to forget" in ran.out


def test_forget_all_takes_no_other(cli: Cli) -> None:
    view.remember([time(1.0)])
    ran = cli("forget", "--all", "--backend", "nobody")
    assert (ran.code, len(store.here().read().records)) == (2, 1)
    assert "--all forgets every line" in ran.out


@pytest.mark.parametrize(("way", "files"), [("export", []), ("merge", ["out.jsonl"])])
def test_the_store_is_not_written_over(way: str, files: list[str], cli: Cli) -> None:
    """An export leaves out what does not hold here, which would be lost."""
    view.remember([time(1.0), STALE])
    path = str(store.here().path)
    assert cli("export", "out.jsonl").code == 0
    ran = cli(way, path, *files)
    assert (ran.code, len(store.here().read().records)) == (2, 2)
    assert "is the store itself" in ran.out
