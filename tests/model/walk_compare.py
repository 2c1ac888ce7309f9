"""How far two outputs of a model of transformers are apart, where they say something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Outputs", "as_finite", "off", "outputs"]

#: The tensors of an output, by where they stand in it.
Outputs = dict[str, torch.Tensor]
#: What a model returns beside its answer.
_STATE = ("past_key_values", "cache_params", "rope_deltas")


def outputs(out: Any) -> Outputs:
    """The tensors of numbers in what a model returned."""
    return {name: x for name, x in _tensors(out) if x.numel()}


def _tensors(out: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(out, torch.Tensor):
        if out.is_floating_point() or out.is_complex():
            yield at, out
    elif isinstance(out, dict):
        for name, value in out.items():
            if name not in _STATE:
                yield from _tensors(value, f"{at}.{name}")
    elif isinstance(out, (list, tuple)):
        for number, value in enumerate(out):
            yield from _tensors(value, f"{at}.{number}")


def off(one: Outputs, two: Outputs, mask: torch.Tensor | None) -> float:
    """The largest difference, by the largest number of that output; rows that ``mask`` calls padding are left out."""
    worst = 0.0 if one.keys() == two.keys() else float("inf")
    for name, x in one.items():
        y = two.get(name)
        if y is None or y.shape != x.shape:
            return float("inf")
        seen = _seen(x, mask)
        if seen is not None:
            x, y = x[seen], y[seen]
        scale = largest = 0.0
        for one_part, two_part in zip(_parts(x), _parts(y), strict=True):
            # What eager attention makes NaN or infinite says nothing of another's numbers.
            known = one_part.isfinite()
            if known.any():
                scale = max(scale, one_part[known].abs().max().item())
                error = (one_part - two_part)[known].abs().max().item()
                largest = max(largest, error if error == error else float("inf"))
        worst = max(worst, largest / (scale + 1e-6))
    return worst


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """All numbers in double, some at a time: outputs of images are large."""
    x = x.flatten()
    for start in range(0, len(x), 2**20):
        part = x[start : start + 2**20]
        yield part.double() if not x.is_complex() else torch.view_as_real(part.to(torch.complex128))


def _seen(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which rows of ``x`` are no padding, if it has one for each token of ``mask``, (B, L); None if it has not."""
    if mask is None or mask.ndim != 2 or x.ndim < 2 or not len(mask) or len(x) % len(mask):
        return None
    more = x.shape[1] - mask.shape[1]
    if not -1 <= more <= 1:  # one more is a token that the model puts behind the others, one less leaves out the first
        return None
    seen = mask[:, 1:].bool() if more < 0 else torch.nn.functional.pad(mask, (0, more), value=1).bool()
    return seen.repeat_interleave(len(x) // len(mask), 0)  # an entry may have several rows, one a codebook


def as_finite(one: Outputs, two: Outputs) -> bool:
    """Whether ``one`` is finite wherever ``two`` is."""
    return all(bool((x.isfinite() | ~two[name].isfinite()).all()) for name, x in one.items())
