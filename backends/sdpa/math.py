"""``sdpa-math``: torch's composite of matrix products and softmax. Takes nearly everything; memory O(Lq * Lk)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from attnswitch.machine.backend import Forward, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .arguments import Operator, told
from .base import Launch, SdpaBackend
from .masks import Hiding
from .operands import additive

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

    def raises_mask(self, device: Device) -> bool:
        """Everything is raised."""
        return True

    def launcher(self, problem: Problem, device: Device) -> Launch:
        """The composite itself, not the front door that may choose another."""
        return _launcher(problem)


def _launcher(problem: Problem) -> Launch:
    # A bool mask is made a float mask, as the operator would add it as 0 and 1. The operator raises 16-bit operands to
    # the accumulator's type, unless a process-wide switch says otherwise; but beside a mask of that type they are given
    # so, and where scores are many, which it would round once more for a second result.
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    narrow = problem.dtype not in ("float32", "float64")
    many = problem.seq_q * problem.seq_k > _FEW
    operator: Operator = torch._scaled_dot_product_attention_math
    if problem.group > 1:
        operator = functools.partial(operator, enable_gqa=True)

    def launch(hiding: Hiding) -> Forward:
        mask = None if hiding.mask is None else additive(hiding.mask, kind)
        call = told(operator, problem, hiding.causal)

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, None]:
            if narrow and (many or mask is not None or _narrow_allowed()):
                out, _ = call(query.to(kind), key.to(kind), value.to(kind), mask)
                return out.to(query.dtype), None
            return call(query, key, value, mask)[0], None

        return launched

    return launch
