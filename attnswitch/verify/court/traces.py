"""What kernels leave behind in the process that they run in: patched functions, changed state, threads, timers.

A kernel that means harm can hide from what looks from within its own process; ``processes`` looks from outside. What is
told here explains a verdict and adds to it: the numbers are judged elsewhere.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import operator
import os
import random
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["Traces", "aten"]

#: Modules whose functions a kernel has no business to replace.
_WATCHED = (
    "builtins",
    "gc",
    "json",
    "math",
    "os",
    "random",
    "threading",
    "time",
    "numpy",
    "numpy.linalg",
    "numpy.random",
    "torch",
    "torch.Tensor",
    "torch.autograd",
    "torch.cuda",
    "torch.linalg",
    "torch.nn.functional",
    "attnswitch",
    "attnswitch.verify.court.candidate",
    "attnswitch.verify.court.messages",
    "attnswitch.verify.court.wire",
)


class Traces:
    """What there is before a kernel's code is loaded; ``look`` says what is different since the last look."""

    def __init__(self) -> None:
        self._functions = {name: _functions(name) for name in _WATCHED}
        self._hiding = {name: _hiding(_contents(name)) for name in _WATCHED}
        self._stamps = {name: _stamp(name) for name in _WATCHED}
        self._state = _state()

    def look(self, draws: bool, *, ordered: Callable[..., list[str]] = sorted) -> list[str]:
        """A sentence for each change. A call that ``draws`` numbers may move torch's generator.

        ``ordered`` is bound before kernels run, which may replace what is looked up.
        """
        told = []
        for name, before in self._functions.items():
            if _unchanged(self._stamps[name], _dicts(name)):
                continue
            now = _contents(name)
            hiding = _hiding(now)
            added = hiding - self._hiding[name] if before else ()  # else it was imported only now
            moved = (key for key, value in before.items() if not _is_still(value, now.get(key)))
            patched = ordered(added) + ordered(moved)
            told += [f"it replaced {name}.{key}" for key in patched[:3]]
            self._functions[name], self._hiding[name] = _functions(name), hiding
            self._stamps[name] = _stamp(name)
        state = _state()
        told += [
            f"it changed {what}: {_short(self._state[what])} became {_short(value)}"
            if what not in _LONG
            else f"it changed {what}"
            for what, value in state.items()
            if value != self._state[what] and not (draws and what in _DRAWN)
        ]
        self._state = state
        told += [f"it left a thread running: {name}" for name in _threads()]
        return told


#: Functions that a module has without a name of its own for them: given one, it means another function by it.
_BUILTINS = frozenset(name for name, value in vars(builtins).items() if callable(value) and name[0] != "_")


def _hiding(contents: Mapping[str, Any]) -> Set[str]:
    return _BUILTINS & contents.keys()


def _contents(name: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for each in _dicts(name):  # an operator of its own hides one that it inherits
        found.update(each)
    return found


def _dicts(name: str) -> list[Mapping[str, Any]]:
    """Where the names of a module are, or of a class and those that it inherits from, which come first."""
    owner: Any = sys.modules.get(name)
    if owner is None and name == "torch.Tensor":
        owner = getattr(sys.modules.get("torch"), "Tensor", None)
    if not isinstance(owner, type):
        return [] if owner is None else [vars(owner)]
    return [vars(base) for base in reversed(owner.__mro__)]


def _functions(name: str) -> dict[str, Any]:
    found = _contents(name)
    return {key: value for key, value in found.items() if callable(value) and not isinstance(value, ModuleType)}


#: The names of each dictionary and what they stand for, in their order.
_Stamp = list[tuple[list[str], list[Any]]]


def _stamp(name: str) -> _Stamp:
    return [(list(each), list(each.values())) for each in _dicts(name)]


def _unchanged(
    before: _Stamp,
    now: list[Mapping[str, Any]],
    *,
    every: Callable[..., bool] = all,  # bound here: a kernel may replace what is looked up
    each: Callable[..., Any] = map,
    same: Callable[..., bool] = operator.is_,
    count: Callable[..., int] = len,
    listed: Callable[..., Any] = list,
    pairs: Callable[..., Any] = zip,
) -> bool:
    """Whether the same names are there in the same order, and each stands for the very same object.

    Nothing is looked up, which is several times as fast as to say what is different.
    """
    if count(before) != count(now):
        return False
    for (names, values), found in pairs(before, now):
        if names != listed(found) or not every(each(same, values, found.values())):
            return False
    return True


def _is_still(before: Any, now: Any) -> bool:
    """Whether a name stands for the function that it did, or for torch's own call of it.

    That call is what ``torch._dynamo`` replaces functions by as it is imported, for a kernel that torch compiles.
    """
    if now is before:
        return True
    wrap = getattr(sys.modules.get("torch"), "_disable_dynamo", None)
    wrapped = wrap is not None and getattr(now, "__code__", None) is wrap(before).__code__
    return wrapped and any(cell.cell_contents is before for cell in now.__closure__)


_DRAWN = ("torch's random state",)
_LONG = ("torch's random state", "NumPy's random state", "Python's random state", "the handlers of signals")


def _state() -> dict[str, Any]:
    found: dict[str, Any] = {
        "the current folder": _folder(),
        "the umask": f"{_umask():03o}",
        "NumPy's handling of errors": np.geterr(),
        "NumPy's random state": _numbers(np.random.get_state()),
        "Python's random state": random.getstate(),
        "the limit of recursion": sys.getrecursionlimit(),
        "the collection of garbage": gc.isenabled(),
        "the profiler of Python": sys.getprofile(),
        "the tracer of Python": sys.gettrace(),
        "the handlers of signals": {n: signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD)},
        "the descriptors 0 to 2": tuple(map(_is_open, range(3))),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found |= {
            "torch's default dtype": torch.get_default_dtype(),
            "torch's default device": torch.get_default_device(),
            "whether torch takes gradients": torch.is_grad_enabled(),
            "torch's inference mode": torch.is_inference_mode_enabled(),
            "torch's autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
            "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "torch's precision of float32 products": torch.get_float32_matmul_precision(),
            "torch's TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
            "torch's threads": torch.get_num_threads(),
            "torch's flushing of denormals": _flushes(),
            "torch's choice of attention": (
                torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.cuda.mem_efficient_sdp_enabled(),
                torch.backends.cuda.math_sdp_enabled(),
            ),
            "torch's random state": torch.get_rng_state().numpy().tobytes(),
        }
    return found


def _numbers(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "none"


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flushes() -> bool:
    """Whether numbers below the normal ones become 0, which is a mode of the CPU."""
    return bool(np.float32(1e-40) * np.float32(1.0) == 0)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _threads() -> Iterator[str]:
    """Threads of Python that run code which belongs to no installed library, or are going to: timers."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        files, frame = set[str](), top
        while ident != threading.get_ident() and frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back  # type: ignore[assignment]
        thread = threads.get(ident)
        if isinstance(thread, threading.Timer) or not all(map(_installed, files)):
            yield "one without a name" if thread is None else thread.name


_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).parents[2])


def _installed(file: str) -> bool:
    return file.startswith((*_LIBRARIES, _PACKAGE, "<frozen"))


@contextlib.contextmanager
def aten(forbidden: bool) -> Iterator[Callable[[], list[str]]]:
    """Within the context, note which of torch's own products and attentions run in this thread, if ``forbidden``."""
    torch: Any = sys.modules.get("torch")
    if not forbidden or torch is None:
        yield list
        return
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    seen: dict[str, None] = {}

    class Noting(mode):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.name())
            if _forbids(name):
                seen[name] = None
            return func(*args, **(kwargs or {}))

    with Noting():
        yield lambda: [f"it calls torch's own {name}, which is forbidden" for name in seen]


def _forbids(name: str) -> bool:
    library, _, overload = name.partition("::")
    operator = overload.partition(".")[0].rstrip("_")  # one that ends in _ writes to its first operand
    of_matrices = operator in _PRODUCTS or operator.endswith(("mm", "mv")) or "conv" in operator
    return library == "aten" and ("attention" in operator or of_matrices)


_PRODUCTS = frozenset(
    (
        "_addmm_activation",
        "_trilinear",
        "addr",
        "bilinear",
        "dot",
        "linear",
        "matmul",
        "mkldnn_linear",
        "vdot",
    )
)
