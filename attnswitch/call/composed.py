"""Sinks where torch looks at a call before its tensors do: from what the operators give of the call without them."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.call import entry
from attnswitch.call.options import text_of
from attnswitch.errors import InvalidProblem

__all__ = ["attention"]


def attention(*call: Any, sinks: Any) -> Any:
    """What ``attention`` returns of ``call``, as ``entry.call`` takes it, with ``sinks``.

    A sink is one more key, of value 0: it takes 1 - sigmoid(lse - sink) of every row. It is written to be traced.
    """
    query, (return_lse, layout, deterministic) = call[0], call[-3:]
    heads_last = layout == "BLHD"
    heads = query.shape[2 if heads_last else 1]
    out, lse = entry.call(*call[:-3], True, layout, deterministic)
    sinks = _beside(sinks, query, heads).to(lse.dtype)[:, None]
    # A sink of -inf is none; as the least number it makes neither inf - inf nor a gradient of NaN.
    least = sinks.clamp(min=torch.finfo(lse.dtype).min)
    share = torch.sigmoid(lse - least)
    out = (out * (share.transpose(1, 2) if heads_last else share)[..., None]).to(out.dtype)
    if not return_lse:
        return out
    return out, torch.where((lse == -torch.inf) & (sinks == -torch.inf), lse, torch.logaddexp(lse, least))


def _beside(sinks: Any, query: Any, heads: int) -> Any:
    """``sinks`` as a tensor (Hq,) beside query. Raises ``InvalidProblem``."""
    if not isinstance(sinks, torch.Tensor):
        try:
            sinks = torch.tensor(sinks, device=query.device, dtype=torch.float64)
        except (RuntimeError, TypeError, ValueError):
            raise InvalidProblem(f"sinks={text_of(sinks)}: expected a tensor, or a list of numbers") from None
    if not sinks.is_floating_point():
        raise InvalidProblem(f"sinks has dtype {sinks.dtype}: expected a float type")
    if sinks.shape != (heads,):
        raise InvalidProblem(
            f"sinks has shape {tuple(sinks.shape)}: expected ({heads},), one score for each query head"
        )
    if hasattr(query, "device_mesh") and not hasattr(sinks, "device_mesh"):  # of DTensors: every process has all sinks
        from torch.distributed.tensor import DTensor, Replicate

        sinks = DTensor.from_local(sinks, query.device_mesh, [Replicate()] * query.device_mesh.ndim, run_check=False)
    return sinks
