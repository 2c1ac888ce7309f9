"""Query heads that share a key head as queries of it, on the CPU where each has one query: keys are then read once.

torch's kernel of the CPU reads keys and values once for each query head, and its composite repeats them in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnswitch.machine.backend import Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .reshaped import ReshapedKernel

__all__ = ["GroupedKernel", "grouped"]


def grouped(problem: Problem, device: Device) -> Problem | None:
    """``problem`` with query heads as queries, (B, Hkv, group, D); None where that is another problem, or none.

    Nothing may hide keys but lengths and a mask that all heads share: the one query stands where the last key does.
    """
    p = problem
    if device.kind != "cpu" or p.seq_q != 1 or p.group == 1 or p.grads or p.dropout or p.window is not None:
        return None
    if (p.causal and not p.bottom_right) or (p.mask is not None and "h" in p.mask.axes) or not p.batch * p.seq_k:
        return None
    mask = None if p.mask is None else replace(p.mask, axes=p.mask.axes.replace("q", ""))
    return p.replace(heads_q=p.heads_kv, seq_q=p.group, causal=False, alignment="top_left", mask=mask)


class GroupedKernel(ReshapedKernel):
    """The kernel of the problem that ``grouped`` gives, for the calls of ``problem``."""

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        super().__init__(kernel)
        self.problem = problem

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query (B, Hq, 1, D) as (B, Hkv, group, D), in the same memory."""
        return query.squeeze(2).unflatten(1, (self.problem.heads_kv, self.problem.group)), key, value

    def given_back(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """(B, Hkv, group, ...) as (B, Hq, 1, ...)."""
        return out.flatten(1, 2).unsqueeze(2), None if lse is None else lse.flatten(1, 2).unsqueeze(2)
