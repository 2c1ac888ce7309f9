"""Known divergences: the language of conditions, ranges of versions, refusals in plans, and that no entry is stale."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import attnswitch
from attnswitch import AttnswitchError, Device, Problem
from attnswitch.machine import divergences, registry
from attnswitch.machine.backend import Backend
from attnswitch.machine.divergences import Divergence
from attnswitch.planning import planner
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.field import Field
from attnswitch.verify.launch.unguarded import unguarded

FIXTURES = Path(__file__).parents[2] / "fixtures"
SDPA = "attnswitch.backends.sdpa:divergences.toml"
ENTRIES = divergences.load(SDPA)
CASES = [pytest.param(entry, case, id=f"{entry.id}-{case}") for entry in ENTRIES for case in entry.cases]
REPORTS = [entry for entry in ENTRIES if entry.report]
ON_CPU = [entry for entry in REPORTS if entry.device != "cuda"]
PLAIN = Problem.parse("b1.h1.s4.d8.fp32")


def matching(backend: str, problem: Problem, device: Device) -> list[str]:
    """Ids of torch's entries that cover ``problem`` on ``device``, mended ones too."""
    return [entry.id for entry in ENTRIES if backend in entry.backend and entry.on(device) and entry.covers(problem)]


def gpu(capability: tuple[int, int] | None = (9, 0), **versions: str) -> Device:
    return Device("cuda", "a GPU", capability, 100, 2**36, 2**17, tuple(versions.items()))


def toml(**changes: str) -> str:
    """An entry with every key that must be there, each line given as text."""
    lines = {
        "id": '"an-id"',
        "backend": '["toy"]',
        "when": '["causal"]',
        "symptom": '"wrong"',
        "reason": '"scale={scale}: wrong"',
        "link": '""',
        "cases": "[]",
        "report": '""',
    } | changes
    return "[[divergence]]\n" + "".join(f"{key} = {text}\n" for key, text in lines.items() if text)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """``write(text)`` is a file of divergences that holds it."""

    def written(text: str) -> Path:
        path = tmp_path / "divergences.toml"
        path.write_text(text)
        return path

    return written


# -- conditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "problem", "holds"),
    [
        ("causal", "b1.h1.s4.d8.fp32.causal", True),
        ("causal", "b1.h1.s4.d8.fp32", False),
        ("not causal", "b1.h1.s4.d8.fp32", True),
        ("grads", "b1.h1.s4.d8.fp32.grad", True),
        ("softmax_scale <= 0", "b1.h1.s4.d8.fp32.scale=-0.0", True),
        ("softmax_scale <= 0", "b1.h1.s4.d8.fp32", False),
        ("scale < 1", "b1.h1.s4.d8.fp32.scale=0.5", True),
        ("scale < 1", "b1.h1.s4.d8.fp32", False),
        ("not scale < 1", "b1.h1.s4.d8.fp32", True),
        ("scale == -0.5", "b1.h1.s4.d8.fp32.scale=-0.5", True),
        ("seq_k % 128 == 64", "b1.h1.s4x192.d8.fp32", True),
        ("seq_k % 128 == 64", "b1.h1.s4x128.d8.fp32", False),
        ("seq_q % 4 or seq_k % 4", "b1.h1.s4x5.d8.fp32", True),
        ("seq_q % 4 or seq_k % 4", "b1.h1.s4x8.d8.fp32", False),
        ("seq_q * seq_k >= 2**31", "b1.h1.s65536x32768.d8.fp32", True),
        ("seq_q * seq_k >= 2**31", "b1.h1.s65536x32767.d8.fp32", False),
        ("seq_k - seq_q > 2 + 1", "b1.h1.s4x8.d8.fp32", True),
        ("group > 1", "b1.h4/2.s4.d8.fp32", True),
        ("dtype in (float16, bfloat16)", "b1.h1.s4.d8.bf16", True),
        ("dtype in (float16, bfloat16)", "b1.h1.s4.d8.fp32", False),
        ("dtype == float32 and (causal or lse)", "b1.h1.s4.d8.fp32.lse", True),
        ("mask", "b1.h1.s4.d8.fp32.mask=bool", True),
        ("mask.is_bool", "b1.h1.s4.d8.fp32", False),
        ("mask.dtype == bool", "b1.h1.s4.d8.fp32.mask=bool", True),
        ("mask.dtype != bool", "b1.h1.s4.d8.fp32", False),
        ("alignment == bottom_right", "b1.h1.s4.d8.fp32.causal-br", True),
        ("plainly_causal", "b1.h1.s4.d8.fp32.causal-br", True),
        ("plainly_causal", "b1.h1.s4x5.d8.fp32.causal-br", False),
        ("query.align < 8", "b1.h1.s4.d8.fp32", False),
    ],
)
def test_a_condition(condition: str, problem: str, holds: bool) -> None:
    assert bool(divergences.condition(condition)(Problem.parse(problem))) is holds


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("", "invalid syntax"),
        ("causal causal", "invalid syntax"),
        ("casual", "'casual' is no fact of a Problem"),
        ("causal or casual", "'casual' is no fact"),
        ("dtype in (float16, flaot32)", "'flaot32' is no fact"),
        ("mask.kind == bool", "'mask.kind' is no fact"),
        ("replace", "'replace' is no fact"),
        ("causal.__class__", "is no fact"),
        ("__import__('os')", "not part of the language"),
        ("(lambda: 1)()", "not part of the language"),
        ("[x for x in grads]", "not part of the language"),
        ("'float16' == dtype", "not part of the language"),
        ("True", "not part of the language"),
        ("0 < seq_k < 3", "not part of the language"),
        ("dtype is float16", "not part of the language"),
        ("dtype in float16", "not part of the language"),
        ("seq_k / 2 == 1", "not part of the language"),
        ("seq_k % 0 == 1", "takes a number on its right"),
        ("seq_k % seq_q == 1", "takes a number on its right"),
        ("2**999999999 > seq_k", "takes a number on its right"),
        ("dtype < 3", "do not compare"),
        ("window < 3", "do not compare"),
        ("mask == bool", "do not compare"),
        ("scale * 2 < 1", "unsupported operand"),  # None where the scale was left out
    ],
)
def test_what_is_no_condition(condition: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        divergences.condition(condition)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (toml(when='["causal", "casual"]'), "entry an-id: condition 'casual': 'casual' is no fact of a Problem"),
        (toml(reason='"scale={scael}"'), "entry an-id: 'scael' is no fact"),
        (toml(symptom=""), "entry an-id: symptom is missing"),
        (toml(id=""), "entry number 1: id is missing"),
        (toml(id='"An id"'), "expected lower-case words joined by hyphens"),
        (toml(device='["cpu"]'), "device=['cpu']: expected a str"),
        (toml(cases="[1]"), "cases=[1]: expected strings"),
        (toml(since='"2.8"'), "unknown keys: since"),
        (toml(mended='"by a copy"'), "expected either reason or mended"),
        (toml(reason=""), "expected either reason or mended"),
        (toml(versions='{ torhc = "<2" }'), "versions of torhc: expected some of torch, cuda, cudnn"),
        (toml(versions='{ torch = "2.11" }'), "torch '2.11': expected a range of versions such as"),
        (toml(versions="{ torch = 2.11 }"), "torch 2.11: expected a range of versions such as"),
        (toml(capability='"hopper"'), "capability 'hopper': expected a range"),
        (toml() + toml(), "entry an-id: another entry has the same id"),
        ("[[divergence", "cannot be read: TOMLDecodeError"),
        ("[divergence]\n", "expected [[divergence]] tables and nothing else"),
        ("divergence = [1]\n", "expected [[divergence]] tables and nothing else"),
        ("[[divergenze]]\n", "expected [[divergence]] tables and nothing else"),
    ],
)
def test_a_file_that_is_wrong(text: str, why: str, write: Any) -> None:
    path = write(text)
    with pytest.raises(AttnswitchError, match=re.escape(why)) as caught:
        divergences.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "source", ["no_such_package:a.toml", "attnswitch:no-such-file.toml", Path("no-such-file.toml")]
)
def test_a_file_that_is_not_there(source: str | Path) -> None:
    with pytest.raises(AttnswitchError, match=f"divergences of {source}: cannot be read"):
        divergences.load(source)


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "version", "inside"),
    [
        ("<2.11", "2.10.1", True),
        ("<2.11", "2.9.1+cpu", True),  # by number, not by letter
        ("<2.11", "2.11.0", False),
        ("<2.11", "2.11.0+cu130", False),
        ("==2.11.0", "2.11.0+cu130", True),
        ("<2.16", "2.16.0a0+git1a2b3c", False),  # a build on the way to 2.16 counts as 2.16
        (">=2.16", "2.16.0.dev20261101", True),
        (">=2.8", "2.16.0a0", True),
        ("<2.11", "unknown", False),
        ("<2.11", None, False),  # not known: taken for the newest
        (">=2.11", None, True),
    ],
)
def test_versions_of_torch(allowed: str, version: str | None, inside: bool, write: Any) -> None:
    (entry,) = divergences.load(write(toml(versions=f'{{ torch = "{allowed}" }}')))
    device = gpu() if version is None else gpu(torch=version)
    assert entry.on(device) is inside


@pytest.mark.parametrize(
    ("cudnn", "refused"),
    [
        ("9.18.1", False),
        ("9.19.0", True),
        ("9.19.0.56", True),  # as the package has it
        ("9.24.0", True),
        ("9.24.1", False),
        ("9.24.1.30", False),
        ("9.25.1", True),
        ("9.26.0", False),
    ],
)
def test_versions_of_cudnn(cudnn: str, refused: bool) -> None:
    plan = attnswitch.explain("b1.h1.s1x128.d64.fp16", device=gpu((10, 0), torch="2.15.0", cudnn=cudnn))
    assert ("cudnn-decode-blackwell" in str(plan)) is refused


@pytest.mark.parametrize(
    ("capability", "refused"), [((9, 0), True), ((9, 1), True), ((8, 9), False), ((10, 0), False), (None, False)]
)
def test_capabilities(capability: tuple[int, int] | None, refused: bool) -> None:
    device = gpu(capability, torch="2.11.0+cu130", cudnn="9.19.0")
    plan = attnswitch.explain("b1.h1.s16x64.d8.bf16.causal-br.grad", device=device)
    assert ("cudnn-grad-query" in str(plan)) is refused


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_divergence_refuses_with_its_reason_and_its_link() -> None:
    plan = attnswitch.explain("b1.h1.s4.d8.fp32.causal.scale=-2.0.nonfinite")
    (flash,) = (candidate for candidate in plan.candidates if candidate.backend == "sdpa-flash")
    assert "causal with scale=-2.0: rows come out NaN (divergence flash-cpu-causal-scale)" in flash.reasons
    link = "https://github.com/pytorch/pytorch/issues/101967"
    assert any(reason.endswith(f"(divergence nonfinite-leak, {link})") for reason in flash.reasons)
    assert plan.backend == "tiled"


def test_a_mended_one_refuses_nothing() -> None:
    problem = Problem.parse("b1.h1.s4.d8.fp64.mask=fp32")
    cpu = Device("cpu", "a CPU", versions=(("torch", "2.15.0"),))
    assert matching("sdpa-flash", problem, cpu) == ["flash-cpu-mask-dtype"]
    assert attnswitch.explain(problem, device=cpu).backend == "sdpa-flash"


def test_unguarded_lifts_them() -> None:
    text = "b1.h1.s4.d8.fp32.causal.scale=-2.0"
    with unguarded("sdpa-flash"):
        assert attnswitch.plan(text).backend == "sdpa-flash"
    assert attnswitch.plan(text).backend == "sdpa-math"


class Toy(Backend):
    """A backend of another package, with a file of its own beside it."""

    name: ClassVar[str] = "toy"
    library: ClassVar[str] = "numpy"
    autograd: ClassVar[bool] = False
    divergences: ClassVar[str] = ""

    def unavailable(self) -> str | None:
        return None

    def reasons(self, problem: Problem, device: Device) -> Any:
        return ()

    def configs(self, problem: Problem, device: Device) -> Any:
        yield None

    def precision(self, problem: Problem, device: Device) -> Any:
        raise NotImplementedError

    def compile(self, problem: Problem, device: Device, config: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``toy(text)`` plans a causal problem with the toy backend, whose package has a file that holds ``text``."""
    package = tmp_path / re.sub(r"\W", "_", f"toy_{tmp_path.name}")
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Toy, "divergences", f"{package.name}:known.toml")
    monkeypatch.setattr(registry, "names", lambda: ("toy",))
    monkeypatch.setattr(registry, "load", lambda name: Toy())

    def planned(text: str) -> Candidate:
        (package / "known.toml").write_text(text)
        planner.forget()
        field = Field(PLAIN.replace(causal=True, scale=3.0), Device.cpu(), "toy")
        return field.candidate(field.row("toy"))

    return planned


def test_a_plug_in_has_a_file_of_its_own(toy: Any) -> None:
    assert toy(toml()).reasons == ("scale=3.0: wrong (divergence an-id)",)


def test_an_entry_for_another_backend_is_not_for_this_one(toy: Any) -> None:
    assert toy(toml(backend='["other"]')).reasons == ()


def test_a_broken_file_is_a_reason_and_not_a_crash(toy: Any) -> None:
    candidate = toy(toml(when='["casual"]'))
    assert f"it failed while planning: AttnswitchError: divergences of {Toy.divergences}" in candidate.unavailable


# -- torch's own -------------------------------------------------------------------------------------------------------


def test_every_entry_has_a_backend_and_something_to_show_for_it() -> None:
    assert {name for entry in ENTRIES for name in entry.backend} <= set(registry.names())
    for entry in ENTRIES:
        assert entry.link or entry.report or entry.cases or entry.versions, entry.id
        assert not entry.link or entry.link.startswith("https://"), entry.id


def test_every_text_and_every_refused_case_belongs_to_an_entry() -> None:
    assert {path.name for path in (FIXTURES / "divergences").glob("*.md")} == {entry.report for entry in ENTRIES} - {""}
    named = {case for entry in ENTRIES for case in entry.cases}
    ours = {path.name for path in (FIXTURES / "corpus").glob("own-*.json")}
    assert {path.name for path in (FIXTURES / "corpus").glob("*.json")} == named | ours


def saved_plan(case: str) -> tuple[Problem, Device]:
    """The problem of a saved case, and the machine that it was seen on."""
    record = json.loads((FIXTURES / "corpus" / case).read_text())
    seen = record["environment"]
    problem = Problem.parse(record["problem"]).replace(nonfinite=record["case"]["poison"])
    if record["device"] == "cpu":
        return problem, Device("cpu", "a CPU", versions=(("torch", seen["torch"]),))
    number = int(seen["cudnn"])
    cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return problem, gpu((9, 0), torch=seen["torch"], cudnn=cudnn)


@pytest.mark.parametrize(("entry", "case"), CASES)
def test_a_case_is_refused_because_of_its_entry(entry: Divergence, case: str) -> None:
    problem, device = saved_plan(case)
    backend = json.loads((FIXTURES / "corpus" / case).read_text())["backend"]
    assert entry.id in matching(backend, problem, device)
    refused = {c.backend: c.reasons for c in attnswitch.explain(problem, device=device).candidates}[backend]
    assert any(entry.id in reason for reason in refused) is (entry.mended is None)
    if entry.mended is None:
        assert all(problem.nonfinite or entry.id in reason for reason in refused)  # and because of nothing else


def block(entry: Divergence) -> str:
    """The Python block of an entry's text, of which there is one."""
    text = (FIXTURES / "divergences" / entry.report).read_text()
    (found,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("entry", REPORTS, ids=lambda entry: entry.report)
def test_a_text_can_be_filed_as_it_is(entry: Divergence) -> None:
    text = (FIXTURES / "divergences" / entry.report).read_text()
    assert text.startswith("# ")
    for heading in ("## To reproduce", "## Seen", "## Expected"):
        assert heading in text
    assert "attnswitch" not in text
    code = block(entry)
    compile(code, entry.report, "exec")
    assert code.rstrip().endswith(('else "right")', 'else "WRONG")'))
    assert ("cuda" in code) == (entry.device == "cuda")


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What each block for the CPU prints, by its file; one process for all, since importing torch takes seconds."""
    script = """
import contextlib, io, json, sys
found = {}
for name, code in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    found[name] = out.getvalue().splitlines()
print(json.dumps(found))
"""
    blocks = json.dumps({entry.report: block(entry) for entry in ON_CPU})
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, input=blocks, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("entry", ON_CPU, ids=lambda entry: entry.report)
def test_a_fault_is_still_there(entry: Divergence, printed: dict[str, list[str]]) -> None:
    """Otherwise the entry has outlived its cause: its versions need an end."""
    lines = printed[entry.report]
    assert lines[-1] == ("WRONG" if entry.on(Device.cpu()) else "right"), "\n".join(lines)
