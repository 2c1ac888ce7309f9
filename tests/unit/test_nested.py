"""Jagged nested tensors through scaled_dot_product_attention: at once by attention_varlen, and what is refused."""

# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import attnswitch
from attnswitch import InvalidProblem, Unsupported
from attnswitch import scaled_dot_product_attention as ours
from attnswitch.call import entry_varlen

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
QUERIES, KEYS = (3, 1, 6), (2, 5, 4)


def leaf(lengths: tuple[int, ...], heads: int = 4, dim: int = 8) -> torch.Tensor:
    return torch.randn(sum(lengths), heads, dim, requires_grad=True)


def jagged(rows: torch.Tensor, lengths: tuple[int, ...]) -> Any:
    """(B, H, L, D), over rows (T, H, D)."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)


def problems(*operands: Any, **said: Any) -> list[tuple[bool, int]]:
    """Of the calls that one call is: whether it has sequences one after another, and its batch."""
    with attnswitch.record() as recording:
        ours(*operands, **said)
    return [(problem.varlen, problem.batch) for problem in recording.problems]


@pytest.mark.parametrize("said", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_one_call_gives_what_each_sequence_gives(said: dict[str, Any], heads: int) -> None:
    q, k, v = leaf(QUERIES), leaf(KEYS, heads), leaf(KEYS, heads, dim=5)
    operands = jagged(q, QUERIES), jagged(k, KEYS), jagged(v, KEYS)
    said |= {"enable_gqa": heads == 2}
    assert problems(*operands, **said) == [(True, 3)]
    out = ours(*operands, **said)
    split = zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True)
    said |= {"enable_gqa": heads < 4}
    parts = [torch_attention(*(x.transpose(0, 1)[None] for x in each), **said)[0] for each in split]
    rows = torch.cat([part.transpose(0, 1) for part in parts])
    torch.testing.assert_close(out.transpose(1, 2).values(), rows)
    assert out.transpose(1, 2).values().is_contiguous()
    both = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out.values(), rows))
    torch.testing.assert_close(*both)


def test_it_is_what_torch_returns() -> None:
    leaves = [leaf(QUERIES) for _ in range(3)]
    first = jagged(leaves[0], QUERIES)
    rest = (torch.nested.nested_tensor_from_jagged(x, first.offsets()).transpose(1, 2) for x in leaves[1:])
    operands = first, *rest
    out, right = ours(*operands), torch_attention(*operands)
    assert (out.shape, out._ragged_idx, out.offsets() is right.offsets()) == (right.shape, right._ragged_idx, True)
    torch.testing.assert_close(out.values(), right.values())
    torch.testing.assert_close(*(torch.autograd.grad(x.values().sin().sum(), leaves) for x in (out, right)))
    torch.testing.assert_close((out + first).values(), (right + first).values())  # of the same lengths, it is known


def test_without_heads() -> None:
    rows = torch.randn(10, 8)
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 4, 10]))
    assert problems(nested, nested, nested) == [(True, 3)]
    for part, x in zip(ours(nested, nested, nested).unbind(), rows.split(QUERIES), strict=True):
        torch.testing.assert_close(part, torch_attention(x, x, x))


def test_heads_that_attention_varlen_does_not_take_go_sequence_by_sequence() -> None:
    q, k, v = leaf(QUERIES, 1), leaf(QUERIES, 3), leaf(QUERIES, 3)
    operands = [jagged(x, QUERIES) for x in (q, k, v)]
    assert not any(varlen for varlen, _ in problems(*operands))
    for part, *each in zip(ours(*operands).unbind(), *(x.split(QUERIES) for x in (q, k, v)), strict=True):
        torch.testing.assert_close(part, torch_attention(*(x.transpose(0, 1) for x in each)))


def test_what_no_backend_takes_at_once_goes_sequence_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise Unsupported("no backend takes it")

    operands = [jagged(leaf(QUERIES), QUERIES) for _ in range(3)]
    expected = ours(*operands)
    monkeypatch.setattr(entry_varlen, "call", refused)
    torch.testing.assert_close(ours(*operands).values(), expected.values())


def test_what_does_not_go_together() -> None:
    q, k, v = (jagged(leaf(QUERIES), QUERIES) for _ in range(3))
    with pytest.raises(InvalidProblem, match="key and value differ in length"):
        ours(q, k, jagged(leaf(KEYS), KEYS))
    with pytest.raises(InvalidProblem, match="expected one axis"):
        ours(q, k.transpose(1, 2), v)
    with pytest.raises(InvalidProblem, match="pass all of one layout"):
        ours(q, torch.nested.nested_tensor([x.detach() for x in k.unbind()]), v)
    with pytest.raises(InvalidProblem, match="differ in dtype"):
        ours(q, k.double(), v)
    with pytest.raises(InvalidProblem, match="head dimension of query and key must agree"):
        ours(q, jagged(leaf(QUERIES, dim=7), QUERIES), v)
