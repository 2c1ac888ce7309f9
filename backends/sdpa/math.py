"""``sdpa-math``: torch's composite of matrix products and softmax. Takes nearly everything; memory O(Lq * Lk)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from attnswitch.backend import Backend, Precision, Prepared
from attnswitch.device import Device
from attnswitch.problem import Problem

from .base import Launch, SdpaBackend
from .masks import Hiding
from .operands import additive

__all__ = ["MathBackend"]


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
    # Everything is raised to the accumulator here: the operator does so too, unless a process-wide switch says
    # otherwise; and it would add a bool mask as 0 and 1.
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    raised = problem.dtype not in ("float32", "float64")
    operator, dropout, scale = torch._scaled_dot_product_attention_math, problem.dropout, problem.softmax_scale
    grouped = problem.group > 1

    def launch(hiding: Hiding) -> Prepared:
        mask, causal = None if hiding.mask is None else additive(hiding.mask, kind), hiding.causal

        def launched(query: Any, key: Any, value: Any) -> tuple[Any, None]:
            q, k, v = (query.to(kind), key.to(kind), value.to(kind)) if raised else (query, key, value)
            out, _ = operator(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
            return (out.to(query.dtype) if raised else out), None

        return launched

    return launch


_: type[Backend] = MathBackend
