"""``Target``: the name of a function in a file, taken apart; and the function, from the file imported by its path."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnswitch.errors import InvalidProblem

from .interpreted import without_gpu

__all__ = ["Target", "found"]


class Target(NamedTuple):
    """What ``FILE.py:FUNCTION@LIKE`` says; ``file`` is absolute from now on, ``like`` is "" where none is named."""

    name: str
    file: Path
    function: str
    like: str

    @classmethod
    def parse(cls, name: str) -> Target:
        """The target called ``name``, a relative path being from the current folder."""
        file, _, rest = name.rpartition(":")
        function, _, like = rest.partition("@")
        return cls(name, Path(file).absolute(), function, like)

    @property
    def source(self) -> str:
        """The first digits of the SHA-256 of the file and of the modules beside it that are imported."""
        digest = hashlib.sha256()
        for path in self._sources():
            with contextlib.suppress(OSError):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:12]

    @property
    def in_triton(self) -> bool:
        """Whether the file, or a module beside it that is imported, imports Triton."""
        return any("triton" in _named(path) for path in self._sources())

    @property
    def modules(self) -> list[types.ModuleType]:
        """Those beside the file, and it, as far as they are imported."""
        every = [(module, getattr(module, "__file__", None)) for module in list(sys.modules.values())]
        return [module for module, file in every if isinstance(file, str) and Path(file).parent == self.file.parent]

    @property
    def foresees_triton(self) -> bool:
        """Whether the file, or one beside it that it names, is going to import Triton."""
        beside = (self.file.with_name(f"{name}.py") for name in _named(self.file))
        return any("triton" in _named(path) for path in (self.file, *beside))

    def _sources(self) -> list[Path]:
        return sorted({Path(str(module.__file__)) for module in self.modules} | {self.file})


def found(target: Target) -> Callable[..., Any]:
    """The function. Raises ``InvalidProblem`` if the file cannot be imported, or has no such function."""
    if target.foresees_triton:
        without_gpu()
    found: Any = _imported(target.file)
    for part in target.function.split("."):
        if not hasattr(found, part):
            raise InvalidProblem(f"{target.file.name} has no {target.function!r}{_others(found)}")
        found = getattr(found, part)
    kind = next((kind for kind, told in _ODD.items() if told(found)), None)
    if kind is not None:
        raise InvalidProblem(f"{target.function} in {target.file.name} is {kind}: expected a function of arrays")
    function: Callable[..., Any] = found
    return function


#: What stands under a name and is no function to call.
_ODD: dict[str, Callable[[Any], bool]] = {
    "a class": inspect.isclass,
    "a coroutine function (async def)": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "not callable": lambda found: not callable(found),
}


def _others(place: Any) -> str:
    """The functions that a module or class has of its own."""
    own = place.__name__ if inspect.ismodule(place) else getattr(place, "__module__", None)
    there: dict[str, Any] = getattr(place, "__dict__", {})
    names = [name for name, value in there.items() if getattr(value, "__module__", "") == own]
    names = [name for name in names if callable(getattr(place, name)) and not name.startswith("_")]
    return f": expected one of {', '.join(names)}" if names else ""


@functools.cache
def _imported(file: Path) -> types.ModuleType:
    """The module of ``file``, under a name of its own; what it prints as it is imported goes to standard error."""
    if not file.is_file():
        raise InvalidProblem(f"{file} is not a file: expected a file of Python")
    name = f"attnswitch_function_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses and pickles, which look their module up
    try:
        with _beside(file), contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a file does as it is imported
        del sys.modules[name]
        raise InvalidProblem(f"{file.name} cannot be imported: {type(error).__name__}: {error}") from error
    return module


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[None]:
    """Within the context, modules beside ``file`` can be imported: behind all others, so that they hide none."""
    folder = str(file.parent)
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)


def _named(path: Path) -> frozenset[str]:
    """The first words of what the text of a module imports, anywhere in it; none of what cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # one that was compiled, or is none
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return frozenset(name.partition(".")[0] for name in names)
