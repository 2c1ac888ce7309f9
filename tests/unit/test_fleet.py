"""Machines of many kinds: their documents as one table, and one problem that each explains for itself."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import attnswitch
from attnswitch import InvalidProblem, Plan
from attnswitch.machine import fleet, registry
from attnswitch.machine.fleet import Cell
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner
from attnswitch.planning.choice import Basis

NO_GPU = "torch finds no NVIDIA GPU; it needs one, with a driver for CUDA 13.2"
BROKEN = "it could not be loaded from attnswitch (attnswitch.backends.triton): ImportError: libcuda.so.1: bad ELF"


def document(host: str, device: str | None = None, **said: Any) -> dict[str, Any]:
    """What ``attnswitch backends --json`` writes on a machine with a GPU, or on one without."""
    why = None if device else NO_GPU
    plain = {
        "backends": {"sdpa-cudnn": why, "triton": why, "tiled": None},
        "libraries": {"numpy": "2.4.6", "cupy": "14.2.0, 1 GPU" if device else "not installed; pip install cupy"},
        "devices": ["cpu (AMD EPYC)", *([device] if device else [])],
        "distrusted": None,
        "host": host,
        "version": "0.1.0",
        "date": "2026-11-27T12:00:00+00:00",
    }
    return plain | said


FLEET = {
    "a.json": document("node-1", "cuda (NVIDIA H100 80GB HBM3, sm_90)"),
    "b.json": document("node-2", "cuda (NVIDIA H200, sm_90)"),
    "c.json": document("login"),
    "d.json": document(
        "node-3",
        "cuda (NVIDIA H100 80GB HBM3, sm_90)",
        backends={"sdpa-cudnn": None, "triton": BROKEN, "tiled": None, "plug-in": None},
        libraries={"numpy": "2.4.6", "cupy": "installed but broken: OSError: libnvrtc.so.13 is missing"},
        distrusted="/cache can be written by other users",
    ),
}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return write(tmp_path, FLEET)


def write(folder: Path, documents: dict[str, Any]) -> list[Path]:
    for name, plain in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(plain if isinstance(plain, str) else json.dumps(plain), encoding="utf-8")
    return [folder / name for name in documents]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["attnswitch", "backends", *map(str, arguments)])
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit) as end:
        importlib.import_module("attnswitch.cli.app").main()
    return int(end.value.code or 0)


def test_a_mixed_fleet_comes_out_with_reasons(paths: list[Path]) -> None:
    found = fleet.joined(paths)
    assert list(found.machines) == ["node-1", "node-2", "login", "node-3"]
    backends = found.backends()
    assert list(backends) == ["sdpa-cudnn", "triton", "tiled", "plug-in"]
    ready = Cell("ready", "ready")
    assert backends["sdpa-cudnn"] == (ready, ready, Cell("not ready", NO_GPU), ready)
    assert backends["triton"] == (ready, ready, Cell("not ready", NO_GPU), Cell("not ready", BROKEN))
    assert backends["tiled"] == (ready,) * 4
    absent = Cell("not listed", "attnswitch 0.1.0 there does not list it")
    assert backends["plug-in"] == (absent, absent, absent, ready)
    assert [cell.state for cell in found.libraries()["cupy"]] == ["ready", "ready", "not ready", "not ready"]


def test_the_table(paths: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--join", *paths) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if "node-1" in line)
    columns = [head.index(name) for name in ("node-1", "node-2", "login", "node-3")]
    assert columns == sorted(columns)
    (triton,) = (line for line in lines if " triton " in line)
    assert triton[columns[0] :].startswith("ready")
    assert triton[columns[2] :].startswith(NO_GPU)
    assert triton[columns[3] :].startswith(BROKEN)
    assert any(line[columns[1] :].startswith("cuda (NVIDIA H200, sm_90)") for line in lines)
    assert any(line[columns[3] :].startswith("/cache can be written by other users") for line in lines)


def test_the_table_as_json(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--join", "--json", *paths) == 0
    found = json.loads(capsys.readouterr().out)
    assert [machine["name"] for machine in found["machines"]] == ["node-1", "node-2", "login", "node-3"]
    assert found["machines"][3]["distrusted"] == "/cache can be written by other users"
    assert found["machines"][0]["file"] == str(paths[0])
    assert found["machines"][1]["devices"] == ["cpu (AMD EPYC)", "cuda (NVIDIA H200, sm_90)"]
    assert found["backends"]["triton"]["node-3"] == {"state": "not ready", "text": BROKEN}
    assert found["backends"]["tiled"]["login"] == {"state": "ready", "text": "ready"}


def test_what_this_machine_writes_can_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    written = capsys.readouterr().out
    (path,) = write(tmp_path, {"here.json": written})
    found = fleet.joined([path, *write(tmp_path, {"b.json": FLEET["b.json"]})])
    here, *_ = found.machines.values()
    assert next(iter(found.machines)) == here.host == platform.node()
    assert here.version == attnswitch.__version__
    assert here.date.startswith("20")
    assert here.backends == attnswitch.backends()
    assert list(here.devices) == json.loads(written)["devices"]


def test_machines_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    vm, other = FLEET["a.json"] | {"host": "vm"}, FLEET["c.json"] | {"host": "vm"}
    by_file = fleet.joined(write(tmp_path, {"a.json": vm, "c.json": other, "b.json": FLEET["b.json"]}))
    assert list(by_file.machines) == ["vm (a.json)", "vm (c.json)", "node-2"]
    paths = write(tmp_path, {"x/m.json": vm, "y/m.json": other})
    assert list(fleet.joined(paths).machines) == [f"vm ({path})" for path in paths]
    assert list(fleet.joined([*paths[:1], *paths[:1]]).machines) == ["vm"]
    sly = write(tmp_path, {"a.json": vm, "c.json": other, "d.json": vm | {"host": "vm (a.json)"}})
    assert len(fleet.joined(sly).machines) == 3


def test_a_document_without_a_host_has_its_files_name(tmp_path: Path) -> None:
    old = {name: FLEET["a.json"][name] for name in ("backends", "libraries", "devices", "distrusted")}
    found = fleet.joined(write(tmp_path, {"gpu-7.json": old, "d.json": FLEET["d.json"]}))
    assert list(found.machines) == ["gpu-7", "node-3"]
    assert found.backends()["plug-in"][0].text == "the attnswitch there does not list it"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON: cut off, or written over"),
        ('{"backends": {', "it is not JSON: cut off, or written over: .*line 1 column"),
        ("[]", r"it is \[\]: expected an object"),
        ("{}", "it has no field 'backends'"),
        (document("x", backends=["tiled"]), "backends is .*: expected an object"),
        (document("x", backends={"tiled": 1}), "backends.tiled is 1: expected text"),
        (document("x", libraries={"numpy": None}), "libraries.numpy is None: expected text"),
        (document("x", devices="cpu"), "devices is 'cpu': expected a list"),
        (document("x") | {"host": 7}, "host is 7: expected text"),
        ("[" * 99 + "]" * 99, "nested more than 32 deep"),
        (" " * (2**22 + 1), "more than 4,194,304 bytes"),
    ],
)
def test_a_damaged_document_is_refused_by_its_name(
    text: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(tmp_path, {"a.json": FLEET["a.json"], "bad.json": text})
    with pytest.raises(InvalidProblem, match=f"^{paths[1]}: .*{why}"):
        fleet.joined(paths)
    assert run(monkeypatch, "--join", *paths) == 2
    ran = capsys.readouterr()
    assert "bad.json: " in ran.err.replace("\n", "")
    assert ran.out == ""


def test_nothing_in_a_document_acts_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = document("[red]\x1b[31mnode", backends={"[/]\x07": "\x1b]0;title\x07[bold]why"}, devices=["\u202ecpu"])
    assert run(monkeypatch, "--join", *write(tmp_path, {"a.json": odd})) == 0
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert "[red]" in out
    assert "[bold]why" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--join",), "there is no machine to join"),
        (("a.json",), "a.json: backends takes a file only with --join"),
        (("--join", "nowhere.json"), "nowhere.json"),
    ],
)
def test_the_command_refuses_with_a_reason(
    arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert why in capsys.readouterr().err


# -- one program on all of them ----------------------------------------------------------------------------------------

PROBLEM = "b2.h16.s2048.d128.bf16.causal.grad"
DEVICES = ("h100", "h200", "cpu")


@pytest.fixture
def breaks() -> Iterator[Callable[[str], None]]:
    """Breaks the backend of a name, as a library does that cannot be loaded."""
    with ExitStack() as stack:
        stack.callback(planner.forget)

        def breaking(name: str) -> None:
            why = f"it could not be loaded: ImportError: {name} is broken here"
            stack.enter_context(registry.standing_in(name, Missing(why)))
            planner.forget()

        planner.forget()
        yield breaking


def explained(device: str) -> Plan:
    """The plan for ``device``, of which every backend is chosen or has its reasons."""
    plan = attnswitch.explain(PROBLEM, device=device)
    assert {candidate.backend for candidate in plan.candidates} == set(registry.names())
    for candidate in plan.candidates:
        assert (plan.why_not(candidate) == ()) is (candidate is plan.chosen)
    return plan


def why_not(plan: Plan, name: str) -> str:
    (candidate,) = (candidate for candidate in plan.candidates if candidate.backend == name)
    return "\n".join(plan.why_not(candidate))


def test_each_machine_has_a_choice_of_its_own() -> None:
    planner.forget()
    h100, h200, cpu = map(explained, DEVICES)
    for plan, model in ((h100, "H100"), (h200, "H200")):
        assert plan.basis is Basis.FORECAST
        assert plan.backend not in (None, "tiled", "reference")
        assert model in str(plan.device)
        assert model in plan.why
        assert why_not(plan, "tiled")
    assert [h100.chosen and h100.chosen.expected] != [h200.chosen and h200.chosen.expected]
    assert cpu.backend not in (None, "cuda", "triton", "sdpa-cudnn")
    assert cpu.basis is Basis.DECLARED
    assert "cuda" in why_not(cpu, "cuda").lower()


@pytest.mark.parametrize("device", DEVICES)
def test_where_a_library_is_broken_the_others_answer(device: str, breaks: Callable[[str], None]) -> None:
    before = {name: explained(name).backend for name in DEVICES}
    broken = before[device]
    assert broken is not None
    breaks(broken)
    for name in DEVICES:
        plan = explained(name)
        assert f"{broken} is broken here" in why_not(plan, broken)
        assert plan.backend is not None
        assert (plan.backend == before[name]) is (before[name] != broken)
    assert attnswitch.backends()[broken] == f"it could not be loaded: ImportError: {broken} is broken here"
