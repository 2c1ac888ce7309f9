"""The command line: what it prints, where it writes, how it exits, and that a user's mistake is never a traceback."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from attnswitch import api, registry
from attnswitch.verify import Case, Failure, Outcome, corpus

Register = Callable[[str, str], None]
#: Beside the interpreter, as installers put it.
SCRIPT = Path(sys.executable).with_name("attnswitch")
KNOWN = Path(__file__).parents[2] / "fixtures" / "corpus" / "sdpa-flash-cpu-causal-scale.json"
FAULTY = ("verify", "--backend", "saboteur", "--device", "cpu", "--examples", "60", "--max-failures", "1")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """``cli("verify", "--seed", "1")`` runs the command in this process, in an empty folder."""
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("ATTNSWITCH_CORPUS", str(tmp_path / "corpus"))

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


def saved(folder: Path, backend: str, **case: Any) -> Path:
    """A file as a failing run would leave it."""
    outcome = Outcome(Case(**case), backend, "cpu", "mismatch", backend, failure=Failure("out", "it was wrong once"))
    return corpus.save(outcome, folder)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_prints_what_it_verified(cli: Cli) -> None:
    ran = cli("verify", "--examples", "20", "--backend", "tiled", "--backend", "auto", "--device", "cpu", "--seed", "4")
    assert ran.code == 0
    assert "every result is within its error bound" in ran.out
    assert "20 cases; " in ran.out
    assert "seed 4" in ran.out
    assert {line.split()[1] for line in ran.out.splitlines() if line.startswith("cpu")} == {"auto", "tiled"}


def test_verify_without_a_backend_takes_all_that_can_run(cli: Cli) -> None:
    ran = cli("verify", "--examples", "3", "--json", "-")
    able = {name for name, why in api.backends().items() if why is None}
    assert {row["backend"] for row in json.loads(ran.out)["results"]} == {"auto", *able}


def test_verify_writes_json_to_standard_output_alone(cli: Cli) -> None:
    ran = cli("verify", "--examples", "10", "--backend", "reference", "--device", "cpu", "--json", "-")
    document = json.loads(ran.out)
    assert (ran.code, document["exit_code"], document["cases"], document["failures"]) == (0, 0, 10, [])


def test_verify_writes_files(cli: Cli, tmp_path: Path) -> None:
    to_json, to_junit = tmp_path / "new" / "run.json", tmp_path / "newer" / "run.xml"
    ran = cli(
        *("verify", "--examples", "10", "--backend", "reference", "--device", "cpu"),
        *("--json", str(to_json), "--junit", str(to_junit)),
    )
    assert ran.code == 0
    assert "every result is within its error bound" in ran.out
    document = json.loads(to_json.read_text())
    (suite,) = ElementTree.parse(to_junit).getroot()
    assert suite.get("tests") == str(len(document["results"]))
    assert (suite.get("failures"), document["verified"] > 0) == ("0", True)


def test_verify_of_what_only_refuses_is_not_a_success(cli: Cli) -> None:
    ran = cli("verify", "--examples", "5", "--backend", "sdpa-cudnn", "--device", "cpu")
    assert ran.code == 3
    assert "nothing was verified" in ran.out
    assert "within its error bound" not in ran.out


def test_verify_catches_and_says_how_to_replay(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    ran = cli(*FAULTY)
    assert ran.code == 1
    (path,) = (tmp_path / "corpus").iterdir()
    assert "mismatch saboteur on cpu: out" in ran.out
    assert "1 distinct mismatches" in ran.out
    assert f"attnswitch replay {path}" in ran.out.replace("\n", "")

    again = cli("replay", str(path))
    assert (again.code, again.out.split()[0]) == (1, "FAILED")
    junit = tmp_path / "run.xml"
    replayed = cli(*FAULTY, "--junit", str(junit))
    assert (replayed.code, "1 saved cases replayed" in replayed.out) == (1, True)
    assert ElementTree.parse(junit).getroot()[0].get("failures") != "0"


def test_verify_without_a_corpus_leaves_none(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:Raises")
    saved(tmp_path / "corpus", "saboteur", seq_k=63)
    assert cli("verify", "--backend", "saboteur", "--device", "cpu", "--examples", "1", "--no-corpus").code == 0
    elsewhere = cli(*FAULTY, "--corpus", str(tmp_path / "other"))
    assert elsewhere.code == 1
    assert len(list((tmp_path / "other").iterdir())) == len(list((tmp_path / "corpus").iterdir())) == 1


def test_verify_stops_in_time(cli: Cli) -> None:
    ran = cli("verify", "--backend", "reference", "--device", "cpu", "--time", "0.2s", "--examples", "1000000")
    assert (ran.code, "stopped: time limit of 0.2 s" in ran.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--backend", "fastest"), "backend 'fastest' is not known; expected one of auto, sdpa-cudnn,"),
        *(
            (("verify", "--time", text), f"--time '{text}': expected a duration")
            for text in ("bad", "", "-1", "0", "inf")
        ),
        (("verify", "--device", "toaster", "--examples", "1"), "device 'toaster' is not known; expected cpu, cuda"),
        (("verify", "--device", "cuda:63", "--examples", "1"), "device cuda:63 cannot be read on this machine"),
        (("verify", "--examples", "0"), "Invalid value for '--examples'"),
        (("verify", "--seed", "-1"), "Invalid value for '--seed'"),
        (("verify", "--exmaples", "3"), "No such option: --exmaples"),
        (("replay",), "Missing argument"),
        (("replay", "absent.json"), "'absent.json' does not exist"),
        (("replay", str(KNOWN), "--backend", "nobody"), "backend 'nobody' is not known; expected one of"),
        (("replay", str(KNOWN), "--device", "nowhere"), "device 'nowhere' is not known; expected cpu, cuda"),
        (("explain", "b1.h1.s8"), "missing d, a dtype such as bf16"),
        (("explain", "b1.h1.s8.d8.bf17"), "part 'bf17' is not understood"),
        (("explain", "b1.h3/2.s8.d8.bf16"), "the query heads must be a multiple of the key heads"),
        (("explain", "b1.h1.s8.d8.bf16", "--device", "toaster"), "device 'toaster' is not known; expected cpu, cuda"),
        (("explain", "b1.h1.s8.d8.bf16", "--backend", "fastest"), "backend 'fastest' is not known"),
        (("unknown",), "No such command 'unknown'"),
    ],
)
def test_a_mistake_is_explained_and_exits_with_two(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("option", ["--json", "--junit", "--corpus"])
def test_a_file_that_cannot_be_written_is_not_a_mismatch(
    option: str, cli: Cli, register: Register, tmp_path: Path
) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    (tmp_path / "taken").touch()
    target = {"--json": str(tmp_path), "--junit": "taken/run.xml", "--corpus": "taken"}[option]
    ran = cli(*FAULTY, option, target)
    assert ran.code == 2
    assert Path(target).name.split(".")[0] in ran.err


# -- replay ------------------------------------------------------------------------------------------------------------


def test_replay_tells_the_four_endings_apart(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:Raises")
    files = {
        "FIXED": saved(tmp_path, "reference", seq_k=63),
        "FAILED": saved(tmp_path, "saboteur", seq_k=63),
        "REFUSED": saved(tmp_path, "sdpa-math", softcap=3.0),
        "ABSENT": saved(tmp_path, "sdpa-cudnn"),
    }
    codes = {"FIXED": 0, "FAILED": 1, "REFUSED": 3, "ABSENT": 3}
    for word, path in files.items():
        ran = cli("replay", str(path))
        assert (ran.code, ran.out.split()[0]) == (codes[word], word)
    assert "RuntimeError: unspecified launch failure" in cli("replay", str(files["FAILED"])).out
    assert "softcap=3.0: torch's attention has none" in cli("replay", str(files["REFUSED"])).out
    assert cli("replay", *(str(path) for path in files.values())).code == 1
    assert cli("replay", str(files["FIXED"]), str(files["REFUSED"])).code == 0
    assert cli("replay", str(files["REFUSED"]), str(files["ABSENT"])).code == 3
    assert cli("replay", str(files["FAILED"]), "--backend", "tiled").code == 0
    documents = json.loads(cli("replay", "--json", *(str(path) for path in files.values())).out)
    assert [document["result"] for document in documents] == list(files)
    assert [bool(document["reasons"]) for document in documents] == [False, False, True, True]


DAMAGED = {
    "empty": "",
    "words": "not json",
    "list": "[]",
    "number": "3",
    "no-case": '{"schema": 1}',
    "schema-99": '{"schema": 99, "case": {}}',
    "case-list": '{"schema": 1, "case": [], "backend": "tiled", "device": "cpu"}',
    "no-such-backend": '{"schema": 1, "case": {}, "backend": "nobody", "device": "cpu"}',
    "backend-number": '{"schema": 1, "case": {}, "backend": 3, "device": "cpu"}',
    "no-such-device": '{"schema": 1, "case": {}, "backend": "tiled", "device": "nowhere"}',
} | {
    name: json.dumps({"schema": 1, "case": case, "backend": "tiled", "device": "cpu"})
    for name, case in {
        "unknown-field": {"colour": 1},
        "negative-batch": {"batch": -1},
        "no-such-placing": {"placing": {"query": "upstairs"}},
        "no-such-data": {"data": "random"},
        "no-such-library": {"library": "abacus"},
        "seed-text": {"data_seed": "x"},
        "lengths-of-another-batch": {"lengths": [1, 2, 3]},
        "no-such-mask": {"mask": {"kind": "venetian"}},
    }.items()
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_explained(name: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(DAMAGED[name])
    ran = cli("replay", str(path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error ")


def test_a_damaged_file_in_the_corpus_stops_a_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text("[]")
    ran = cli("verify", "--corpus", str(tmp_path), "--backend", "tiled", "--device", "cpu", "--examples", "1")
    assert (ran.code, "damaged.json is not a saved case" in ran.err) == (2, True)


def test_a_file_that_is_not_text_is_explained(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    ran = cli("replay", str(tmp_path / "binary.json"))
    assert (ran.code, "binary.json is not a saved case" in ran.err) == (2, True)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_case_of_an_absent_gpu_is_not_judged(library: str, cli: Cli, tmp_path: Path) -> None:
    path = saved(tmp_path, "sdpa-math", library=library)
    record = json.loads(path.read_text()) | {"device": "cuda:63"}
    path.write_text(json.dumps(record))
    ran = cli("replay", str(path))
    assert ran.code in (2, 3)
    assert "cuda:63" in ran.out + ran.err
    assert "FAILED" not in ran.out


# -- backends and explain ----------------------------------------------------------------------------------------------


def test_backends_names_the_remedies(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    ran = cli("backends")
    assert ran.code == 0
    assert "pip install 'attnswitch[cuda13]'" in ran.out
    for name in registry.names():
        assert name in ran.out
    document = json.loads(cli("backends", "--json").out)
    assert list(document["backends"]) == list(registry.names())
    assert document["libraries"]["cupy"] == "not installed; pip install 'attnswitch[cuda13]'"
    assert document["devices"][0].startswith("cpu")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent_plugin:Backend", "ModuleNotFoundError: No module named 'absent_plugin'"),
        ("saboteurs:Nothing", "AttributeError: module 'saboteurs' has no attribute 'Nothing'"),
        ("json:JSONDecoder", "json:JSONDecoder from the tests is not a backend"),
    ],
)
def test_a_broken_plug_in_is_a_line_and_no_more(target: str, message: str, cli: Cli, register: Register) -> None:
    register("broken", target)
    ran = cli("backends")
    assert (ran.code, message in ran.out) == (0, True)
    assert "tiled" in ran.out
    explained = json.loads(cli("explain", "b1.h1.s8.d8.fp32", "--json").out)
    assert message in explained["candidates"][0]["unavailable"]
    assert explained["backend"] is not None
    assert cli("verify", "--backend", "broken", "--examples", "2", "--device", "cpu").code == 3


def test_explain_gives_every_backend_its_line(cli: Cli) -> None:
    ran = cli("explain", "b1.h4/2.s64x128.d64.bf16.causal-br", "--device", "h200")
    assert ran.code == 0
    assert "problem  b1.h4/2.s64x128.d64.bf16.causal-br" in ran.out
    assert "H200, sm_90" in ran.out
    document = json.loads(cli("explain", "b1.h4/2.s64x128.d64.bf16.causal-br", "--device", "h200", "--json").out)
    assert [candidate["backend"] for candidate in document["candidates"]] == list(registry.names())
    for candidate in document["candidates"]:
        assert candidate["backend"] in ran.out
        assert bool(candidate["why_not"]) == (candidate["backend"] != document["backend"])
        assert all(reason in ran.out for reason in candidate["why_not"])


def test_explain_exits_with_two_where_nothing_fits(cli: Cli) -> None:
    ran = cli("explain", "b1.h1.s8.d8.fp32.dropout=0.5.seeded.softcap=2.0", "--device", "t4")
    assert (ran.code, "choice   none (no backend takes it)" in ran.out) == (2, True)
    forced = cli("explain", "b1.h1.s8.d8.fp32.softcap=2.0", "--backend", "sdpa-math", "--json")
    assert (forced.code, json.loads(forced.out)["backend"]) == (2, None)


# -- the installed script ----------------------------------------------------------------------------------------------


def test_the_script_is_installed(tmp_path: Path) -> None:
    version = subprocess.run([SCRIPT, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert version.stdout.strip() == f"attnswitch {metadata.version('attnswitch')}"
    wrong = subprocess.run([SCRIPT, "explain", "b1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout, "Traceback" in wrong.stderr) == (2, "", False)
    assert "error problem 'b1': missing" in wrong.stderr


def test_a_reader_that_leaves_is_not_a_mismatch(tmp_path: Path) -> None:
    """As with ``attnswitch explain ... | head``: exit code 1 would say that a kernel is wrong."""
    command = [str(SCRIPT), "explain", "b1.h1.s8.d8.fp32"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 2


def test_help_and_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"attnswitch {metadata.version('attnswitch')}\n", "")
    for command in ("verify", "replay", "backends", "explain"):
        assert command in cli("--help").out
        assert cli(command, "--help").code == 0
