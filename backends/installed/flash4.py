"""``flash-attn-4``: FlashAttention-4, by ``flash_attn.cute``; it compiles in Python when it is first called.

None stands for no limit of a window. It returns (out, lse), the latter None where it is not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called
from .flash import dense_or_packed
from .package import Package
from .takes import Takes, sided

__all__ = ["FlashAttn4Backend"]


class FlashAttn4Backend(InstalledBackend):
    """The package flash-attn-4, whose versions are betas: those from the one that was read."""

    name: ClassVar[str] = "flash-attn-4"
    varlen: ClassVar[bool] = True
    sinks: ClassVar[bool] = True
    package: ClassVar[Package] = Package("flash-attn-4", "pip install --pre flash-attn-4", "4.0.0b36", "5")
    takes: ClassVar[Takes] = Takes(
        "flash_attn_func of FlashAttention-4",
        least=(9, 0),
        majors=(9, 10, 11),
        unequal=True,
        varlen=True,
        window=True,
        softcap=True,
        any_scale=False,
        lse=True,
    )

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """Head dimensions of Blackwell, and what its gradients lack there."""
        p = problem
        if device.capability is None or device.capability[0] == 9:
            return
        dims = p.dim_qk, p.dim_v
        if max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            yield f"dim_qk={p.dim_qk}, dim_v={p.dim_v} on {device}: up to 128, or 192 and 128, or 256 and 256"
        if p.softcap and p.grads and dims == (256, 256):
            yield f"softcap={p.softcap} with gradients and head dimension 256: its backward has none"

    def attend(self, problem: Problem, device: Device) -> Attend:
        """One split, so that the forward repeats its bits."""
        p = problem
        dense, packed = called("flash_attn.cute", "flash_attn_func", "flash_attn_varlen_func")

        def beside(inputs: Inputs, stated: bool) -> dict[str, Any]:
            return {
                "softmax_scale": p.softmax_scale,
                "causal": p.causal and not p.sees_all,
                "window_size": sided(p, None),
                "learnable_sink": inputs.sinks,
                "softcap": p.softcap,
                "num_splits": 1,
                "deterministic": p.deterministic,
                "return_lse": stated,
            }

        return dense_or_packed(p, dense, packed, beside)
