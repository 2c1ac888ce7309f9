"""Problem definitions of others, read as requirements: ``.json`` of FlashInfer-Bench, ``.py`` of KernelBench."""

from __future__ import annotations

from pathlib import Path

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.verify.demands import flashinfer_bench, kernelbench
from attnswitch.verify.demands.requirement import Requirement

__all__ = ["is_meant", "read"]

_MOST = 2**20


def is_meant(text: str) -> bool:
    """Whether ``text`` is the name of such a file, and no words."""
    return text.endswith((".json", ".py"))


def read(path: Path) -> Requirement:
    """The requirement that the file at ``path`` is. Raises ``InvalidProblem``, which names the file."""
    try:
        content = reading.content(path, _MOST)
        if path.suffix == ".json":
            return flashinfer_bench.requirement(reading.parse(content, _MOST))
        return kernelbench.requirement(content.decode())
    except OSError as error:
        raise InvalidProblem(f"{path}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidProblem(f"{path}: it is not text in UTF-8") from None
    except RecursionError:
        raise InvalidProblem(f"{path}: it is nested too deep to be read") from None
    except InvalidProblem as error:
        raise InvalidProblem(f"{path}: {error}") from None
