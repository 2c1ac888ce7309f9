"""``sdpa-math``: torch's composite of matrix products and softmax. Takes nearly everything; memory O(Lq * Lk)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from attnswitch.backend import Backend, Inputs, Precision
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
        return _launch


def _launch(problem: Problem, inputs: Inputs, hiding: Hiding) -> tuple[Any, None]:
    # Everything is raised to the accumulator here: the operator does so too, unless a process-wide switch says
    # otherwise; and it would add a bool mask as 0 and 1.
    kind = torch.float64 if problem.dtype == "float64" else torch.float32
    q, k, v = (x.to(kind) for x in inputs[:3])
    out, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
        q,
        k,
        v,
        None if hiding.mask is None else additive(hiding.mask, kind),
        problem.dropout,
        hiding.causal,
        None,
        scale=problem.softmax_scale,
        enable_gqa=problem.group > 1,
    )
    return out.to(inputs.query.dtype), None


_: type[Backend] = MathBackend
