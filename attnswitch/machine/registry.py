"""The table of backends: the built-in rows, and those of other packages through entry points.

To add a built-in backend, write its file and add its row here. Another package adds one without touching this file,
by an entry point in the group ``attnswitch.backends``: ``name = "package.module:Class"``. A backend that is in no table
is reached by that target itself: ``backend="package.module:Class"``, and a function in a file, for which there is no
class, by ``backend="folder/file.py:function"`` (``attnswitch.backends.function``).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Backend
from attnswitch.names import one_of

__all__ = [
    "ENTRY_POINTS",
    "Missing",
    "Row",
    "forget",
    "is_function",
    "is_known",
    "load",
    "loaded",
    "names",
    "standing_in",
    "table",
]

ENTRY_POINTS = "attnswitch.backends"
#: A function in a file, and what makes a backend of it.
_FUNCTION = re.compile(r"[^:\x00-\x1f\"'`\\]+\.py:[\w.]+(@[\w+-]+)?")
_OF_FUNCTION = "attnswitch.backends.function.backend"


@dataclass(frozen=True, slots=True)
class Missing:
    """What stands where something could not be had, with the sentence that says why."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class Row(NamedTuple):
    """A backend's name and where its class is."""

    name: str
    target: str
    origin: str = "attnswitch"
    #: Whether, on every device, it is chosen only where it was timed (``Standing``): it is not loaded before.
    waits: bool = False


def _installed(name: str, target: str) -> Row:
    """A library that a user may have installed."""
    return Row(name, f"attnswitch.backends.installed.{target}", waits=True)


#: In order of preference, where nothing was measured or forecast: the first that takes a problem is chosen.
#: Those behind ``reference`` are chosen where they were timed (``Standing``).
TABLE = (
    Row("sdpa-cudnn", "attnswitch.backends.sdpa.cudnn:CudnnBackend"),
    Row("sdpa-flash", "attnswitch.backends.sdpa.flash:FlashBackend"),
    Row("sdpa-efficient", "attnswitch.backends.sdpa.efficient:EfficientBackend"),
    Row("triton", "attnswitch.backends.triton.backend:TritonBackend"),
    Row("cuda", "attnswitch.backends.cuda.backend:CudaBackend"),
    Row("sdpa-math", "attnswitch.backends.sdpa.math:MathBackend"),
    Row("tiled", "attnswitch.backends.tiled:TiledBackend"),
    Row("reference", "attnswitch.backends.reference:ReferenceBackend"),
    _installed("torch-varlen", "torch_varlen:TorchVarlenBackend"),
    _installed("torch-flex", "flex:FlexBackend"),
    _installed("flash-attn", "flash2:FlashAttnBackend"),
    _installed("flash-attn-3", "flash3:FlashAttn3Backend"),
    _installed("flash-attn-4", "flash4:FlashAttn4Backend"),
    _installed("xformers", "xformers:XformersBackend"),
    _installed("flashinfer", "flashinfer:FlashInferBackend"),
    _installed("sage", "sage:SageBackend"),
)


@functools.cache
def table() -> tuple[Row, ...]:
    """Every row: plug-ins stand behind the built-in backends; one whose name is taken is listed as ``name@package``."""
    from importlib import metadata  # slow to import

    rows = {row.name: row for row in TABLE}
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        origin = entry.dist.name if entry.dist else "a plug-in"
        name = f"{entry.name}@{origin}" if entry.name in rows else entry.name
        rows[name] = Row(name, entry.value, origin)
    return tuple(rows.values())


def names() -> tuple[str, ...]:
    """Names of all backends, in order of preference."""
    return tuple(row.name for row in table())


def load(name: str) -> Backend | Missing:
    """The backend called ``name``, or at the target ``name``, or why it could not be loaded.

    Raises ``InvalidProblem`` for a name that is neither in the table nor a target.
    """
    return _standing_in.get(name) or _load(name)


#: Backends that stand in for those of their names.
_standing_in: dict[str, Backend | Missing] = {}


@contextlib.contextmanager
def standing_in(name: str, backend: Backend | Missing) -> Iterator[None]:
    """Within the context, ``backend`` is the one called ``name``; plans made before are the caller's to drop."""
    _standing_in[name] = backend
    try:
        yield
    finally:
        del _standing_in[name]


def is_known(name: str) -> bool:
    """Whether asking for ``name`` runs no code that nobody named yet: it is no target, or one that was asked for."""
    return ":" not in name or name in _asked_for or name in _standing_in


def is_function(name: str) -> bool:
    """Whether ``name`` is a target ``FILE.py:FUNCTION`` or ``FILE.py:FUNCTION@LIKE``; the file may not be there."""
    return _FUNCTION.fullmatch(name) is not None


#: The targets that were.
_asked_for: set[str] = set()


def forget() -> None:
    """Read the table, and load every backend, anew."""
    table.cache_clear()
    _load.cache_clear()


@functools.cache
def _load(name: str) -> Backend | Missing:
    row = next((row for row in table() if row.name == name), None)
    if row is None and ":" in name:
        row = Row(name, name, "its name")
        _asked_for.add(name)
    if row is None:
        raise InvalidProblem(f"backend {name!r} is not known; {one_of(name, names(), ', or None to choose')}")
    try:
        backend = _made(row)
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way; the dispatcher carries on without it
        if is_function(row.target) and isinstance(error, InvalidProblem):
            return Missing(str(error))
        return Missing(f"it could not be loaded from {row.origin} ({row.target}): {type(error).__name__}: {error}")
    if not isinstance(backend, Backend):
        return Missing(f"{row.target} from {row.origin} is not a Backend: see attnswitch.machine.backend")
    return backend


def _made(row: Row) -> object:
    """What is at the target of ``row``."""
    if is_function(row.target):
        return import_module(_OF_FUNCTION).backend(row.target)
    module, _, attribute = row.target.partition(":")
    return getattr(import_module(module), attribute)()


def loaded(name: str) -> Backend:
    """The backend called ``name``, which is known to load."""
    backend = load(name)
    assert not isinstance(backend, Missing), backend
    return backend
