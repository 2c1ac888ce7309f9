"""``xformers``: ``xformers.ops.memory_efficient_attention``, which chooses among FlashAttention and CUTLASS itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called, turned
from .package import Package
from .takes import HALF, Takes

__all__ = ["XformersBackend"]


class XformersBackend(InstalledBackend):
    """The package xformers: full attention, or causal from the first or from the last query and key."""

    name: ClassVar[str] = "xformers"
    package: ClassVar[Package] = Package("xformers", "pip install 'xformers>=0.0.35'", "0.0.35")
    takes: ClassVar[Takes] = Takes(
        "memory_efficient_attention", dtypes=(*HALF, "float32"), dropout=True, any_scale=False, grouped_grads=False
    )

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """It has a class for either way of counting positions."""
        p = problem
        if p.causal and p.bottom_right and p.seq_q > p.seq_k:
            yield f"{p.seq_q} queries, {p.seq_k} keys from the bottom right: what rows that see nothing get is not said"
        said = p.replace(alignment="bottom_right") if p.causal else p
        yield from super().reasons(said, device)

    def attend(self, problem: Problem, device: Device) -> Attend:
        """The bias is a class of the library: nothing is materialised."""
        p = problem
        (attention,) = called("xformers.ops", "memory_efficient_attention")
        bias = None
        if p.causal and not p.sees_all:
            name = "LowerTriangularMask" if p.plainly_causal else "LowerTriangularFromBottomRightMask"
            (kind,) = called("xformers.ops.fmha.attn_bias", name)
            bias = kind()

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, None]:
            query, key, value = map(turned, inputs[:3])
            if p.group > 1:  # (B, L, Hkv, group, D), key heads expanded and not copied
                query = query.unflatten(2, (p.heads_kv, p.group))
                key, value = (x[:, :, :, None].expand(-1, -1, -1, p.group, -1) for x in (key, value))
            out = attention(query, key, value, attn_bias=bias, p=p.dropout, scale=p.softmax_scale)
            return turned(out.flatten(2, 3) if p.group > 1 else out), None

        return attend
