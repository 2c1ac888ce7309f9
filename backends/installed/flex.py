"""``torch-flex``: ``torch.nn.attention.flex_attention``, compiled for each shape; what hides is a block mask.

Compiled calls of torch 2.7 to 2.9 are silently wrong for some masks (pytorch#163588, #158212, #153799).
The block mask of positions alone is made once; what depends on lengths or on a bool mask is made in each call.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from attnswitch.errors import CompileError
from attnswitch.machine.backend import Inputs, Precision, Standing
from attnswitch.machine.device import Device
from attnswitch.problem import Problem, cost

from ..own.through_torch import with_sign, without_padding
from . import mods, takes
from .base import Attend, InstalledBackend, called
from .package import Package
from .takes import HALF, Takes

__all__ = ["FlexBackend"]

_MODULE = "torch.nn.attention.flex_attention"
#: What torch raises where it cannot compile.
_NOT_COMPILED = ("InductorError", "BackendCompilerFailed")
#: Numbers the code objects: Dynamo counts what it compiles by code, and one problem must not use up another's limit.
_numbers = itertools.count()


class FlexBackend(InstalledBackend):
    """What Inductor makes of scores and masks as functions. It compiles for seconds, so it is tried when asked for."""

    name: ClassVar[str] = "torch-flex"
    alibi: ClassVar[bool] = True
    builds_per_shape: ClassVar[bool] = True
    package: ClassVar[Package] = Package("torch", "pip install 'torch>=2.10'", "2.10")
    takes: ClassVar[Takes] = Takes(
        "flex_attention",
        dtypes=(*HALF, "float32"),
        step=1,
        unequal=True,
        window=True,
        softcap=True,
        deterministic=True,
        lse=True,
        lse_grads=True,
    )

    def unavailable(self) -> str | None:
        """What is not installed; or for want of a GPU and of a C++ compiler."""
        if missing := self.package.missing():
            return missing
        compiler = os.environ.get("CXX") or "g++"
        if shutil.which(compiler) or shutil.which("clang++"):
            return None
        if absence := super().unavailable():
            return f"{absence}; on the CPU it needs a C++ compiler, and {compiler} is not found: apt install g++"
        return None

    def standing(self, device: Device) -> Standing:
        """Compiling takes seconds on a GPU, and ten or more on a CPU."""
        return Standing.ASKED

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """What the CPU's template lacks, or the GPU's; then what both do."""
        p = problem
        if device.kind == "cpu":
            if p.grads:
                yield f"gradients (grad={p.grads}): flex_attention has none on the CPU"
            if p.lse:
                yield "return_lse: flex_attention returns none on the CPU"
        elif min(p.dim_qk, p.dim_v) < 16:
            yield f"dim_qk={p.dim_qk}, dim_v={p.dim_v}: flex_attention wants 16 at least"
        elif p.batch * p.heads_q > 65535:
            yield f"batch {p.batch} times heads {p.heads_q}: at most 65535, the limit of a CUDA launch grid"
        if "m" in p.grads:
            yield "a gradient of attn_mask: flex_attention adds it up atomically"
        if p.mask is not None and p.mask.dtype == "float64":
            yield "attn_mask is float64: flex_attention's scores are float32, and rounding it would change the problem"
        said = p.replace(mask=None, key_lengths=False, grads=p.grads.replace("m", ""), alignment="bottom_right")
        for reason in takes.reasons(self.takes, said, device):
            if device.kind != "cpu" or "NVIDIA" not in reason:
                yield reason

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Shared heads are summed in the accumulator."""
        return Precision(weights="storage", statistics="lse")

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """What of the mask is made before its blocks are known: two bytes a position."""
        p = problem
        axes = mods.spans(p)
        if axes is None:
            return cost.extra_tiled(p)
        sizes = (p.batch if axes[0] else 1) * (p.heads_q if axes[1] else 1)
        return cost.extra_tiled(p) + 2 * sizes * p.seq_q * p.seq_k

    def attend(self, problem: Problem, device: Device) -> Attend:
        """A compiled call of its own, and the block mask where that depends on positions alone."""
        flex_attention, create_block_mask, request = called(
            _MODULE, "flex_attention", "create_block_mask", "AuxRequest"
        )
        p, axes = problem, mods.spans(problem)
        fixed = axes is not None and not p.key_lengths and (p.mask is None or p.adds_mask)

        def blocks(inputs: Inputs) -> Any:
            batch, heads = (p.batch if axes[0] else None), (p.heads_q if axes[1] else None)  # type: ignore[index]
            visible = mods.visible(p, inputs.key_lengths, inputs.attn_mask)
            return create_block_mask(visible, batch, heads, p.seq_q, p.seq_k, device=inputs.query.device)

        @functools.cache
        def ready(device: Any) -> Any:
            """The block mask of positions alone, on a device of torch."""
            import torch

            with torch.inference_mode(mode=False), torch.no_grad():
                visible = mods.visible(p, None, None)
                return create_block_mask(visible, None, None, p.seq_q, p.seq_k, device=device)

        def once(query: Any, key: Any, value: Any, block_mask: Any, beside: Any, stated: bool) -> Any:
            aux = {"return_aux": request(lse=True)} if stated else {}
            found = flex_attention(
                query,
                key,
                value,
                score_mod=mods.score(p, *beside),
                block_mask=block_mask,
                scale=p.softmax_scale,
                enable_gqa=p.group > 1,
                **aux,
            )
            return (found[0], found[1].lse) if stated else (found, None)

        run = compiled(once)

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
            lengths = None if inputs.key_lengths is None else with_sign(inputs.key_lengths)
            inputs = inputs._replace(attn_mask=_stepless(inputs.attn_mask), key_lengths=_stepless(lengths))
            query, key, value = without_padding(inputs)[:3]
            block_mask = None if axes is None else ready(inputs.query.device) if fixed else blocks(inputs)
            beside = mods.added(p, inputs), inputs.alibi_slopes, inputs.key_lengths
            try:
                out, lse = run(query, key, value, block_mask, beside, stated)
            except RuntimeError as error:
                if type(error).__name__ not in _NOT_COMPILED:
                    raise
                line = str(error).strip().partition("\n")[0]
                raise CompileError(f"torch could not compile flex_attention for {p}: {line}") from error
            return out, lse

        return attend


def _stepless(array: Any) -> Any:
    """``array``, or a copy where its last axis has steps: the compiler has no loads for those."""
    return array if array is None or array.stride(-1) in (0, 1) else array.contiguous()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for each shape, under a code object of its own."""
    import torch

    code = function.__code__
    own = types.FunctionType(
        code.replace(co_name=f"flex_{next(_numbers)}"),
        function.__globals__,
        closure=function.__closure__,
    )
    made: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True)
    return made
