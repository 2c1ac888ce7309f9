"""Memory for a case: whether its operands fit here, and whether a kernel that found none had room."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from attnswitch.verify.drawing.case import Case

__all__ = ["had", "lacking"]

#: How often a case's operands are in memory at once: as float64, as the caller's, in the reference and its rounding.
_COPIES = 4
#: A kernel that wants more bytes than this may do without being doubted.
_DOUBTED = 2**28


def lacking(case: Case) -> str:
    """Why the operands of ``case`` cannot be made in the memory of this machine; "" if they can."""
    memory = _pages("SC_PHYS_PAGES")
    needed = _COPIES * case.operand_bytes
    if memory is None or needed <= memory:
        return ""
    gib = f"{needed / 2**30:,.0f} GiB as float64, and this machine has {memory / 2**30:,.0f}"
    return f"out of memory: its operands need {gib}"


def had(case: Case, device: str) -> str:
    """What can be had on ``device`` and is enough for a small ``case``; "" if it is not small, or that cannot be had.

    Enough are all operands, and the scores of every query and key beside them, in float64 and several times.
    """
    needed = _COPIES * (case.operand_bytes + 8 * math.prod(case.scores))
    if needed > _DOUBTED or not _allocates(needed, device):
        return ""
    return f"{max(1, needed >> 20):,} MiB could be had on {device} then, and hold operands and scores {_COPIES} times"


def _allocates(size: int, device: str) -> bool:
    """Whether there are so many bytes; nothing of it is kept."""
    if device == "cpu":
        free = _pages("SC_AVPHYS_PAGES")
        try:
            bytearray(size)
        except MemoryError:
            return False
        return free is None or size <= free
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    free, whole = torch.cuda.mem_get_info(device)
    return bool(size <= free and 2 * free >= whole)  # else a kernel's own room may not be there


def _pages(kind: str) -> int | None:
    """Bytes of memory, all of it or what is free; None where the system does not say."""
    try:
        return os.sysconf(kind) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
