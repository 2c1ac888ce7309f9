"""Calls that torch.compile leaves out of its graphs, for the reasons it then gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["backward"]


def _call(function: Callable[..., Any], *given: Any, **said: Any) -> Any:
    """What ``function`` returns, which finds itself in no graph."""
    return function(*given, **said)


backward = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _call,
    reason="sinks_grad=True is of no operator of torch.compile's: compile without fullgraph, or call attention or"
    " attention_varlen with sinks, and let torch differentiate it",
)
