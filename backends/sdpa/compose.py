"""All that hides in a call as the additive bias of torch's operators on GPUs, made by one kernel of Triton.

It reads the mask where it lies, with the causal flag, window and key lengths, and writes each row of the bias as the
operators read it: in the operands' type, with room to a multiple of 8. See ``masks.compose``, which it agrees with.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from attnswitch.machine.backend import Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .masks import SATURATED, Hiding

__all__ = ["Composer", "available"]

#: Ways to lie of a mask whose launches are kept for one problem.
_MOST = 16
#: Keys of a row that are read at once.
_BLOCK = 1024


@functools.cache
def available() -> bool:
    """Whether there is a Triton."""
    return importlib.util.find_spec("triton") is not None


class Composer:
    """What hides in calls of one problem that needs a mask."""

    def __init__(self, problem: Problem, device: Device) -> None:
        p = self.problem = problem
        self.dtype: torch.dtype = getattr(torch, p.dtype)
        self.scores = p.batch, p.heads_q, p.seq_q, p.seq_k
        axes = p.mask.axes if p.mask else ""
        positional = p.hides_by_position
        spans = ("b" in axes or p.key_lengths, "h" in axes, "q" in axes or positional)
        #: Rows of the bias, (B or 1, Hq or 1, Lq or 1), and its steps, 0 where it is broadcast.
        self.rows = b, h, q = tuple(size if spanned else 1 for size, spanned in zip(self.scores, spans, strict=False))
        self.width = w = p.seq_k + -p.seq_k % 8
        self.steps = w * h * q if b > 1 else 0, w * q if h > 1 else 0, w if q > 1 else 0, 1
        left, right = p.reach if positional else (None, None)
        #: What the kernel is told beside arrays and their strides.
        self.numbers = p.seq_q, p.seq_k, w, h, q, left or 0, right or 0
        self.flags = {
            "KIND": 0 if p.mask is None else 1 if p.mask.is_bool else 2,
            "LENGTHS": p.key_lengths,
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "BOTTOM": p.bottom_right and positional,
            "FAR": SATURATED,
            "BLOCK": min(_BLOCK, 1 << (w - 1).bit_length()),
        }
        self.launches: dict[tuple[Any, ...], Any] = {}

    def __call__(self, inputs: Inputs, *, lifted: bool = False) -> Hiding:
        """The bias (B, Hq, Lq, Lk), the dead rows, and the lift where it is asked for."""
        mask = inputs.attn_mask
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            bias, dead, lift = _Differentiable.apply(mask, self, inputs, lifted)
        else:
            bias, dead, lift = self.written(inputs, lifted)
        return Hiding(bias, dead=dead, lift=lift)

    def written(self, inputs: Inputs, lifted: bool) -> tuple[Any, Any, Any]:
        """The same, without a graph."""
        mask, lengths = inputs.attn_mask, inputs.key_lengths
        where = inputs.query.device
        written = torch.empty((*self.rows, self.width), dtype=self.dtype, device=where)
        dead = torch.empty((*self.rows, 1), dtype=torch.bool, device=where)
        lift = torch.empty(self.rows, dtype=torch.float32, device=where) if lifted or self.problem.lse else None
        arrays = mask, lengths, written, dead, lift
        if where.type == "cuda" and torch.cuda.current_device() != where.index:
            with torch.cuda.device(where):
                self._launch(arrays)
        else:
            self._launch(arrays)
        return written.as_strided(self.scores, self.steps), dead, lift

    def _launch(self, arrays: tuple[Any, ...]) -> None:
        mask, lengths, written, _, lift = arrays
        given = [0 if array is None else array.data_ptr() for array in arrays]
        lie = (
            written.device.index,
            None if mask is None else mask.stride(),
            None if lengths is None else (lengths.dtype, lengths.stride()),
            (given[0] | given[1]) & 15,
            lift is None,
        )
        launch = self.launches.get(lie)
        if launch is not None:
            launch(given)
            return
        from . import kernel  # imports Triton

        strides = [0, 0, 0, 0] if mask is None else [
            0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)
        ]  # fmt: skip
        passed = (*self.numbers, *strides, 1 if lengths is None else lengths.stride(0))
        flags = self.flags | {"LIFT": lift is not None}
        launch = kernel.started(self.rows[0] * self.rows[1] * self.rows[2], arrays, passed, flags)
        if launch is not None:
            if len(self.launches) >= _MOST:
                self.launches.clear()
            self.launches[lie] = launch


class _Differentiable(torch.autograd.Function):
    """The bias as a function of a float mask: hidden positions and rows have no weight, and so no gradient."""

    @staticmethod
    def forward(ctx: Any, mask: Any, composer: Composer, inputs: Inputs, lifted: bool) -> Any:
        ctx.shape, ctx.dtype = mask.shape, mask.dtype
        bias, dead, lift = composer.written(inputs, lifted)
        ctx.mark_non_differentiable(*(x for x in (dead, lift) if x is not None))
        return bias, dead, lift

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, *_: Any) -> tuple[Any, ...]:
        # Summed before it is rounded to a narrower type, and after it came in the operands'.
        return grad.sum_to_size(ctx.shape).to(ctx.dtype), None, None, None
