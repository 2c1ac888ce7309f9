"""Sinks where torch looks at a call before its tensors do: from what the operators give of the call without them."""

from __future__ import annotations

from typing import Any

import torch

from attnswitch.call import entry, operators, per_head
from attnswitch.call.operators.calls import as_floats, detached
from attnswitch.call.sinks import written_out
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Gradients, GradientsWithSinks

__all__ = ["attention", "attention_varlen", "saved", "saved_varlen", "with_gradient"]

_Results = tuple[Any, Any]


def attention(*call: Any, sinks: Any, alibi_slopes: Any = None) -> Any:
    """What ``attention`` returns of ``call``, as ``entry.traced`` takes it, with ``sinks``."""
    query, (return_lse, layout, deterministic) = call[0], call[-3:]
    heads_last = layout == "BLHD"
    sinks = _checked_sinks(sinks, query, query.shape[2 if heads_last else 1])
    without = entry.traced(*call[:-3], True, layout, deterministic, alibi_slopes=alibi_slopes)
    out, lse = _with(sinks, *without, heads_last=heads_last)
    return (out, lse) if return_lse else out


def attention_varlen(*call: Any, sinks: Any, alibi_slopes: Any = None) -> Any:
    """What ``attention_varlen`` returns of ``call``, as ``operators.attention_varlen`` takes it, with ``sinks``."""
    query, cu_seqlens, (return_lse, *rest) = call[0][0], call[1], call[-3:]
    sinks = _checked_sinks(sinks, query, query.shape[1])
    without, lse = operators.attention_varlen(*call[:-3], True, *rest, alibi_slopes=alibi_slopes)
    out, whole = _with(sinks, without, lse, heads_last=True)
    if not return_lse:
        return out
    # Rows past the last sequence see no sink either.
    return out, torch.where(torch.arange(query.shape[0], device=query.device) < cu_seqlens[0][-1], whole, lse)


def saved(given: _Results, *call: Any, sinks: Any, alibi_slopes: Any) -> _Results:
    """Output and lse of ``attention`` as they are given, computed where one is left out; nothing is differentiated."""
    if all(result is not None for result in given):
        _checked_sinks(sinks, call[0], call[0].shape[2 if call[-2] == "BLHD" else 1])
        return given
    sinks, alibi_slopes = detached(sinks, alibi_slopes)
    call = detached(*call)
    out, lse = attention(*call[:-3], True, *call[-2:], sinks=sinks, alibi_slopes=alibi_slopes)
    return out, lse


def saved_varlen(given: _Results, *call: Any, sinks: Any, alibi_slopes: Any) -> _Results:
    """The same of ``attention_varlen``."""
    if all(result is not None for result in given):
        _checked_sinks(sinks, call[0][0], call[0][0].shape[1])
        return given
    sinks, alibi_slopes = detached(sinks, alibi_slopes)
    operands, *rest = call
    out, lse = attention_varlen(
        detached(*operands), *rest[:-3], True, *rest[-2:], sinks=sinks, alibi_slopes=alibi_slopes
    )
    return out, lse


def with_gradient(
    found: Gradients, sinks: Any, upstream: _Results, saved: _Results, query: Any, *, heads_last: bool
) -> GradientsWithSinks:
    """``found`` of the operands beside the gradient of ``sinks``, from those ``upstream`` of output and lse, and these.

    Operands are (B, H, L, D), those of packed sequences (T, H, D), and the output may have heads after L.
    """
    (grad_out, grad_lse), (out, lse) = (detached(*each) for each in (upstream, saved))
    sinks = _checked_sinks(sinks, query, lse.shape[-2]).detach()
    if out.dim() == 3:
        grad_out, out, lse = grad_out[None], out[None], lse[None]
        grad_lse = grad_lse if grad_lse is None else grad_lse[None]
    if heads_last:
        grad_out, out = grad_out.swapaxes(1, 2), out.swapaxes(1, 2)
    return GradientsWithSinks.of(found, written_out(torch, sinks, out, lse, grad_out, grad_lse))


def _with(sinks: Any, out: Any, lse: Any, *, heads_last: bool) -> tuple[Any, Any]:
    """Output and lse with ``sinks``, (Hq,), from those without; the output may have heads after L.

    A sink is one more key, of value 0: it takes 1 - sigmoid(lse - sink) of every row. It is written to be traced.
    """
    sinks = sinks.to(lse.dtype)
    absent = _absent(sinks)[:, None]
    # A sink that is none is the least number, which makes neither inf - inf nor a gradient of NaN.
    least = torch.where(absent, torch.finfo(lse.dtype).min, sinks[:, None])
    share = torch.sigmoid(lse - least)
    out = (out * (share.transpose(-1, -2) if heads_last else share)[..., None]).to(out.dtype)
    return out, torch.where((lse == -torch.inf) & absent, lse, torch.logaddexp(lse, least))


def _absent(sinks: Any) -> Any:
    """Which of ``sinks`` are none. On the CPU an operator looks at their numbers, when a graph runs."""
    if sinks.device.type != "cpu" or hasattr(sinks, "device_mesh"):
        return sinks == -torch.inf
    return torch.ops.attnswitch.absent_sinks(sinks.detach())


def _checked_sinks(sinks: Any, query: Any, heads: int) -> Any:
    """``sinks`` as a tensor (Hq,) beside query. Raises ``InvalidProblem``."""
    sinks = as_floats(sinks, "sinks", query)
    if not sinks.is_floating_point():
        raise InvalidProblem(f"sinks has dtype {sinks.dtype}: expected a float type")
    if isinstance(query, torch.Tensor) and sinks.device != query.device:
        raise InvalidProblem(f"sinks is on {sinks.device}, query on {query.device}: pass both on one device")
    per_head.check_sinks(tuple(sinks.shape), heads)
    if hasattr(query, "device_mesh") and not hasattr(sinks, "device_mesh"):  # of DTensors: every process has all sinks
        from attnswitch.call import sharded

        sinks = sharded.everywhere(sinks, query.device_mesh)
    return sinks
