"""Kernels compiled side by side: compilers let go of Python's lock, or are processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

__all__ = ["Build", "cores", "side_by_side"]

#: Compiles one kernel, from any thread, and keeps it where the call that needs it will look.
Build = Callable[[], object]


def cores() -> int:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # where a process cannot be held to some
        return os.cpu_count() or 1


def side_by_side(builds: Iterable[Build]) -> None:
    """Carry out ``builds``, as many at a time as there are cores, until all are done.

    What fails is left to the call that needs it, which fails alike and tells why. One build alone is left to it too.
    """
    every = list(builds)
    if len(every) < 2:
        return
    from concurrent.futures import ThreadPoolExecutor  # with logging, a tenth of the import of attnswitch

    with ThreadPoolExecutor(min(len(every), cores()), "attnswitch-build") as pool:
        for future in [pool.submit(build) for build in every]:
            future.exception()
