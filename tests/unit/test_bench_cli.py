"""``attnswitch bench`` as it is typed: what it prints, writes and exits with."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnswitch.bench.suites import suites

Register = Callable[[str, str], None]
HERE = ("bench", "--device", "cpu", "--budget", "1")
SMALL = ("--problem", "b1.h1.s16.d8.fp32", "--direction", "forward", "--peer", "none")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["attnswitch", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        ran = Ran(code, *capsys.readouterr())
        assert "Traceback" not in ran.out + ran.err
        return ran

    return call


def test_a_row_is_a_line_where_no_terminal_is(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    name = "b1.h2.s16x24.d8.fp32.causal-br.window=12,0.lse"
    ran = cli(*HERE, "--problem", name, "--direction", "forward", "--backend", "tiled", "--peer", "none")
    row = next(line for line in ran.out.splitlines() if name in line)
    assert [word in row for word in ("forward", "tiled", "GFLOP/s", "%")] == [True] * 4


def test_the_quick_suite(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    ran = cli(*HERE, "quick", "--json", str(path))
    assert ran.code == 0
    read = json.loads(path.read_text())
    rows = suites()["quick"].rows
    assert len(read["records"]) == sum(len(row.directions) * 4 for row in rows)
    assert {record["candidate"] for record in read["records"]} == {"tiled", "sdpa-flash", "sdpa-math", "torch"}
    for record in read["records"]:
        assert record["status"] in ("measured", "refused"), record
        assert (record["ms"] is None) == (record["status"] == "refused") == (record["why"] is not None)
        if record["ms"]:
            assert 0 < record["ms_low"] <= record["ms"] <= record["ms_high"]
            assert record["deviation"] < 1e-5 or "dropout" in record["row"]
    for row in rows:
        assert row.name in ran.out
    assert read["command"].startswith("attnswitch bench --device cpu")
    assert (read["device"], read["stopped"], "torch" in read["environment"]) == ("cpu", None, True)
    assert int(read["environment"]["threads"]) >= 1
    assert "softcap=30.0" in ran.out  # why torch's kernels do not run that row
    assert {entry["of"] for entry in read["ratios"]} <= {"tiled", "sdpa-math"}
    assert read["means"]


def test_json_to_standard_output_alone(cli: Cli) -> None:
    ran = cli(*HERE, *SMALL, "--backend", "tiled", "--json", "-")
    (record,) = json.loads(ran.out)["records"]
    assert (ran.code, record["candidate"], record["status"]) == (0, "tiled", "measured")
    assert (record["suite"], record["problem"]) == ("problem", "b1.h1.s16.d8.fp32")


@pytest.mark.parametrize("text", ["b1.h1.s16.d8.fp32", "b1.h1.s1x16.d8.fp32"])
@pytest.mark.parametrize("direction", ["backward", "training"])
def test_a_problem_is_measured_in_the_direction_asked_for(text: str, direction: str, cli: Cli) -> None:
    asked = ("--problem", text, "--direction", direction, "--backend", "sdpa-math", "--peer", "none", "--json", "-")
    (record,) = json.loads(cli(*HERE, *asked).out)["records"]
    assert (record["direction"], record["status"]) == (direction, "measured")
    assert record["tflops"] is not None


def test_csv_to_standard_output_alone(cli: Cli) -> None:
    ran = cli(*HERE, *SMALL, "--backend", "tiled", "--csv", "-")
    (line,) = csv.DictReader(ran.out.splitlines())
    assert (ran.code, line["candidate"], line["status"]) == (0, "tiled", "measured")


def test_a_device_is_named_as_it_may_be(cli: Cli) -> None:
    ran = cli("bench", "--device", "CPU", "--budget", "1", *SMALL, "--backend", "tiled", "--json", "-")
    assert (ran.code, json.loads(ran.out)["device"]) == (0, "cpu")


def test_rows_directions_and_candidates_are_chosen(cli: Cli) -> None:
    ran = cli(
        *HERE,
        "quick",
        "--row",
        "bias",
        "--row",
        "causal",
        "--backend",
        "none",
        "--direction",
        "backward",
        "--json",
        "-",
    )
    read = json.loads(ran.out)["records"]
    found = {(record["row"], record["candidate"], record["direction"]) for record in read}
    assert found == {("causal", "torch", "backward"), ("bias", "torch", "backward")}


def test_nothing_measured_is_no_success(cli: Cli) -> None:
    ran = cli(*HERE, *SMALL, "--backend", "sdpa-cudnn")
    assert ran.code == 3
    assert "sdpa-cudnn refused" in ran.out


def test_a_wrong_result_is_the_exit_code(cli: Cli, register: Register) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    ran = cli(*HERE, *SMALL, "--backend", "saboteur", "--backend", "tiled")
    assert ran.code == 1
    assert "saboteur wrong" in ran.out


def test_an_interrupted_run_keeps_what_it_has(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("attnswitch.bench.run")
    run, seen = module.run, list[Any]()

    def twice(step: Any, *rest: Any) -> Any:
        seen.append(step)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return run(step, *rest)

    monkeypatch.setattr(module, "run", twice)
    ran = cli(*HERE, "quick", "--backend", "tiled", "--peer", "none", "--json", "run.json")
    assert (ran.code, "interrupted" in ran.out) == (2, True)
    read = json.loads(Path("run.json").read_text())
    assert (read["stopped"], len(read["records"])) == ("interrupted", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("slow",), "suite 'slow' is not known; expected one of grid, forward, backward, features, decode"),
        (("--backend", "fastest"), "backend 'fastest' is not known"),
        (("--peer", "fastest"), "peer 'fastest' is not known; expected one of torch, flex, fa4, none"),
        (("--problem", "b1"), "missing h, s, d"),
        (("--device", "h200"), "is not in this machine"),
        (("quick", "--row", "no such row"), "--row 'no such row': no row of the suites named has it in its name"),
        (("quick", "--row", "bias", "--row", "nosuch", *SMALL), "--row 'nosuch': no row of the suites named"),
        (("--row", "bias", *SMALL), "--row 'bias': no row of the suites named"),
        (("quick", "--direction", "training"), "no row of the suites named is left"),
        ((*SMALL, "--device", "cpu", "--config", "128x", "--config", "nosuch"), "--config 'nosuch': no config"),
        ((*SMALL, "--device", "cpu", "--backend", "sdpa-math", "--config", "128x"), "--config '128x': no config"),
        (("--json", "/dev/null/x"), "cannot be written"),
        (("--json", "run", "--csv", "./run"), "run is named for two results"),
        (("--device", "cpu", "--budget", "inf"), "a budget of inf ms: expected a finite number"),
        (("--direction", "up"), "Invalid value for '--direction'"),
    ],
)
def test_a_mistake_is_explained(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    ran = cli("bench", *arguments)
    assert ran.code == 2
    assert message in " ".join((ran.out + ran.err).split())
