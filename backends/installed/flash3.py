"""``flash-attn-3``: FlashAttention-3 for Hopper, by ``flash_attn_func`` and ``flash_attn_varlen_func``.

Its module is ``flash_attn_interface``, beside or in the package. Builds of before autumn 2025 return the lse always,
later ones where ``return_attn_probs`` is set: the signature tells.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from attnswitch.errors import CompileError
from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called
from .flash import dense_or_packed
from .package import Package
from .takes import Takes, sided

__all__ = ["FlashAttn3Backend"]

_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_SOURCE = "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"
_NAMES = ("flash_attn_func", "flash_attn_varlen_func")


class FlashAttn3Backend(InstalledBackend):
    """The package flash_attn_3. Its 8-bit types are none of a problem's."""

    name: ClassVar[str] = "flash-attn-3"
    varlen: ClassVar[bool] = True
    package: ClassVar[Package] = Package(
        "flash_attn_3", f"pip install --no-build-isolation '{_SOURCE}'", "3.0.0b1", "4"
    )
    takes: ClassVar[Takes] = Takes(
        "flash_attn_func of FlashAttention-3",
        least=(9, 0),
        majors=(9,),
        varlen=True,
        window=True,
        softcap=True,
        any_scale=False,
        lse=True,
    )

    def attend(self, problem: Problem, device: Device) -> Attend:
        """One split, so that the forward repeats its bits."""
        p = problem
        dense, packed = _interface()
        tells = "return_attn_probs" in inspect.signature(dense).parameters

        def beside(inputs: Inputs, stated: bool) -> dict[str, Any]:
            said = {
                "softmax_scale": p.softmax_scale,
                "causal": p.causal and not p.sees_all,
                "window_size": sided(p, -1),
                "softcap": p.softcap,
                "num_splits": 1,
                "deterministic": p.deterministic,
            }
            return {**said, "return_attn_probs": stated} if tells else said

        return dense_or_packed(p, dense, packed, beside)


def _interface() -> list[Any]:
    try:
        return called(_MODULES[0], *_NAMES)
    except CompileError as error:
        try:
            return called(_MODULES[1], *_NAMES)
        except CompileError:
            raise error from None
