"""Which backends stand before the court, and what was seen of their conduct."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnswitch.child import hidden
from attnswitch.machine import registry
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner

if TYPE_CHECKING:
    from attnswitch.verify.court.proxy import Proxy

__all__ = ["Court", "begun", "conduct", "meanwhile", "replayed", "seated", "sitting"]


@dataclass(frozen=True, slots=True)
class Court:
    """``backends`` have their kernels run in processes of their own, which are given ``timeout`` seconds for a call.

    ``forbidden``: that they call torch's own attention or matrix products is a finding. It sits on the CPU, and
    ``everywhere`` if it was asked for.
    """

    backends: tuple[str, ...] = ()
    timeout: float = 120.0
    forbidden: bool = False
    everywhere: bool = False

    def on(self, device: str) -> Court:
        """The court as it sits on ``device``."""
        return self if self.everywhere or device == "cpu" else Court()


@contextlib.contextmanager
def begun(court: Court, within: Path | None = None) -> Iterator[None]:
    """Within the context the processes of ``court`` are there, as forks of this one: with torch, if it has it.

    It has no threads yet, is told later what to try, was started with the variables of ``server.PLACE``, and starts no
    other processes that stay. They cannot read its memory from now on.
    """
    if not court.backends:
        yield
        return
    from attnswitch.verify.court import server

    with server.kept(alone=True):
        for _ in court.backends:
            server.begin(within)
        with hidden():
            yield


@contextlib.contextmanager
def sitting(court: Court, within: Path | None = None) -> Iterator[None]:
    """Within the context the backends of ``court`` are such ones in this process, and none of their code is loaded.

    What they need on disk is ``within`` a folder, if one is given, which outlives this process. Until a kernel of ours
    runs, its process has not loaded torch, unless it has ``begun``.
    """
    if not court.backends:
        yield
        return
    from attnswitch.verify.court.proxy import Proxy

    with contextlib.ExitStack() as stack:
        for name in court.backends:
            proxy = Proxy(name, court.timeout, court.forbidden, within)
            stack.callback(proxy.end)
            stack.enter_context(registry.standing_in(name, Missing(proxy.missing) if proxy.missing else proxy))
        planner.forget()
        try:
            yield
        finally:
            planner.forget()


def seated(backend: str) -> bool:
    """Whether the kernels of ``backend`` run in a process of their own."""
    return _proxy(backend) is not None


@contextlib.contextmanager
def meanwhile(backend: str, work: Callable[[], object]) -> Iterator[None]:
    """Within the context ``work`` is done while the first kernel of ``backend`` runs, if it stands before the court.

    What it raises comes of it again where its result is needed.
    """
    proxy = _proxy(backend)
    if proxy is None:
        yield
        return

    def tried() -> None:
        with contextlib.suppress(Exception):
            work()

    proxy.meanwhile = tried
    try:
        yield
    finally:
        proxy.meanwhile = None


@contextlib.contextmanager
def replayed(backend: str) -> Iterator[Callable[[], None]]:
    """Within the context the kernels of ``backend``, which stands before the court, are captured in CUDA graphs.

    Calls come as ever until what is yielded is called. From then on each is the replay of the graph of one before, in
    turn, with its own numbers in the same memory.
    """
    proxy = _proxy(backend)
    assert proxy is not None
    from attnswitch.verify.court.proxy import Captured

    proxy.captured = captured = Captured()
    try:
        yield captured.replay
    finally:
        proxy.captured = None


def conduct(backend: str) -> str | None:
    """What was seen since this was last asked: "" for nothing, None for a backend that does not stand before it."""
    proxy = _proxy(backend)
    return None if proxy is None else proxy.conduct()


def _proxy(backend: str) -> Proxy | None:
    from attnswitch.verify.court.proxy import Proxy
    from attnswitch.verify.outcome import AUTO

    proxy = None if backend == AUTO else registry.load(backend)
    return proxy if isinstance(proxy, Proxy) else None
