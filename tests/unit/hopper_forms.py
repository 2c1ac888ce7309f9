"""A call with a form of its own (sinks, slopes) by Hopper's kernels, emulated, beside the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import attnswitch

__all__ = ["KEYS", "QUERIES", "compare", "shown"]

#: As it is called here, with lengths in lists.
_attention: Any = attnswitch.attention
#: Odd, so that the emulator takes Hopper's kernels.
QUERIES, KEYS = 71, 133


def shown() -> torch.Tensor:
    """Some rows see nothing, others nothing of some tiles."""
    mask = np.random.default_rng(1).random((2, 1, QUERIES, KEYS)) < 0.5
    mask[:, :, :9], mask[:, :, :64, 30:] = False, False
    return torch.from_numpy(mask)


def compare(dim: int, form: dict[str, torch.Tensor], options: dict[str, Any], exact: dict[str, Any]) -> None:
    """Output, lse, and gradients of query, key, value and of what of ``form`` has some; ``exact`` for the reference."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, QUERIES, dim), (2, 2, KEYS, dim), (2, 2, KEYS, dim), (2, 4, QUERIES, dim)
    arrays = [torch.from_numpy(rng.standard_normal(shape)).half() for shape in shapes]
    wide = {name: array.double().detach().requires_grad_(array.requires_grad) for name, array in form.items()}
    right = _results("reference", [array.double() for array in arrays], wide, exact)
    for got, wanted in zip(_results("cuda", arrays, form, options), right, strict=True):
        size = max(1.0, wanted[wanted.isfinite()].abs().max().item())
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-3 * size)


def _results(
    backend: str, arrays: list[torch.Tensor], form: dict[str, torch.Tensor], options: dict[str, Any]
) -> list[torch.Tensor]:
    operands = [array.clone().requires_grad_() for array in arrays[:3]]
    out, lse = _attention(*operands, **form, return_lse=True, backend=backend, **options)
    alive = lse.isfinite()
    asked = [*operands, *(array for array in form.values() if array.requires_grad)]
    found = torch.autograd.grad((out, torch.where(alive, lse, 0)), asked, (arrays[3], alive.to(lse.dtype)))
    return [array.detach().double() for array in (out, lse, *found)]
