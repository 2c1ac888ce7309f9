"""``sdpa-math``: torch's composite of matrix products and softmax. Takes nearly everything; memory O(Lq * Lk)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Forward, Inputs, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from . import memory
from .arguments import Operator, told
from .backward import Given, composite, log_sum
from .base import Compose, Launch, SdpaBackend, comes_to
from .masks import Hiding, added

__all__ = ["MathBackend"]

#: Scores of a head that cost less than raising and rounding by calls of their own.
_FEW = 2**14
#: Whether the operator may compute in a 16-bit type.
_narrow_allowed: Callable[[], bool] = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed


class MathBackend(SdpaBackend):
    """torch's reference composite, on any device torch has."""

    name: ClassVar[str] = "sdpa-math"
    on_cpu: ClassVar[bool] = True
    has_lse: ClassVar[bool] = False

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """It computes by large library calls, whatever the sizes."""
        if problem.deterministic and device.kind == "cuda":
            yield "deterministic=True: cuBLAS repeats its bits only under CUBLAS_WORKSPACE_CONFIG, read at start"

    def precision(self, problem: Problem, device: Device) -> Precision:
        """16-bit operands are raised to float32 first and the result rounded once."""
        return Precision(accumulator="float64" if problem.dtype == "float64" else "float32")

    def composer(self, problem: Problem, device: Device) -> Compose:
        """Everything is raised to the accumulator's type. A bool mask as it came the operator would add as 0 and 1."""
        return functools.partial(added, problem, (_wide(problem),))

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """The scores and the weights."""
        return memory.with_scores(comes_to(problem, device))

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The composite itself, not the front door that may choose another."""
        return _launcher(problem)

    def lse(self, problem: Problem, inputs: Inputs) -> Any:
        """The log of the sum, from scores of its own."""
        return log_sum(problem, _hiding(problem, inputs), inputs)

    def gradients(self, problem: Problem, device: Device, given: Given) -> tuple[Any, ...]:
        """The formula: the composite has no backward of its own."""
        mask = given.hiding.mask
        if given.hiding.causal:
            mask = _hiding(problem, Inputs(*given[:3])).mask
        return composite(problem, mask, given)


def _hiding(problem: Problem, inputs: Inputs) -> Hiding:
    """All that hides as a mask to add, plain causal included."""
    if problem.plainly_causal and not problem.sees_all:
        problem = problem.replace(window=(None, 0))
    return added(problem, (_wide(problem),), inputs, lifted=True)


def _wide(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.dtype == "float64" else torch.float32


def _launcher(problem: Problem) -> Launch:
    # The operator raises 16-bit operands to the accumulator's type, unless a process-wide switch says otherwise; but
    # beside a mask of that type they are given so, and where scores are many, which it would round once more for a
    # second result.
    kind = _wide(problem)
    narrow = problem.dtype not in ("float32", "float64")
    many = problem.seq_q * problem.seq_k > _FEW
    operator: Operator = torch._scaled_dot_product_attention_math
    if problem.group > 1:
        operator = functools.partial(operator, enable_gqa=True)

    def launch(hiding: Hiding) -> Forward:
        mask = hiding.mask
        call = told(operator, problem, hiding.causal)

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, None]:
            if narrow and (many or mask is not None or _narrow_allowed()):
                out, _ = call(query.to(kind), key.to(kind), value.to(kind), mask)
                return out.to(query.dtype), None
            return call(query, key, value, mask)[0], None

        return launched

    return launch
