"""The command line: what it prints, where it writes, how it exits, and that a user's mistake is never a traceback."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from attnswitch import api
from attnswitch.call import finite, recording
from attnswitch.machine import registry
from attnswitch.planning import policy
from attnswitch.verify import Case, Failure, Outcome
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.session import corpus
from attnswitch.verify.session.plan import EXAMPLES, Plan
from attnswitch.verify.session.tally import Report

Register = Callable[[str, str], None]
#: Beside the interpreter, as installers put it.
SCRIPT = Path(sys.executable).with_name("attnswitch")
KNOWN = Path(__file__).parents[2] / "fixtures" / "corpus" / "sdpa-flash-cpu-causal-scale.json"
#: A short run in this process, which sees the backends that a test registers.
HERE = ("verify", "--quick", "--no-isolate", "--device", "cpu")
FAULTY = (*HERE, "--backend", "saboteur", "--examples", "60", "--max-failures", "1")
#: A backend of which nothing is left after its first call, as the author of one has it in the folder that he is in.
KILLS = """
import os, signal
from attnswitch.backends.tiled import TiledBackend

class Kills(TiledBackend):
    name = "kills"

    def compile(self, *arguments):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


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
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

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
    outcome = Outcome(
        Case(**case), backend, "cpu", "mismatch", backend, failure=Failure("reference", "it was wrong once", "out")
    )
    return corpus.save(outcome, folder)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_prints_what_it_verified(cli: Cli) -> None:
    ran = cli(*HERE, "--examples", "20", "--backend", "tiled", "--backend", "auto", "--seed", "4")
    assert ran.code == 0
    assert "every result is within its error bound" in ran.out
    assert "20 cases; " in ran.out
    assert "seed 4" in ran.out
    assert {line.split()[1] for line in ran.out.splitlines() if line.startswith("cpu")} == {"auto", "tiled"}
    assert re.search(r"^check +auto +tiled$", ran.out, re.MULTILINE)
    assert re.search(r"^reference +\d+ +\d+$", ran.out, re.MULTILINE)


@pytest.mark.parametrize("columns", ["0", "40"])
def test_a_narrow_terminal_cuts_no_column_and_no_number(
    columns: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "a_kernel_with_a_name_that_is_longer_than_the_terminal_is_wide"
    (tmp_path / f"{name}.py").write_text("from attnswitch.backends.tiled import TiledBackend as Own\n")
    command = (*HERE, "--examples", "20", "--backend", f"{name}:Own", "--seed", "4")
    ran = subprocess.run([SCRIPT, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    (heads,) = (line for line in lines if line.startswith("device"))
    assert heads.split() == ["device", "backend", "dtype", "verified", "grads", "error/bound", "refused", "wrong"]
    assert any(f"{name}:Own" in line and line.split()[-1] == "0" for line in lines)


def test_verify_without_a_backend_takes_all_that_can_run(cli: Cli) -> None:
    ran = cli("verify", "--quick", "--no-isolate", "--examples", "3", "--json", "-")
    able = {name for name, why in api.backends().items() if why is None} - {"torch-flex"}  # which has to be asked for
    assert {row["backend"] for row in json.loads(ran.out)["results"]} == {"auto", *able}


def test_verify_writes_json_to_standard_output_alone(cli: Cli) -> None:
    ran = cli(*HERE, "--examples", "10", "--backend", "reference", "--json", "-")
    document = json.loads(ran.out)
    assert (ran.code, document["exit_code"], document["cases"], document["failures"]) == (0, 0, 10, [])


def test_verify_writes_files(cli: Cli, tmp_path: Path) -> None:
    names = {"--json": "a/run.json", "--junit": "b/run.xml", "--html": "c/run.html", "--ndjson": "d/run.ndjson"}
    files = {option: tmp_path / name for option, name in names.items()}
    given = [text for option, path in files.items() for text in (option, str(path))]
    ran = cli(*HERE, "--examples", "10", "--backend", "reference", *given)
    assert ran.code == 0
    assert "every result is within its error bound" in ran.out
    document = json.loads(files["--json"].read_text())
    assert (document["schema"], document["verified"] > 0) == (3, True)
    (suite,) = ElementTree.parse(files["--junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures")) == (str(len(CHECKS)), "0")
    assert "every result is within its error bound" in files["--html"].read_text()
    events = [json.loads(line) for line in files["--ndjson"].read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "end")
    assert [event["event"] for event in events].count("outcome") == 10
    assert events[0]["plan"]["isolate"] is False


def test_parts_of_a_run_are_joined(cli: Cli, tmp_path: Path) -> None:
    logs = [str(tmp_path / f"{n}.ndjson") for n in (1, 2)]
    for n, log in enumerate(logs, 1):
        ran = cli(*HERE, "--examples", "12", "--backend", "reference", "--shard", f"{n}/2", "--ndjson", log)
        assert ran.code == 0
        assert f"seed 0, shard {n}/2" in ran.out
    whole = cli("verify", "--join", *logs, "--json", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html"))
    assert whole.code == 0
    assert "12 cases; " in whole.out
    document = json.loads((tmp_path / "run.json").read_text())
    assert (document["cases"], document["shard"], document["missing"]) == (12, None, [])
    half = cli("verify", "--join", logs[1])
    assert half.code == 2
    assert "missing shard 1/2: there is no log" in half.out
    assert "not whole; what ran is within its error bound" in half.out


def test_the_summary_is_appended_where_github_asks(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, other = tmp_path / "step.md", tmp_path / "other.md"
    path.write_text("# before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert cli(*HERE, "--examples", "2", "--backend", "reference").code == 0
    assert path.read_text().startswith("# before\n## attnswitch verify\n")
    assert cli(*HERE, "--examples", "2", "--backend", "reference", "--summary", str(other)).code == 0
    assert (path.read_text().count("## attnswitch"), other.read_text().count("## attnswitch")) == (1, 1)


def test_tests_are_written_for_failures(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    assert cli(*FAULTY, "--emit-pytest", "tests").code == 1
    (path,) = (tmp_path / "tests").iterdir()
    assert path.name == "test_saboteur_cpu_reference_out.py"
    compile(path.read_text(), str(path), "exec")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"examples": EXAMPLES, "seconds": None, "isolate": True, "lattice": True, "targeted": True}),
        (("--time", "1h"), {"examples": None, "seconds": 3600.0}),
        (("--time", "2m", "--examples", "50"), {"examples": 50, "seconds": 120.0}),
        (("--quick",), {"isolate": True, "lattice": False, "targeted": False}),
        (("--no-isolate",), {"isolate": False, "lattice": True}),
        (("--workers", "3", "--timeout", "7.5"), {"workers": 3, "timeout": 7.5}),
        (("--no-corpus",), {"corpus": None}),
        (("--corpus", "here", "--seed", "5", "--max-failures", "2"), {"corpus": Path("here"), "seed": 5}),
    ],
)
def test_options_make_the_plan(
    arguments: tuple[str, ...], expected: dict[str, Any], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def planned(plan: Plan, _: Any) -> Report:
        plans.append(plan)
        return Report(plan.seed)

    monkeypatch.setattr("attnswitch.cli.verify.run", planned)
    assert cli("verify", "--backend", "tiled", "--backend", "tiled", "--device", "cpu", *arguments).code == 3
    (plan,) = plans
    assert {name: getattr(plan, name) for name in expected} == expected
    assert [target.backends for target in plan.targets] == [("tiled",)]


def test_verify_of_what_only_refuses_is_not_a_success(cli: Cli) -> None:
    ran = cli(*HERE, "--examples", "5", "--backend", "sdpa-cudnn")
    assert ran.code == 3
    assert "nothing was verified" in ran.out
    assert "within its error bound" not in ran.out


def test_verify_catches_and_says_how_to_replay(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    ran = cli(*FAULTY)
    assert ran.code == 1
    (path,) = (tmp_path / "corpus").iterdir()
    assert "mismatch saboteur on cpu: reference: out" in ran.out
    assert re.search(r"found after \d+ cases?, \d+\.\d s", ran.out)
    assert re.search(r"^reference +✗ \d+$", ran.out, re.MULTILINE)
    assert "1 distinct mismatch" in ran.out
    assert f"attnswitch replay {path}" in ran.out.replace("\n", "")

    again = cli("replay", "--no-isolate", str(path))
    assert (again.code, again.out.split()[0]) == (1, "FAILED")
    junit = tmp_path / "run.xml"
    replayed = cli(*FAULTY, "--junit", str(junit))
    assert (replayed.code, "1 saved cases replayed" in replayed.out) == (1, True)
    assert ElementTree.parse(junit).getroot()[0].get("failures") != "0"


def test_verify_without_a_corpus_leaves_none(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:Raises")
    saved(tmp_path / "corpus", "saboteur", seq_k=63)
    assert cli(*HERE, "--backend", "saboteur", "--examples", "1", "--no-corpus").code == 0
    elsewhere = cli(*FAULTY, "--corpus", str(tmp_path / "other"))
    assert elsewhere.code == 1
    assert len(list((tmp_path / "other").iterdir())) == len(list((tmp_path / "corpus").iterdir())) == 1


def test_verify_stops_in_time(cli: Cli) -> None:
    ran = cli(*HERE, "--backend", "reference", "--time", "0.5s")
    assert (ran.code, "stopped: time limit of 0.5 s" in ran.out) == (0, True)


@pytest.mark.slow
def test_a_target_is_found_in_the_current_folder_and_may_crash(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own_kernels.py").write_text(KILLS)
    path = saved(tmp_path / "corpus", "own_kernels:Kills", seq_k=3)
    target = ("--backend", "own_kernels:Kills", "--device", "cpu")
    ran = cli("verify", "--quick", *target, "--examples", "1", "--workers", "1", "--max-failures", "1")
    assert ran.code == 1
    assert "mismatch own_kernels:Kills on cpu: crash" in ran.out
    assert "the process died of SIGSEGV" in ran.out
    assert "a saved case" in ran.out
    refused = cli("replay", str(path))
    assert (refused.code, "name it yourself, --backend own_kernels:Kills" in refused.out) == (2, True)
    replayed = cli("replay", str(path), *target[:2], "--emit-pytest", "new/test_crash.py")
    assert (replayed.code, replayed.out.split()[0], "SIGSEGV" in replayed.out) == (1, "FAILED", True)
    assert "run it alone" in (tmp_path / "new" / "test_crash.py").read_text()
    assert cli("replay", str(path), "--backend", "tiled").out.split()[0] == "FIXED"


def test_an_interrupted_run_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnswitch.verify.judge.Subject", interrupted)
    ran = cli(*HERE, "--backend", "reference", "--json", "run.json", "--ndjson", "run.ndjson")
    assert (ran.code, "interrupted" in ran.out) == (2, True)
    assert json.loads(Path("run.json").read_text())["stopped"] == "interrupted"
    assert json.loads(Path("run.ndjson").read_text().splitlines()[-1])["event"] == "end"


def test_an_interrupt_outside_a_run_is_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnswitch.cli.verify.run", interrupted)
    ran = cli(*HERE, "--backend", "reference", "--ndjson", "run.ndjson")
    assert (ran.code, ran.err.strip()) == (2, "error interrupted")
    assert json.loads(Path("run.ndjson").read_text().splitlines()[-1])["error"].startswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--backend", "fastest"), "backend 'fastest' is not known; expected one of auto, sdpa-cudnn,"),
        (("verify", "--backend", "absent_module:Backend"), "ModuleNotFoundError: No module named 'absent_module'"),
        (
            ("verify", "--backend", "json:JSONDecoder"),
            "is not a Backend: see attnswitch.machine.backend",
        ),
        (("verify", "--workers", "0"), "Invalid value for '--workers'"),
        (("verify", "--join"), "there is no run to join: name logs that attnswitch verify --ndjson wrote"),
        (("verify", "--join", "a.ndjson"), "a.ndjson: it cannot be read: No such file or directory"),
        (("backends", "--join", "a.json"), "a.json: it cannot be read: No such file or directory"),
        (("verify", "--join", "a.ndjson", "--max-failures", "3"), "--max-failures: --join runs nothing"),
        (("verify", "a.ndjson"), "a.ndjson: verify takes a log only with --join"),
        (("verify", "--shard", "3/2"), "shard '3/2': expected a part and how many there are, such as 2/8"),
        (("verify", "--shard", "1/2", "--secret"), "--shard and --secret: parts of a run have one seed"),
        (("verify", "--mutants", "--shard", "1/2"), "--mutants tries the verifier itself"),
        (("verify", "--matrix"), "--matrix is of the verifier's own test: add --mutants"),
        (("verify", "--mutants", "--time", "9s"), "of the other options it takes --matrix, --seed, --examples"),
        (("verify", "--timeout", "0"), "Invalid value for '--timeout'"),
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
        (("replay", "."), ". holds no saved cases: expected files that end in .json"),
        (("replay", str(KNOWN), str(KNOWN), "--emit-pytest", "x.py"), "--emit-pytest takes one case, and 2 were named"),
        (("replay", str(KNOWN), "--device", "nowhere"), "device 'nowhere' is not known; expected cpu, cuda"),
        (("explain", "b1.h1.s8"), "missing d, a dtype such as bf16"),
        (("explain", "b1.h1.s8.d8.bf17"), "part 'bf17' is not understood"),
        (("explain", "b1.h1.s8.d8.bf16", "--device", ":boom:"), "device ':boom:' is not known"),
        (("verify", "--court"), "--court tries the backends that are named: add --backend"),
        (("verify", "--backend", "tiled", "--court", "--no-isolate"), "leave out --no-isolate"),
        (("verify", "--backend", "tiled", "--forbid", "aten"), "add --court and --backend"),
        (("verify", "--backend", "tiled", "--court", "--forbid", "numpy"), "--forbid 'numpy': expected aten"),
        (("verify", "--secret", "--seed", "3"), "--seed 3 and --secret: name one of them"),
        (("explain", "b1.h3/2.s8.d8.bf16"), "the query heads must be a multiple of the key heads"),
        (("explain", "b1.h1.s8.d8.bf16", "--device", "toaster"), "device 'toaster' is not known; expected cpu, cuda"),
        (("explain", "b1.h1.s8.d8.bf16", "--backend", "fastest"), "backend 'fastest' is not known"),
        (("unknown",), "No such command 'unknown'"),
        (("verify", "--no-corpus", "--corpus", "x"), "--no-corpus beside --corpus: expected one of them"),
        (("verify", "--longest", "5", "--require", "Lq>=1024"), "--longest 5, and Lq>=1024 demands 1024 at least"),
        (("verify", "--no-corpus", "--keep-worst"), "--no-corpus beside --keep-worst: expected one of them"),
        (("verify", "--no-isolate", "--timeout", "5"), "--timeout is of processes, and --no-isolate has none"),
        (("verify", "--no-isolate", "--workers", "2"), "--workers is of processes, and --no-isolate has none"),
        (("replay", str(KNOWN), "--no-isolate", "--timeout", "5"), "--timeout is of processes"),
    ],
)
def test_a_mistake_is_explained_and_exits_with_two(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""


VARIABLES = {
    "ATTNSWITCH_POLICY": ("fastest", "expected one of estimate, measure, learn, wisdom-only"),
    "ATTNSWITCH_CHECK_FINITE": ("perhaps", "expected one of cpu, always, never"),
    "ATTNSWITCH_RECORD": ("absent/calls.txt", "cannot be written: No such file or directory"),
}


@pytest.mark.parametrize("command", [("verify", "--quick"), ("tune", "b1.h1.s8.d8.fp32"), ("backends",)], ids=" ".join)
@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_says_nothing_is_no_fault_of_a_kernel(
    name: str, command: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, message = VARIABLES[name]
    monkeypatch.setenv(name, value)
    readers = [policy.of_process, finite.of_process, recording.whole_process]
    for reader in readers:
        reader.cache_clear()
    try:
        ran = cli(*command)
    finally:
        monkeypatch.undo()
        for reader in readers:
            reader.cache_clear()
    assert ran.code == 2
    assert f"{name}={value!r}" in ran.err
    assert message in ran.err.replace("\n", " ")
    assert ran.out == ""


@pytest.mark.parametrize(
    "option", ["--json", "--junit", "--html", "--ndjson", "--summary", "--corpus", "--emit-pytest"]
)
def test_a_file_that_cannot_be_written_is_not_a_mismatch(
    option: str, cli: Cli, register: Register, tmp_path: Path
) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    (tmp_path / "taken").touch()
    target = {"--json": str(tmp_path), "--corpus": "taken", "--emit-pytest": "taken"}.get(option, "taken/run.xml")
    ran = cli(*FAULTY, option, target)
    assert ran.code == 2
    assert Path(target).name.split(".")[0] in ran.err


# -- replay ------------------------------------------------------------------------------------------------------------


def test_replay_tells_the_endings_apart(cli: Cli, register: Register, tmp_path: Path) -> None:
    register("saboteur", "saboteurs:Raises")
    register("nowhere", "no_such_module:Backend")
    folder = tmp_path / "cases"
    files = {
        "FIXED": saved(folder, "reference", seq_k=63),
        "FAILED": saved(folder, "saboteur", seq_k=63),
        "REFUSED": saved(folder, "sdpa-math", softcap=3.0),
        "ABSENT": saved(folder, "nowhere"),
        "ERROR": folder / "damaged.json",
    }
    files["ERROR"].write_text("[]")

    def replay(*words: str) -> Ran:
        return cli("replay", "--no-isolate", *(str(files.get(word, word)) for word in words))

    for word, code in {"FIXED": 0, "FAILED": 1, "REFUSED": 3, "ABSENT": 3, "ERROR": 2}.items():
        ran = replay(word)
        assert (ran.code, ran.out.split()[0]) == (code, word)
    assert "RuntimeError: unspecified launch failure" in replay("FAILED").out
    assert "softcap=3.0: torch's attention has none" in replay("REFUSED").out
    assert "damaged.json is not a saved case" in replay("ERROR").out
    assert replay(*files).code == 1
    assert replay("FIXED", "REFUSED").code == 0
    assert replay("REFUSED", "ABSENT").code == 3
    assert replay("FIXED", "ERROR").code == 2
    assert replay("FAILED", "--backend", "tiled").code == 0
    documents = json.loads(replay("--json", *files).out)
    assert [document["result"] for document in documents] == list(files)
    assert [bool(document.get("reasons")) for document in documents] == [False, False, True, True, False]
    assert "is not a saved case" in documents[-1]["error"]
    whole = replay(str(folder))
    assert sorted(re.findall("^[A-Z]+(?= )", whole.out, re.MULTILINE)) == sorted(files)


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
    ran = cli("replay", "--no-isolate", str(path))
    assert (ran.code, ran.out.split()[:2]) == (2, ["ERROR", "damaged.json"])
    assert len(ran.out.splitlines()) > 1


def test_a_target_that_a_file_names_is_not_imported(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("open('sprung', 'w').close()\n")
    path = saved(tmp_path / "corpus", "trap:Backend")
    for options in ((), ("--no-isolate",), ("--emit-pytest", "test_trap.py")):
        ran = cli("replay", str(path), *options)
        assert (ran.code, "name it yourself, --backend trap:Backend" in ran.out) == (2, True)
    assert not (tmp_path / "sprung").exists()
    assert "has no attribute 'Backend'" in cli("replay", str(path), "--backend", "trap:Backend").err
    assert (tmp_path / "sprung").exists()


def test_a_damaged_file_in_the_corpus_stops_a_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text("[]")
    ran = cli(*HERE, "--corpus", str(tmp_path), "--backend", "tiled", "--examples", "1")
    assert (ran.code, "damaged.json is not a saved case" in ran.err) == (2, True)


def test_a_file_that_is_not_text_is_explained(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    ran = cli("replay", str(tmp_path / "binary.json"))
    assert (ran.code, "binary.json is not a saved case" in ran.out) == (2, True)


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
        ("json:JSONDecoder", "json:JSONDecoder from the tests is not a Backend"),
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
    assert cli(*HERE, "--backend", "broken", "--examples", "2").code == 3


def test_explain_gives_every_backend_its_line(cli: Cli) -> None:
    ran = cli("explain", "b1.h4/2.s64x128.d64.bf16.causal-br", "--device", "h200")
    assert ran.code == 0
    assert "problem  b1.h4/2.s64x128.d64.bf16.causal-br" in ran.out
    assert "H200, sm_90" in ran.out
    document = json.loads(cli("explain", "b1.h4/2.s64x128.d64.bf16.causal-br", "--device", "h200", "--json").out)
    named = [candidate["backend"] for candidate in document["candidates"]]
    expected = [candidate["expected_ms"] for candidate in document["candidates"] if candidate["fits"]]
    assert sorted(named) == sorted(registry.names())
    known = [ms for ms in expected if ms is not None]
    assert expected == [*sorted(known), *[None] * (len(expected) - len(known))]
    assert len(known) > 1
    assert document["backend"] == named[0]
    for candidate in document["candidates"]:
        assert candidate["backend"] in ran.out
        assert bool(candidate["why_not"]) == (candidate["backend"] != document["backend"])
        assert all(reason in ran.out for reason in candidate["why_not"])


def test_explain_tells_how_a_backend_computes_it(cli: Cli) -> None:
    ran = cli("explain", "b4.h16.s1024.d64.bf16.mask=fp32", "--device", "h200")
    document = json.loads(cli("explain", "b4.h16.s1024.d64.bf16.mask=fp32", "--device", "h200", "--json").out)
    remarks = {candidate["backend"]: candidate["remarks"] for candidate in document["candidates"]}
    (remark,) = remarks.pop("cuda")
    assert "not by Hopper's (attn_mask of float32" in remark
    assert remark in ran.out
    assert not any(remarks.values())


def test_explain_exits_with_two_where_nothing_fits(cli: Cli) -> None:
    ran = cli("explain", "b1.h1.s8.d512.fp32.softcap=2.0", "--device", "t4")
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


@pytest.mark.slow
def test_the_package_is_the_same_command(tmp_path: Path) -> None:
    """Workers import its main module again, and must not run it."""
    options = "--backend tiled --quick --recipes 1 --examples 5 --no-corpus --json found.json"
    command = [sys.executable, "-m", "attnswitch", "verify", *options.split()]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False), ran.stdout + ran.stderr
    assert json.loads((tmp_path / "found.json").read_text())["failures"] == []


@pytest.mark.parametrize("start", [[str(SCRIPT)], [sys.executable, "-m", "attnswitch"]], ids=["script", "package"])
def test_the_current_folder_runs_nothing(start: list[str], tmp_path: Path) -> None:
    """But a target that is named: neither in the command's process nor in a worker's, which begin in other ways."""
    strangers = ("csv", "random", "queue", "flash_attn", "xformers")  # of the standard library, and absent packages
    for name in strangers:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    command = [*start, "verify", "--quick", "--recipes", "1", "--examples", "3", "--no-corpus", "--workers", "1"]
    command += ["--device", "cpu", "--backend", "tiled"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not (tmp_path / "ran").exists()


def test_a_reader_that_leaves_is_not_a_mismatch(tmp_path: Path) -> None:
    """As with ``attnswitch explain ... | head``: exit code 1 would say that a kernel is wrong."""
    command = [str(SCRIPT), "explain", "b1.h1.s8.d8.fp32"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 2


def test_a_cache_folder_of_others_is_told_of(cli: Cli, no_wisdom: Path) -> None:
    assert json.loads(cli("backends", "--json").out)["distrusted"] is None
    no_wisdom.chmod(0o777)
    told = f"{no_wisdom} can be written by other users: nothing compiled is kept there"
    assert json.loads(cli("backends", "--json").out)["distrusted"].startswith(told)
    assert "other users: nothing compiled" in " ".join(cli("backends").out.split())


def test_help_and_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"attnswitch {metadata.version('attnswitch')}\n", "")
    for command in ("verify", "replay", "backends", "explain"):
        assert command in cli("--help").out
        assert cli(command, "--help").code == 0


@pytest.mark.nightly
def test_what_is_found_before_the_court_is_found_again(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import torch\n\ndef attention(query, key, value, attn_mask=None, is_causal=False, scale=None):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)\n"
    )
    run = ("--quick", "--examples", "6", "--workers", "1", "--max-failures", "1", "--require", "dtype=fp32,D=64")
    options = ("--forbid", "aten", "--ndjson", "log.ndjson", "--emit-pytest", "tests", "--secret")
    ran = cli("verify", "--device", "cpu", "--function", "kernels.py:attention", *run, *options)
    assert ran.code == 1
    assert "it calls torch's own aten::" in ran.out
    start = json.loads((tmp_path / "log.ndjson").read_text().splitlines()[0])
    assert "seed" not in start["plan"]
    (case,) = (tmp_path / "corpus").glob("*conduct*.json")
    replayed = shlex.split(next(line for line in ran.out.splitlines() if "attnswitch replay" in line))
    assert replayed[-2:] == ["--forbid", "aten"]
    again = cli(*replayed[replayed.index("attnswitch") + 1 :])
    assert (again.code, again.out.partition(" ")[0]) == (1, "FAILED")
    with_none = cli("replay", str(case), "--backend", "kernels.py:attention", "--no-court")
    assert "which is looked at before the court: add --court" in with_none.out
    (test,) = (tmp_path / "tests").glob("test_*conduct*.py")
    emitted = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], capture_output=True
    )
    assert b"1 failed" in emitted.stdout
