"""Query heads that share a key head as queries of it, on the CPU where each has one query: keys are then read once.

torch's kernel of the CPU reads keys and values once for each query head, and its composite repeats them in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

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


class GroupedKernel(Kernel):
    """``kernel`` of the problem that ``grouped`` gives, for the calls of ``problem``."""

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        self.shows = kernel.shows

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse, with each head's one query."""
        return _heads(self.kernel.forward(self._inputs(inputs)))

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """The same, of which torch keeps no graph."""
        return _heads(self.kernel.results(self._inputs(inputs)))

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward`` of what lies like ``inputs``."""
        return self._around(self.kernel.prepared(self._inputs(inputs)))

    def prepared_results(self, inputs: Inputs) -> Forward:
        """The same of ``results``."""
        return self._around(self.kernel.prepared_results(self._inputs(inputs)))

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Never asked for: a problem with gradients has another kernel."""
        raise NotImplementedError

    def prepared_backward(self, inputs: Inputs) -> Backward:
        """As above."""
        return self.backward

    def _inputs(self, inputs: Inputs) -> Inputs:
        return inputs._replace(query=self._queries(inputs.query))

    def _queries(self, query: Any) -> Any:
        """(B, Hq, 1, D) as (B, Hkv, group, D), in the same memory."""
        return query.squeeze(2).unflatten(1, (self.problem.heads_kv, self.problem.group))

    def _around(self, run: Forward) -> Forward:
        def forward(query: Any, *others: Any) -> tuple[Any, Any]:
            return _heads(run(self._queries(query), *others))

        return forward


def _heads(results: tuple[Any, Any]) -> tuple[Any, Any]:
    """(B, Hkv, group, ...) as (B, Hq, 1, ...)."""
    out, lse = results
    return out.flatten(1, 2).unsqueeze(2), None if lse is None else lse.flatten(1, 2).unsqueeze(2)
