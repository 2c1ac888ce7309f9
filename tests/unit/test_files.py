"""Results in the place of files: whole or not at all, and what cannot be written is found out first."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from attnswitch import InvalidProblem
from attnswitch import files as library
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.session import corpus, journal
from attnswitch.wisdom import store, view

files: Any = importlib.import_module("attnswitch.cli.files")


def test_what_is_written_is_in_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    files.check([path, None, Path("-")])
    assert os.listdir(path.parent) == []
    files.write("one\n", path)
    files.write("zw\N{LATIN SMALL LETTER O WITH DIAERESIS}lf\n", path)
    assert path.read_text(encoding="utf-8") == "zw\N{LATIN SMALL LETTER O WITH DIAERESIS}lf\n"
    assert os.listdir(path.parent) == ["run.json"]


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_is_cut_short_leaves_what_was_there(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "run.json", os.write
    files.write("before", path)

    def half(handle: int, content: bytes) -> int:
        write(handle, content[: len(content) // 2])
        raise error

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(type(error)):
        files.write("afterwards", path)
    assert (path.read_text(), os.listdir(tmp_path)) == ("before", ["run.json"])


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.touch(0o600)
    files.write("text", path)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("text", 0o600)


def test_a_stream_without_a_path_of_its_own() -> None:
    """As /dev/stdout is in a pipeline, and what a shell gives for a process."""
    read, write = os.pipe()
    try:
        path = Path(f"/dev/fd/{write}")
        assert files.at_the_end(path)
        files.check([path, path])
        files.write("text", path)
        assert os.read(read, 100) == b"text"
    finally:
        os.close(read)
        os.close(write)


def test_what_is_added_to_a_file_goes_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    tmp_path.chmod(0o500)
    files.check([], appended=[tmp_path / "log", None])
    tmp_path.chmod(0o700)
    with pytest.raises(InvalidProblem, match="standard output takes whole documents"):
        files.check([], appended=[Path("-")])


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("run.json")
    files.write("text", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "run.json").read_text() == "text"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    files.check([path])
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    files.write("text", path)
    reader.join(10)
    assert (read, path.is_fifo()) == (["text"], True)


@pytest.mark.parametrize(("first", "second"), [("run", "run"), ("run", "deep/../run"), ("-", "-")])
def test_one_place_takes_one_result(first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidProblem, match="is named for two results"):
        files.check([Path(first), None, Path(second)])
    files.check([Path("/dev/null"), Path("/dev/null")])


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for path in (Path("/dev/null/x"), tmp_path / "loop" / "x", tmp_path / "folder"):
        with pytest.raises(InvalidProblem, match="cannot be written"):
            files.check([path])


# -- one writer, one folder --------------------------------------------------------------------------------------------


def test_threads_that_replace_one_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    contents = [bytes([letter]) * 100_000 for letter in b"abcd"]

    def write(content: bytes) -> None:
        for _ in range(20):
            library.replace(tmp_path / "file", content, durable=False)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "file").exists():
            assert (tmp_path / "file").read_bytes() in contents
    assert ((tmp_path / "file").read_bytes() in contents, os.listdir(tmp_path)) == (True, ["file"])


def test_only_what_is_durable_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    library.replace(tmp_path / "file", b"1", durable=False)
    assert synced == []
    library.replace(tmp_path / "file", b"2")
    assert len(synced) == 2  # the file, and its folder's entry
    journal.write(tmp_path / "journal.json", journal.Entry(1, "tiled", Case()))
    assert len(synced) == 2


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of a user whom the system does not know."""

    def unknown(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("ATTNSWITCH_CACHE_DIR")
    monkeypatch.setattr(platformdirs, "user_cache_path", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library._homeless.cache_clear()
    yield tmp_path
    library._homeless.cache_clear()


def test_the_cache_folder_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.cache_folder() == Path(os.environ["ATTNSWITCH_CACHE_DIR"]) == store.here().path.parent
    monkeypatch.delenv("ATTNSWITCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert library.cache_folder() == Path("/caches/attnswitch") == store.here().path.parent


def test_a_user_without_a_home_has_a_folder_that_no_other_can_write(homeless: Path) -> None:
    folder = library.cache_folder()
    assert folder == homeless / f"attnswitch-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    library._homeless.cache_clear()
    assert library.cache_folder() == folder  # as another process does


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_folder_that_another_user_may_have_made_is_not_used(kind: str, homeless: Path) -> None:
    taken = homeless / f"attnswitch-{os.getuid()}"
    if kind == "link":
        (homeless / "elsewhere").mkdir()
        taken.symlink_to("elsewhere")
    elif kind == "open":
        taken.mkdir()
        taken.chmod(0o777)
    else:
        taken.touch()
    folder = library.cache_folder()
    assert folder != taken
    assert (folder.parent, folder.stat().st_mode & 0o777) == (homeless, 0o700)
    assert library.cache_folder() == folder


def test_an_unexpanded_home_is_none(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/attnswitch"))
    assert library.cache_folder().parent == homeless


#: As a user whom the system does not know, without HOME: what is asked for raises nothing, and nothing is left here.
UNKNOWN = """
import os, pwd
def unknown(*_):
    raise KeyError("no such user")
pwd.getpwuid = unknown
import numpy as np
import attnswitch
q = np.ones((1, 1, 2, 4), np.float32)
assert attnswitch.attention(q, q, q).tolist() == q.tolist()
from attnswitch.machine.device import Device
from attnswitch.verify.session import corpus, plan
from attnswitch.wisdom import store
assert plan._has_cupy() in (True, False)
assert os.listdir() == [], os.listdir()
print(corpus.default_folder())
print(store.here().path)
"""


def test_a_user_whom_the_system_does_not_know_is_answered(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "ATTNSWITCH_CACHE_DIR")}
    environment = {name: value for name, value in environment.items() if not name.startswith("XDG_")}
    ran = subprocess.run(
        [sys.executable, "-c", UNKNOWN],
        cwd=tmp_path / "here",
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    own = tmp_path / f"attnswitch-{os.getuid()}"
    assert ran.stdout.split() == [str(own / "corpus"), str(own / "wisdom.jsonl")]


def test_wisdom_is_empty_where_no_folder_can_be_had(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    view.reload()
    assert not view.current().times


# -- the corpus --------------------------------------------------------------------------------------------------------


def test_cases_that_lie_in_the_current_folder_are_used_in_the_clone_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNSWITCH_CORPUS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "fixtures" / "corpus").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "attnswitch"\n')
    monkeypatch.chdir(tmp_path)
    assert corpus.default_folder() == tmp_path / "data" / "attnswitch" / "corpus"
    monkeypatch.chdir(Path(library.__file__).parents[1])
    assert corpus.default_folder() == Path("fixtures/corpus")
    monkeypatch.setenv("ATTNSWITCH_CORPUS", "fixtures/corpus")
    monkeypatch.chdir(tmp_path)
    assert corpus.default_folder() == Path("fixtures/corpus")
