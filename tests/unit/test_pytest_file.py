"""A failure as a test file: it runs alone, without Hypothesis, and says what is wrong."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnswitch.machine.backend import Precision
from attnswitch.verify import Case, Failure, to_pytest
from attnswitch.verify.drawing.case import Placing
from attnswitch.verify.report import file_name
from attnswitch.verify.terms import Terms

#: A backend that is off by a hundredth, and excuses it.
ROUGH = """
from attnswitch.backends.tiled import TiledBackend
from attnswitch.machine.backend import Kernel, Precision


class Off(Kernel):
    def __init__(self, kernel):
        self.kernel = kernel

    def forward(self, inputs):
        out, lse = self.kernel.forward(inputs)
        return (out * 1.01).astype(out.dtype), lse


class Rough(TiledBackend):
    name = "rough"

    def precision(self, problem, device):
        return Precision(exp=0.5)

    def compile(self, problem, device, config):
        return Off(super().compile(problem, device, config))
"""
#: What a kernel may say, to break out of a docstring.
NASTY = '""" \\ \x00 \ud800 \n# heading'


def run_test(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_failure.py").write_text(source, errors="replace")
    (tmp_path / "conftest.py").write_text(
        "import sys\n\n\ndef pytest_sessionfinish():\n    assert 'hypothesis' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "."]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_test_of_a_failure_fails_and_says_how(tmp_path: Path) -> None:
    case = Case(seq_q=3, seq_k=63, library="numpy", lengths=(2,), scale=-0.25)
    (tmp_path / "faulty.py").write_text(
        "from attnswitch.backends.tiled import TiledBackend\n\n\n"
        "class Faulty(TiledBackend):\n    name = 'faulty'\n\n"
        "    def compile(self, *arguments):\n        raise RuntimeError('unspecified launch failure')\n"
    )
    failure = Failure("crash", "RuntimeError: unspecified launch failure")
    source = to_pytest(case, "faulty:Faulty", "cpu", failure, {"torch": "9.9", "python": "3.11"})
    assert "Seen with torch 9.9, python 3.11." in source
    ran = run_test(tmp_path, source)
    assert ran.returncode == 1, ran.stdout
    assert "1 failed" in ran.stdout
    assert "unspecified launch failure" in ran.stdout
    assert str(case) in ran.stdout


@pytest.mark.parametrize(
    ("backend", "case", "ending"),
    [
        ("tiled", Case(seq_q=2, seq_k=33, library="numpy"), "1 passed"),
        ("sdpa-math", Case(softcap=3.0), "1 skipped"),
    ],
)
def test_a_test_of_what_was_repaired(backend: str, case: Case, ending: str, tmp_path: Path) -> None:
    ran = run_test(tmp_path, to_pytest(case, backend, "cpu", Failure("reference", "it was wrong once"), {}))
    assert (ran.returncode, ending in ran.stdout) == (0, True), ran.stdout


def test_a_test_holds_the_backend_to_the_precision_that_was_demanded(tmp_path: Path) -> None:
    (tmp_path / "rough.py").write_text(ROUGH)
    case, failure = Case(seq_q=2, seq_k=33, library="numpy"), Failure("reference", "off")
    by_its_own = to_pytest(case, "rough:Rough", "cpu", failure, {})
    demanded = to_pytest(case, "rough:Rough", "cpu", failure, {}, Terms(Precision(statistics="lse")))
    assert "Precision(" not in by_its_own
    assert [run_test(tmp_path, source).returncode for source in (by_its_own, demanded)] == [0, 1]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_test_is_python_whatever_the_message(device: str) -> None:
    source = to_pytest(Case(seq_q=20, seq_k=33), "a.b:C", device, Failure("crash", NASTY), {"torch": NASTY})
    tree = ast.parse(source.encode(errors="replace"))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [
        f"test_a_b_c_{device.replace(':', '_')}_crash"
    ]
    assert "# heading" in (ast.get_docstring(tree) or "")
    assert ("device_count() <= 1" in source) == (device == "cuda:1")


@pytest.mark.parametrize(
    "text", ['cuda"+str(open("sprung", "w"))+"', "cuda\"\"\"\nopen('sprung', 'w')\n", "cuda:{case}'\\"]
)
def test_no_text_of_a_failure_is_run(text: str) -> None:
    case = Case(library=text, check=text, placing=Placing(query=text))
    source = to_pytest(case, text, text, Failure(text, text, text), {text: text})
    tree = ast.parse(source.encode(errors="replace"))
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert "open" not in calls
    (checked,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "check")
    assert [ast.literal_eval(argument) for argument in checked.args[1:]] == [text, text]


def test_failures_of_different_kinds_have_different_files() -> None:
    kinds = [
        (b, d, Failure(c, "", r))
        for b in ("one", "m:C")
        for d in ("cpu", "cuda:0")
        for c in ("hull", "split")
        for r in ("", "out")
    ]
    names = {file_name(*kind) for kind in kinds}
    assert len(names) == len(kinds)
    assert all(re.fullmatch(r"test_[a-z0-9_]+\.py", name) for name in names)


# -- what is imported for it -------------------------------------------------------------------------------------------


def imported(statement: str) -> set[str]:
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout))


@pytest.mark.parametrize("statement", ["import attnswitch.verify", "from attnswitch.verify.judge import check"])
def test_judging_needs_no_hypothesis(statement: str) -> None:
    loaded = imported(statement)
    assert loaded.isdisjoint({"hypothesis", "jinja2", "rich", "typer", "attnswitch.verify.session.whole"})


def test_public_names_are_there_when_asked_for() -> None:
    loaded = imported("import attnswitch.verify as v\nassert set(v.__all__) <= set(dir(v))\nv.run, v.Case, v.cases")
    assert "hypothesis" in loaded
    imported(
        "from attnswitch.verify import *\nfrom attnswitch import verify\nassert set(verify.__all__) <= set(globals())"
    )
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from attnswitch.verify import nothing  # noqa: F401
