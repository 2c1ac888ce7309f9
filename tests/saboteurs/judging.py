"""What the court tells of the hostile kernels, in this process or in one where it begins as a fork."""

from __future__ import annotations

import re
import time
from pathlib import Path

from attnswitch.verify import Case
from attnswitch.verify.court import Court, begun, sitting
from attnswitch.verify.judge import examine

__all__ = ["CASES", "outlived", "told", "told_by_a_fork"]

#: Two of one shape and other data, and one with gradients.
CASES = (
    Case(seq_q=5, seq_k=7, heads_kv=2, library="numpy", data_seed=1),
    Case(seq_q=5, seq_k=7, heads_kv=2, library="numpy", data_seed=2, check="linearity"),
    Case(seq_q=5, seq_k=7, heads_kv=2, library="numpy", data_seed=3, grads="qkv", lse=True),
)


def told(name: str, until: str, forbidden: bool = False) -> list[str]:
    """What is found wrong with a kernel of the gallery, a sentence a case, up to one that begins with ``until``."""
    target, found = f"hostile:{name}", list[str]()
    with sitting(Court((target,), timeout=4.0, forbidden=forbidden)):
        for case in CASES:
            (outcome,) = examine(case, (target,))
            failure = outcome.failure
            found.append(f"{failure.check}: {failure.message}" if failure else f"{outcome.verdict}: {outcome.reasons}")
            if re.match(until, found[-1]):
                break
    return found


def told_by_a_fork(name: str, until: str, forbidden: bool) -> list[str]:
    """The same of a candidate that is a fork of a fork of this process, which has torch, as a worker's is."""
    import torch  # noqa: F401

    with begun(Court((f"hostile:{name}",))):
        return told(name, until, forbidden)


def outlived(mark: str) -> list[Path]:
    """Environments with ``mark`` of processes that still run in five seconds: [] as soon as there is none."""
    ends = time.monotonic() + 5.0
    while alive := [entry for entry in Path("/proc").glob("[0-9]*/environ") if mark.encode() in _content(entry)]:
        if time.monotonic() > ends:
            break
        time.sleep(0.05)
    return alive


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended, or is another user's
        return b""
