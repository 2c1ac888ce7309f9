"""``sage``: SageAttention, whose scores are products of 8-bit numbers. Approximate: it runs where it is named alone.

It takes the mean of the keys out of them in place, so it is given a copy of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called
from .package import Package
from .takes import Takes

__all__ = ["SageBackend"]


class SageBackend(InstalledBackend):
    """The package sageattention, 1.x by Triton and 2.x by CUDA: what both take."""

    name: ClassVar[str] = "sage"
    approximate: ClassVar[bool] = True
    package: ClassVar[Package] = Package("sageattention", "pip install sageattention", "1.0.6", "3")
    takes: ClassVar[Takes] = Takes("sageattn", dims=(64, 128), any_scale=False, bottom_right=False, grads=False)

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """Causal where there are as many queries as keys."""
        p = problem
        if p.causal and not p.sees_all and p.seq_q != p.seq_k:
            yield f"causal with {p.seq_q} queries, {p.seq_k} keys: sageattn wants as many of one as of the other"

    def attend(self, problem: Problem, device: Device) -> Attend:
        """``sageattn`` on heads first."""
        p = problem
        (sageattn,) = called("sageattention", "sageattn")
        causal = p.causal and not p.sees_all

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, None]:
            out = sageattn(
                inputs.query,
                inputs.key.clone(),
                inputs.value,
                tensor_layout="HND",
                is_causal=causal,
                sm_scale=p.softmax_scale,
            )
            return out, None

        return attend
