"""Whether a float mask moves whole rows so far that their lse cannot tell a part of the keys from another."""

from __future__ import annotations

import torch

from attnswitch.parallel.asking import Asked
from attnswitch.parallel.pieces import Band

__all__ = ["MOST", "hides"]

#: The largest number that a row may see in its mask. An lse of 1,024 is stored to 6e-5, by which weights are off.
MOST = 1024.0
#: Numbers of the mask that are looked at together.
_TOGETHER = 2**24


def hides(asked: Asked, band: Band) -> bool:
    """Whether a row's largest visible number in the mask is beyond ``MOST``; rows that see nothing are not.

    Of the whole, so that all ranks say the same. On a GPU the host waits for it.
    """
    mask = asked.attn_mask
    if mask is None or mask.dtype == torch.bool or not mask.numel() or not asked.keys.length:
        return False
    alike = mask.shape[2] == 1 and band == Band()  # all rows see the same
    length = 1 if alike else asked.queries.length
    together = max(1, _TOGETHER // (asked.keys.length * mask.shape[0] * mask.shape[1]))  # rows
    keys = torch.arange(asked.keys.length, dtype=torch.int32, device=mask.device)
    found = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, length, together):
        rows = torch.arange(start, min(start + together, length), dtype=torch.int32, device=mask.device)[:, None]
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=mask.device)
        if band.low is not None:
            seen &= keys - rows >= band.low
        if band.high is not None:
            seen &= keys - rows <= band.high
        if asked.key_lengths is not None:
            seen = seen & (keys < asked.key_lengths[:, None, None, None])
        some = mask if mask.shape[2] == 1 else mask[:, :, start : start + together]
        top = torch.where(seen, some, -torch.inf).amax(-1)
        found |= (top.isfinite() & (top.abs() > MOST)).any()
    return bool(found)
