"""Context parallelism of diffusers: its template moves keys, values and gradients, attnswitch computes each part.

A ring passes keys and values around and merges the parts by their lse. Ulysses trades a sequence's share of all heads
for all of it of some heads. diffusers has a template for each and for both together, into which a backend puts a
forward and a backward. What the template makes of these is right where ``over_processes`` lets it through; the rest it
refuses, with what goes wrong there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import diffusers
import torch

from attnswitch import api
from attnswitch.errors import Unsupported

__all__ = ["TEMPLATE", "over_processes"]

#: The function of diffusers' dispatch that takes a forward and a backward.
TEMPLATE = "_templated_context_parallel_attention"
#: diffusers of before 0.38, and its ring of unlike lengths of before 0.40, give an lse its last axis by this rule.
_LSE_HAS_AN_AXIS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 9)
_ULYSSES = "use ulysses_degree without ring_degree"


def over_processes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    *,
    config: Any,
    options: dict[str, Any],
) -> Any:
    """Output (B, Lq, Hq, Dv) of this process's queries over the keys of all, and with ``return_lse`` lse (B, Lq, Hq).

    Args:
        query: this process's share, (B, Lq, Hq, D).
        key: likewise, (B, Lk, Hkv, D).
        value: likewise, (B, Lk, Hkv, Dv).
        attn_mask: with Ulysses alone; what hides this process's keys, (B, 1, 1, Lk), or of all of the sequence.
        dropout_p: as for ``attention``, like is_causal, scale and enable_gqa; the template refuses is_causal and
            enable_gqa.
        is_causal: see dropout_p.
        scale: see dropout_p.
        enable_gqa: see dropout_p.
        return_lse: the lse too, which has no gradient.
        config: diffusers' ``ParallelConfig``.
        options: the other keywords of ``attention``.

    Raises:
        Unsupported: the template would make something wrong of the call.
    """
    parallel = config.context_parallel_config
    ring = parallel.ring_degree > 1
    reason = _refused(parallel, ring, query, value, attn_mask, dropout_p, options)
    if reason:
        raise Unsupported(f"diffusers {diffusers.__version__}, context parallelism: {reason}")
    ours = _Ops(ring, options)
    found = getattr(import_module("diffusers.models.attention_dispatch"), TEMPLATE)(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        forward_op=ours.forward,
        backward_op=ours.backward,
        _parallel_config=config,
    )
    if return_lse and found[1].requires_grad:
        found[1].register_hook(_without_gradient)
    return found


def _refused(
    parallel: Any,
    ring: bool,
    query: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    options: dict[str, Any],
) -> str | None:
    """Why diffusers' template would make something wrong of such a call."""
    if dropout_p > 0.0:
        return f"dropout_p={dropout_p}: its backward does not know which weights the forward dropped"
    if value.shape[-1] != query.shape[-1]:
        return f"value has head dimension {value.shape[-1]}: it takes that of query and key, {query.shape[-1]}, for it"
    if ring and attn_mask is not None:
        return f"attn_mask with a ring: it applies this process's mask to the keys of every other; {_ULYSSES}"
    if ring and "window" in options:
        return f"window_size with a ring: it counts from the corner of each part, not of the sequence; {_ULYSSES}"
    if ring and query.dtype == torch.float64 and parallel.convert_to_fp32:
        return "float64 with a ring: parts are merged in float32; set convert_to_fp32=False"
    if attn_mask is not None and attn_mask.requires_grad:
        return "attn_mask requires a gradient, and its backward gives none"
    if attn_mask is not None and parallel.ulysses_anything:
        return "attn_mask with ulysses_anything: masks of unlike lengths are joined with their padding between them"
    return None


def _without_gradient(gradient: torch.Tensor | None) -> None:
    """A hook of the lse; None is the gradient of what nobody used."""
    if gradient is not None:
        raise Unsupported(
            f"diffusers {diffusers.__version__}, context parallelism: its backward drops the gradient of the lse"
        )


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective may still be sending, once it is there."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


@dataclass(frozen=True, slots=True)
class _Ops:
    """What the template calls for each part: in a ring one for each process's keys, else one for all."""

    ring: bool
    options: dict[str, Any]

    def forward(
        self,
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Any:
        """Output (B, Lq, Hq, Dv) and lse (B, Lq, Hq), in a ring as its merging takes it."""
        key, value = _arrived(key), _arrived(value)
        said = {"scale": scale, "enable_gqa": key.shape[2] == 1, "attn_mask": attn_mask, **self.options}
        out, lse = api.attention(query, key, value, return_lse=True, **said)
        if _save_ctx:
            ctx.attnswitch = said
            ctx.save_for_backward(query, key, value, *(() if self.ring else (out, lse)))
        if not return_lse:
            return out
        lse = lse.transpose(1, 2)
        return out, lse[..., None] if self.ring and _LSE_HAS_AN_AXIS else lse

    def backward(self, ctx: Any, grad_out: torch.Tensor, **part: torch.Tensor) -> Any:
        """Gradients of query, key and value. A ring says whose keys these are, with output and lse of all keys."""
        if self.ring and not part:
            raise Unsupported(
                f"diffusers {diffusers.__version__}: the backward of its ring hands over this process's keys in place"
                " of those that come by, and leaves their gradients with the next process (diffusers issue 14265);"
                f" diffusers 0.40 and later are right, or {_ULYSSES}"
            )
        if self.ring:
            query, key, value, out, lse = (_arrived(part[name]) for name in ("query", "key", "value", "out", "lse"))
            lse = lse.transpose(1, 2)
        else:
            query, key, value, out, lse = ctx.saved_tensors
        return api.attention_backward(grad_out, query, key, value, out=out, lse=lse, **ctx.attnswitch)[:3]
