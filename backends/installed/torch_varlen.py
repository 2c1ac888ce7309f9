"""``torch-varlen``: ``torch.nn.attention.varlen.varlen_attn``, sequences one after another by torch's own kernels.

The signature is that of torch 2.11 and later; 2.10 has neither scale nor window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called, edges_of, of_rows, rows_of
from .package import Package
from .takes import Takes, right_is_dropped, sided

__all__ = ["TorchVarlenBackend"]


class TorchVarlenBackend(InstalledBackend):
    """FlashAttention-2 as torch builds it, or cuDNN where torch prefers that (from 2.15 on)."""

    name: ClassVar[str] = "torch-varlen"
    varlen: ClassVar[bool] = True
    package: ClassVar[Package] = Package("torch", "pip install 'torch>=2.11'", "2.11")
    takes: ClassVar[Takes] = Takes("varlen_attn", varlen=True, dense=False, window=True, any_scale=False, lse=True)

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """Key heads are shared from torch 2.12 on, where there is a keyword for it."""
        pytorch = device.version("torch")
        if problem.group > 1 and pytorch is not None and pytorch < (2, 12):
            heads = f"{problem.heads_q} query heads, {problem.heads_kv} key heads"
            yield f"{heads}: varlen_attn shares them from torch 2.12 on"
        yield from right_is_dropped(problem)

    def attend(self, problem: Problem, device: Device) -> Attend:
        """``varlen_attn`` with what the problem says; defaults are left out, as versions differ in them."""
        varlen_attn, request = called("torch.nn.attention.varlen", "varlen_attn", "AuxRequest")
        said: dict[str, Any] = {"window_size": sided(problem, -1), "scale": problem.softmax_scale}
        if problem.group > 1:
            said["enable_gqa"] = True

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
            query, key, value = map(rows_of, inputs[:3])
            edges = edges_of(inputs)
            aux = {"return_aux": request(lse=True)} if stated else {}
            found = varlen_attn(query, key, value, *edges, problem.seq_q, problem.seq_k, **said, **aux)
            out, lse = found if stated else (found, None)
            return of_rows(out), None if lse is None else lse[None]

        return attend
