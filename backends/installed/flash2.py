"""``flash-attn``: FlashAttention-2, by ``flash_attn_func`` and ``flash_attn_varlen_func``.

From 2.1 on positions count from the last query and key, from 2.6 on there is a softcap, and from 2.7 on the lse of
sequences one after another is (H, T). Windows are inclusive, -1 for no limit.
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
from .takes import Takes, right_is_dropped, sided

__all__ = ["FlashAttnBackend"]


class FlashAttnBackend(InstalledBackend):
    """The package flash-attn. ALiBi without gradients of the slopes, dropout by its own generator."""

    name: ClassVar[str] = "flash-attn"
    varlen: ClassVar[bool] = True
    alibi: ClassVar[bool] = True
    package: ClassVar[Package] = Package(
        "flash-attn", "pip install 'flash-attn>=2.7,<3' --no-build-isolation", "2.7", "3"
    )
    takes: ClassVar[Takes] = Takes(
        "flash_attn_func",
        majors=(8, 9),
        varlen=True,
        window=True,
        softcap=True,
        dropout=True,
        any_scale=False,
        deterministic=True,
        lse=True,
    )

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """What the library refuses, or takes for something else."""
        p = problem
        if p.softcap and p.dropout:
            yield f"softcap={p.softcap} with dropout_p={p.dropout}: flash_attn_func has one or the other"
        small = device.capability in ((8, 6), (8, 9))
        if p.grads and small and p.dim_qk > 192 and p.dropout:
            yield f"gradients with head dimension {p.dim_qk} and dropout: no tile fits the memory of {device.name}"
        if p.alibi and p.lse and p.reach[1] == 0:
            lse = "flash_attn_func has it off by slope times position"
            yield f"return_lse with alibi_slopes under a causal mask: {lse}"
        yield from right_is_dropped(p)

    def attend(self, problem: Problem, device: Device) -> Attend:
        """Both calls return (out, lse, ...) where ``return_attn_probs`` is set; the weights come with dropout alone."""
        dense, packed = called("flash_attn", "flash_attn_func", "flash_attn_varlen_func")
        p = problem

        def beside(inputs: Inputs, stated: bool) -> dict[str, Any]:
            return {
                "dropout_p": p.dropout,
                "softmax_scale": p.softmax_scale,
                "causal": p.causal and not p.sees_all,
                "window_size": sided(p, -1),
                "softcap": p.softcap,
                "alibi_slopes": _slopes(p, inputs),
                "deterministic": p.deterministic,
                "return_attn_probs": stated,
            }

        return dense_or_packed(p, dense, packed, beside)


def _slopes(problem: Problem, inputs: Inputs) -> Any:
    """(Hq,) or (B, Hq), float32."""
    slopes = inputs.alibi_slopes
    if slopes is None:
        return None
    return slopes[0].contiguous() if slopes.shape[0] == 1 else slopes.contiguous()
