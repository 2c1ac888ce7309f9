"""attnswitch as one of torch's implementations of flash attention, next to its FA3 and FA4.

What asks torch for flash attention then runs on attnswitch: ``F.scaled_dot_product_attention`` where it takes that
kernel, compiled graphs, rules of DTensors, and torch's own context parallelism, which splits a sequence over processes.
Packed sequences (``varlen_attn``) are another operator, which stays torch's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import attention as of_torch

from attnswitch.call.operators import run
from attnswitch.errors import Unsupported
from attnswitch.machine import registry
from attnswitch.planning import planner
from attnswitch.planning import policy as policies
from attnswitch.planning.policy import Policy

__all__ = ["NAME", "register"]

#: What ``torch.nn.attention.activate_flash_attention_impl`` knows it by.
NAME = "attnswitch"


def register(backend: str | None = None, policy: Policy | str | None = None) -> None:
    """Make ``"attnswitch"`` known to ``torch.nn.attention.activate_flash_attention_impl`` (torch 2.11 and later).

    Activated, it computes flash attention on CUDA in the whole process, until ``restore_flash_attention_impl``. Causal
    masks are bottom-right there, lse is float32, (B, Hq, Lq). Meanwhile the backend ``sdpa-flash`` is refused on CUDA,
    since its operator is no longer FlashAttention-2.

    Args:
        backend: as for ``attention``: this one or an error; the planner's choice if None.
        policy: as for ``attention``.

    Raises:
        InvalidProblem: the backend or the policy is not known.
        Unsupported: torch has no such registry.
    """
    if not hasattr(of_torch, "register_flash_attention_impl"):
        raise Unsupported(f"torch {torch.__version__} has no registry of flash attention: 2.11 has")
    if backend is not None:
        registry.load(backend)
    said: dict[str, Any] = {"causal_alignment": "bottom_right"}
    if backend is not None:
        said["backend"] = backend
    if policy is not None:
        said["policy"] = str(policies.effective(policy))
    of_torch.register_flash_attention_impl(NAME, register_fn=lambda: replaced(said, "CUDA"))


class Replaced:
    """Torch's operators while they are attnswitch's."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library
        planner.forget()  # what was planned for what torch's operators were

    def remove(self) -> None:
        """Give them back to torch."""
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None
            planner.forget()


def replaced(said: dict[str, Any], key: str) -> Replaced:
    """Torch's operators for tensors of dispatch key ``key`` by calls that say ``said``."""
    ours = _Operators(said)
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch 2.11 warns that a kernel of its own is overridden, which is meant
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, function in (("", ours.forward), ("_backward", ours.backward)):
            library.impl(f"_scaled_dot_product_flash_attention{name}", function)  # type: ignore[no-untyped-call]
    return Replaced(library)


@dataclass(frozen=True, slots=True)
class _Operators:
    """What stands in for torch's operators, which are called below autograd."""

    said: dict[str, Any]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Output, lse, two that only packed sequences have, Lq, Lk, the state of dropout, and two unused."""
        if return_debug_mask:
            raise Unsupported("return_debug_mask: no backend of attnswitch returns its weights")
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "return_lse": True, **self.said}
        grads = "qkv" if wanted or dropout_p > 0.0 else ""  # which keeps the seed
        out, lse, seed = run.forward(query, key, value, None, None, None, grads=grads, **options)
        state = unused = query.new_empty((), dtype=torch.uint64)  # no axes, as torch's, on which DTensors insist
        if dropout_p > 0.0:  # on the host, which reads it
            state = torch.cat((seed, torch.zeros_like(seed))).view(torch.uint64)
        out, weights = _lying(out, query), query.new_empty(0)
        return out, lse, None, None, query.shape[2], key.shape[2], state, unused, weights

    def backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Gradients of query, key and value."""
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, **self.said}
        operands, results = (query, key, value, None, None, None), (out, logsumexp, philox_seed)
        found = run.backward(grad_out, None, *operands, *results, grads="qkv", **options)
        return tuple(_lying(x, like) for x, like in zip(found, operands[:3], strict=True))


def _lying(array: Any, like: Any) -> Any:
    """``array`` with its axes in memory as those of ``like``, which a graph counts on; a copy if it lies otherwise."""
    order = sorted(range(4), key=like.stride, reverse=True)
    if array.permute(order).is_contiguous():
        return array
    back = [order.index(axis) for axis in range(4)]
    return array.new_empty([array.shape[axis] for axis in order]).permute(back).copy_(array)
