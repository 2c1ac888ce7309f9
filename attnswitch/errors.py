"""The errors of attnswitch.

    AttnswitchError
    ├── InvalidProblem (ValueError, RuntimeError)  the call makes no sense on any backend
    ├── Unsupported (NotImplementedError)          the call makes sense, and no allowed backend takes it
    ├── BackendUnavailable (ImportError)           the backend asked for cannot run on this machine
    ├── CompileError (RuntimeError)                a backend could not build its kernel
    └── VerificationError (RuntimeError)           the verifier cannot trust its own reference

Every message says, in this order: what was asked, the facts, the cause, the remedy.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AttnswitchError",
    "BackendUnavailable",
    "CompileError",
    "InvalidProblem",
    "Unsupported",
    "VerificationError",
    "out_of_memory",
]


class AttnswitchError(Exception):
    """Base of every error that attnswitch raises on purpose."""


class InvalidProblem(AttnswitchError, ValueError, RuntimeError):
    """The arguments do not describe an attention problem. A ``RuntimeError`` too, as torch's own call mostly raises."""


class _OfPlan(AttnswitchError):
    """One that a plan explains."""

    def __init__(self, message: str, plan: Any = None) -> None:
        super().__init__(message)
        self.plan = plan


class Unsupported(_OfPlan, NotImplementedError):
    """No backend that may be used takes this problem; nothing was launched.

    ``plan`` holds every candidate with its reasons.
    """


class BackendUnavailable(_OfPlan, ImportError):
    """A backend that was named explicitly cannot run on this machine.

    ``plan`` holds it, with the other candidates.
    """


class CompileError(AttnswitchError, RuntimeError):
    """A backend failed to build the kernel for a problem it said it takes."""


class VerificationError(AttnswitchError, RuntimeError):
    """The verifier failed itself, so that no verdict can be given: its references disagree, or a worker was lost."""


#: What drivers say, and torch on the CPU.
_OF_MEMORY = "out of memory", "can't allocate memory", "not enough memory"


def out_of_memory(error: Exception) -> bool:
    """Whether ``error``, of any library, is the machine's want of memory, which they tell in different ways."""
    told = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    text = str(error).lower().replace("_", " ")
    return told or (isinstance(error, RuntimeError) and any(words in text for words in _OF_MEMORY))
