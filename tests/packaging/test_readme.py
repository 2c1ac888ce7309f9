"""The READMEs do what they say: every Python block runs as written, and so does every ``attnswitch`` command line.

A block that cannot run here says why, in a comment just before it: ``<!-- not run: needs a GPU -->``.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from attnswitch.bench.suites import suites

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: The README of each room, and the one that leads to them.
READMES = (
    README,
    *sorted(path for room in ("attnswitch", "backends", "fixtures") for path in (ROOT / room).rglob("README.md")),
)
COMMANDS = ("verify", "replay", "backends", "explain", "bench", "estimate", "tune", "build", "wisdom")
_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_LEFT_OUT = re.compile(r"<!-- not run: (\S[^\n]*) -->\s*\Z")


class Block(NamedTuple):
    path: Path
    line: int
    language: str
    text: str
    left_out: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT).parent}-line-{self.line}"


def blocks(document: str, path: Path = README) -> Iterator[Block]:
    """The fenced blocks of a Markdown document."""
    for found in _BLOCK.finditer(document):
        before = document[: found.start()]
        text = textwrap.dedent(found["text"])
        yield Block(path, before.count("\n") + 2, found["language"], text, bool(_LEFT_OUT.search(before)))


def commands(block: Block) -> Iterator[list[str]]:
    """Arguments of each ``attnswitch`` command of a shell block: what stands before a pipe or a redirection."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):  # then the others are what is printed
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:2] == ["uv", "run"]:
            words = words[2:]
        if words[:1] == ["attnswitch"]:
            ends = [n for n, word in enumerate(words) if word in ("|", ">", ">>", "&&", "||", ";", "2>")]
            yield words[1 : min(ends, default=len(words))]


BLOCKS = [block for path in READMES for block in blocks(path.read_text(encoding="utf-8"), path)]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.left_out]
SHELLS = ("console", "bash", "sh", "shell")
SHELL = [block for block in BLOCKS if block.language in SHELLS and not block.left_out]
#: Verifying every backend takes seconds, however few cases there are.
SLOW = {"verify", "tune", "build", "bench"}
LINES = [
    pytest.param(words, id=f"{block}-{'-'.join(words[:2])}", marks=[pytest.mark.slow] if words[0] in SLOW else [])
    for block in SHELL
    for words in commands(block)
]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like a clone, in which what a block writes does no harm."""
    for folder in ("corpus", "definitions"):
        shutil.copytree(ROOT / "fixtures" / folder, tmp_path / "fixtures" / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNSWITCH_CORPUS", raising=False)


def test_the_readme_shows_the_library_and_every_command() -> None:
    assert PYTHON
    shown = {words[0] for block in BLOCKS if block.language in SHELLS for words in commands(block) if words}
    assert shown >= set(COMMANDS)


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_versions_of_python_and_torch_are_those_that_are_held() -> None:
    """The oldest torch is the one that pyproject allows and `.ci/torch` is shown with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = next(line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    pythons = [row.split(" :: ")[-1] for row in project["classifiers"] if " :: Python :: " in row]
    text = README.read_text(encoding="utf-8")
    assert f"Python {pythons[0]} to {pythons[-1]}, torch {oldest} or later" in text
    assert f"`.ci/torch {oldest}`" in text


def test_the_readme_of_bench_says_what_every_suite_measures() -> None:
    text = (ROOT / "attnswitch" / "bench" / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([^`]+)`", " ".join(rows))
    assert set(suites()) <= set(named)


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT).parent))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", _BLOCK.sub("", path.read_text(encoding="utf-8"))):
        assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs(block: Block, elsewhere: None) -> None:
    exec(compile("\n" * (block.line - 1) + block.text, str(block.path), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("words", LINES)
def test_a_command_line_runs(
    words: list[str], elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    quick = ["--examples", "5", "--quick"] if words[0] == "verify" else []  # whole runs are those of .ci/run
    monkeypatch.setattr(sys, "argv", ["attnswitch", *words, *quick])
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    # A saved case may be of a fault that its backend refuses by now, which is "nothing was verified".
    assert code in ((0, 3) if words[0] == "replay" else (0,)), capsys.readouterr()


def test_blocks_are_found_and_left_out() -> None:
    """The reader of the document itself."""
    document = """Text.

```python
import attnswitch
```

<!-- not run: needs a GPU -->

```console
$ attnswitch verify --device cuda
```

- An item:

  ```console
  $ attnswitch verify --json - --time \\
      10m | jq .  # a remark
  20 cases
  $ pip install attnswitch
  $ uv run attnswitch explain "b1.h1.s8.d8.fp32 causal"
  ```
"""
    python, gpu, item = blocks(document)
    assert python == (README, 4, "python", "import attnswitch\n", False)
    assert (gpu.line, gpu.left_out, item.left_out) == (10, True, False)
    assert list(commands(item)) == [
        ["verify", "--json", "-", "--time", "10m"],
        ["explain", "b1.h1.s8.d8.fp32 causal"],
    ]
