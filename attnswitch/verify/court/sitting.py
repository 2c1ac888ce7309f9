"""Which backends stand before the court, and what was seen of their conduct."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnswitch.machine import registry
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner

__all__ = ["Court", "conduct", "sitting"]


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
def sitting(court: Court, within: Path | None = None) -> Iterator[None]:
    """Within the context the backends of ``court`` are such ones in this process, and none of their code is loaded.

    What they need on disk is ``within`` a folder, if one is given, which outlives this process.
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


def conduct(backend: str) -> str | None:
    """What was seen since this was last asked: "" for nothing, None for a backend that does not stand before it."""
    from attnswitch.verify.court.proxy import Proxy
    from attnswitch.verify.outcome import AUTO

    proxy = None if backend == AUTO else registry.load(backend)
    return proxy.conduct() if isinstance(proxy, Proxy) else None
