"""``ReshapedKernel``: a kernel of another problem, which takes operands made of a call's, and gives results for it."""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Kernel

__all__ = ["ReshapedKernel"]


class ReshapedKernel(Kernel):
    """``kernel`` of the problem that another comes to, for the calls of that other one."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.shows = kernel.shows

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value as ``kernel`` takes them."""
        return query, key, value

    def given_back(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """Output and lse as the caller expects them."""
        return out, lse

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        return self.given_back(*self.kernel.forward(self.inputs(inputs)))

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """The same, of which torch keeps no graph."""
        return self.given_back(*self.kernel.results(self.inputs(inputs)))

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward`` of what lies like ``inputs``; so do the operands made of it."""
        return self._around(self.kernel.prepared(self.inputs(inputs)))

    def prepared_results(self, inputs: Inputs) -> Forward:
        """The same of ``results``."""
        return self._around(self.kernel.prepared_results(self.inputs(inputs)))

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Never asked for, where a problem with gradients has another kernel."""
        raise NotImplementedError

    def prepared_backward(self, inputs: Inputs) -> Backward:
        """``backward``: nothing could be prepared that is worth it."""
        return self.backward

    def inputs(self, inputs: Inputs) -> Inputs:
        """The same with ``operands``."""
        query, key, value = self.operands(*inputs[:3])
        return inputs._replace(query=query, key=key, value=value)

    def _around(self, run: Forward) -> Forward:
        def forward(query: Any, key: Any, value: Any, *others: Any) -> tuple[Any, Any]:
            return self.given_back(*run(*self.operands(query, key, value), *others))

        return forward
