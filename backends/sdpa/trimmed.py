"""Keys past the last query under a causal mask from the top left, on the CPU: none is seen, and none is read.

torch's kernels of the CPU go through them all the same, so that few queries beside many keys take O(Lq Lk).
"""

from __future__ import annotations

from typing import Any

from attnswitch.machine.backend import Backward, Forward, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

__all__ = ["TrimmedKernel", "trimmed"]


def trimmed(problem: Problem, device: Device) -> Problem | None:
    """``problem`` without the keys that no query sees; None where there are none, or anything else hides keys."""
    p = problem
    if device.kind != "cpu" or not p.plainly_causal or p.bottom_right or not 0 < p.seq_q < p.seq_k:
        return None
    if p.mask is not None or p.key_lengths or p.grads or p.dropout:
        return None
    return p.replace(seq_k=p.seq_q)


class TrimmedKernel(Kernel):
    """``kernel`` of the problem that ``trimmed`` gives, for calls with all keys."""

    def __init__(self, kernel: Kernel, keys: int) -> None:
        self.kernel, self.keys = kernel, keys
        self.shows = kernel.shows

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        return self.kernel.forward(self._inputs(inputs))

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """The same, of which torch keeps no graph."""
        return self.kernel.results(self._inputs(inputs))

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
        key, value = (x[:, :, : self.keys] for x in (inputs.key, inputs.value))
        return inputs._replace(key=key, value=value)

    def _around(self, run: Forward) -> Forward:
        def forward(query: Any, key: Any, value: Any, *others: Any) -> tuple[Any, Any]:
            return run(query, key[:, :, : self.keys], value[:, :, : self.keys], *others)

        return forward
