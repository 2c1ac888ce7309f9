"""Forward mode: what no derivative is known of is refused in words, and no tangent is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import attnswitch
from attnswitch import Unsupported

ROWS: Any = [torch.randn(10, 2, 4) for _ in range(4)]
EDGES = [0, 5, 10]
varlen: Any = attnswitch.attention_varlen
varlen_backward: Any = attnswitch.attention_varlen_backward


def dual(tensor: torch.Tensor) -> Any:
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))  # type: ignore[no-untyped-call]


BACKWARD: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "grad_out": lambda out, lse: {"grad_out": dual(ROWS[3])},
    "lse": lambda out, lse: {"out": out, "lse": dual(lse)},
    "out": lambda out, lse: {"out": dual(out), "lse": lse},
    "grad_lse": lambda out, lse: {"grad_lse": dual(torch.randn(2, 10))},
    "sinks": lambda out, lse: {"sinks": dual(torch.zeros(2))},
    "slopes": lambda out, lse: {"alibi_slopes": dual(torch.ones(2))},
}


@pytest.mark.parametrize("which", BACKWARD)
def test_gradients_of_sequences_have_no_tangents(which: str) -> None:
    out, lse = varlen(*ROWS[:3], EDGES, return_lse=True)
    with forward_ad.dual_level():
        given = {"grad_out": ROWS[3], **BACKWARD[which](out, lse)}
        with pytest.raises(Unsupported, match="forward mode"):
            varlen_backward(given.pop("grad_out"), *ROWS[:3], EDGES, **given)


@pytest.mark.parametrize("form", ["dense", "training", "varlen", "paged", "plan"])
def test_slopes_have_no_tangents(form: str) -> None:
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    cache, table = key.reshape(5, 2, 2, 4), [[0, 1], [2, 3]]
    plan = attnswitch.plan(query, key, value, alibi_slopes=torch.ones(2))
    with forward_ad.dual_level():
        slopes = dual(torch.ones(2))
        calls: dict[str, Callable[[], Any]] = {
            "dense": lambda: attnswitch.attention(query, key, value, alibi_slopes=slopes),
            "training": lambda: attnswitch.attention(query.requires_grad_(), key, value, alibi_slopes=slopes),
            "varlen": lambda: varlen(*ROWS[:3], EDGES, alibi_slopes=slopes),
            "paged": lambda: attnswitch.attention_paged(
                query[:, :, :2].transpose(1, 2), cache, cache, table, [3, 4], alibi_slopes=slopes
            ),
            "plan": lambda: plan(query, key, value, alibi_slopes=slopes),
        }
        with pytest.raises(Unsupported, match="forward mode"):
            calls[form]()
