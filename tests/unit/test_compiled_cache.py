"""Compiled code on disk: whole, this user's own, and run from nowhere that another user can write to."""

from __future__ import annotations

import importlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnswitch import files

cache = importlib.import_module("attnswitch.backends.cuda.compiling.cache")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")

PARTS = ("source", "options")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and beside it an empty temporary directory."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(content: bytes = b"code", parts: tuple[str, ...] = PARTS) -> tuple[bytes, bool]:
    """What is kept, and whether it had to be made."""
    made: list[bytes] = []

    def make() -> bytes:
        made.append(content)
        return content

    return cache.kept(parts, ".so", make), bool(made)


def only_file(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``path`` another user's."""
    if os.getuid() == 0:
        os.chown(path, 1234, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 1234)


def test_it_is_made_once_and_is_nobody_else_s(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert kept() == (b"code", True)
    finally:
        os.umask(before)
    assert kept() == (b"code", False)
    path = only_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(above.stat().st_mode) for above in (path.parent, cache.folder(), folder)} == {0o700}


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:-1], lambda content: content[:2], flipped]
)
def test_what_is_damaged_is_made_again(damage: Callable[[bytes], bytes], folder: Path) -> None:
    kept()
    path = only_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert kept() == (b"code", True)
    assert kept() == (b"code", False)


def test_one_build_does_not_pass_for_another(folder: Path) -> None:
    kept()
    path = only_file(folder)
    kept(b"other", ("other",))
    (other,) = (found for found in folder.rglob("*.so") if found != path)
    other.replace(path)
    assert kept() == (b"code", True)


@pytest.mark.parametrize("what", ["another's", "writable", "a pipe"])
def test_a_file_that_another_user_may_have_written_is_not_run(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept()
    path = only_file(folder)
    if what == "another's":
        give_away(path, monkeypatch)
    elif what == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    assert kept() == (b"code", True)


@pytest.mark.parametrize("what", ["another's", "writable"])
@pytest.mark.parametrize("inner", [False, True])
def test_nothing_is_kept_in_a_folder_of_others(
    what: str, inner: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept()
    place = cache.folder() if inner else folder
    if what == "another's":
        give_away(place, monkeypatch)
    else:
        place.chmod(0o777)
    before = sorted(folder.rglob("*"))
    assert kept() == kept(b"code", ("other",)) == (b"code", True)
    assert sorted(folder.rglob("*")) == before
    assert not os.listdir(tempfile.gettempdir())
    told = cache.distrust()
    assert told is not None
    assert told.startswith(str(folder))
    assert told.endswith("nothing compiled is kept there, nor run from there; name a folder of your own")


@pytest.mark.parametrize("what", ["file", "full"])
def test_a_folder_that_cannot_be_written_is_no_failure(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    if what == "file":
        folder.touch()
    else:
        monkeypatch.setattr(os, "write", full)
    assert kept() == kept() == (b"code", True)
    assert not os.listdir(tempfile.gettempdir())
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
def test_a_library_that_was_cut_short_is_built_again(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    built: list[object] = []
    compiled = emulator._compile

    def compile_(macros: tuple[str, ...]) -> bytes:
        built.append(macros)
        content: bytes = compiled(macros)
        return content

    def load() -> None:
        emulator.load(str(tmp_path / "test.cu"), "test", {"WARPS": 2, "STORAGE": "float", "PHILOX_ROUNDS": 10})

    monkeypatch.setattr(emulator, "_compile", compile_)
    (tmp_path / "test.cu").write_text('#include "numbers.cuh"\nKERNEL test(const Arguments a) {}\n')
    load()
    load()
    assert len(built) == 1
    path = only_file(folder)
    os.truncate(path, path.stat().st_size // 2)
    load()
    assert len(built) == 2
    assert not os.listdir(tempfile.gettempdir())


def test_what_is_read_as_own_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(b"code")
    assert files.read_own(tmp_path / "code") == b"code"
    (tmp_path / "code").chmod(0o622)
    with pytest.raises(PermissionError, match="code can be written by other users, and is not used: remove it"):
        files.read_own(tmp_path / "code")
