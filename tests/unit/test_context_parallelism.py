"""``context_parallel``: what it refuses, before anything is sent; and a model that is trained over two ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launched import ended, launched
from torch import distributed as dist
from torch import nn

import attnswitch
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.integrations.torch_distributed import ContextParallel, context_parallel
from attnswitch.parallel import METHODS, way
from attnswitch.parallel.call import Call

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD
    dist.destroy_process_group()


class OneOfTwo(ContextParallel):
    """Rank 0 of two, of which the other is not there: what is sent would wait for ever."""

    def __init__(self, group: Any, method: Any, order: Any = "zigzag") -> None:
        super().__init__(group, method, order)
        self.rank, self.ranks = 0, 2


def operands(rows: int = 12, heads: int = 4, key_heads: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, rows, 8) for n in (heads, key_heads, key_heads))


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_is_the_call_itself(group: Any, method: Any, layout: str) -> None:
    whole = [x if layout == "BHLD" else x.transpose(1, 2).contiguous() for x in operands()]
    leaves = [x.clone().requires_grad_() for x in whole]
    said: dict[str, Any] = {"is_causal": True, "window": (5, 0), "layout": layout}
    expected = attnswitch.attention(*leaves, **said)
    grads = torch.autograd.grad(expected.sum(), leaves)
    parallel = context_parallel(group, method=method)
    again = [x.clone().requires_grad_() for x in whole]
    out = parallel.attention(*again, **said)
    assert out.is_contiguous()
    for ours, theirs in zip((out, *torch.autograd.grad(out.sum(), again)), (expected, *grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"dropout_p": 0.1}, Unsupported, "dropout_p=0.1"),
        ({"dropout_p": 0.1, "seed": 3}, Unsupported, "function of the whole"),
        ({"windw": (3, 0)}, InvalidProblem, "did you mean 'window'"),
        ({"length": 25}, InvalidProblem, "rank 0 of 2 holds"),
        ({"length": (24, 30)}, InvalidProblem, "key has 12 rows"),
        ({"length": (24, 24, 24)}, InvalidProblem, "length="),
        ({"length": "all"}, InvalidProblem, "length='all'"),
        ({"length": [24, 30]}, InvalidProblem, "key has 12 rows"),
        ({"attn_mask": torch.ones(12, 12).requires_grad_()}, Unsupported, "attn_mask requires_grad"),
        ({"attn_mask": torch.ones(12, 12)}, InvalidProblem, r"\(2, 4, 24, 24\)"),
        ({"key_lengths": [3, 25]}, InvalidProblem, "25"),
        ({"sinks": torch.zeros(3)}, InvalidProblem, "sinks"),
        ({"scale": float("nan")}, InvalidProblem, "scale"),
        ({"is_causal": 1}, InvalidProblem, "is_causal=1"),
        ({"backend": "nothing"}, InvalidProblem, "nothing"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_makes_no_sense_is_told_before_anything_is_sent(
    group: Any, method: Any, said: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        OneOfTwo(group, method).attention(*operands(), **said)


@pytest.mark.parametrize(
    ("method", "said", "words"),
    [
        ("ring", {"alibi_slopes": torch.ones(4)}, "all-to-all"),
        ("ring", {"key_lengths": [3, 12], "is_causal": True, "causal_alignment": "bottom_right"}, "all-to-all"),
        ("all-to-all", {}, "3 query heads over 2 ranks"),
    ],
)
def test_a_method_that_cannot_names_the_one_that_can(group: Any, method: Any, said: dict[str, Any], words: str) -> None:
    heads = (3, 1) if method == "all-to-all" else (4, 2)
    with pytest.raises(Unsupported, match=words):
        OneOfTwo(group, method).attention(*operands(12, *heads), **said)


@pytest.mark.parametrize(
    ("number", "said", "refused"),
    [
        (torch.finfo(torch.float32).min, {}, True),
        (-3e4, {}, True),
        (1e6, {}, True),
        (-900.0, {}, False),
        (-torch.inf, {}, False),
        (-1e9, {"is_causal": True}, True),  # of row 0, which sees key 0 alone
        (-1e9, {"window": (0, None)}, False),
    ],
)
def test_a_ring_refuses_a_mask_that_no_lse_can_merge(
    group: Any, number: float, said: dict[str, Any], refused: bool
) -> None:
    """The first five of twelve keys have it; by themselves in the first rows where these see no others."""
    mask = torch.zeros(1, 1, 1, 12)
    mask[..., :5] = number
    if not said:
        mask = mask.expand(1, 1, 12, 12).clone()
        mask[:, :, 3] = number
    parallel, operated = context_parallel(group), operands()
    if refused:
        with pytest.raises(Unsupported, match="all-to-all"):
            parallel.attention(*operated, attn_mask=mask, **said)
    else:
        ours = parallel.attention(*operated, attn_mask=mask, **said)
        torch.testing.assert_close(ours, attnswitch.attention(*operated, attn_mask=mask, **said), rtol=1e-4, atol=1e-4)
    context_parallel(group, method="all-to-all").attention(*operated, attn_mask=mask, **said)


def test_a_mask_over_no_keys_hides_nothing_far(group: Any) -> None:
    query, (key, value) = operands()[0], (x[:, :, :0] for x in operands()[1:])
    for method in METHODS:
        out = context_parallel(group, method=method).attention(
            query, key, value, length=(12, 0), attn_mask=torch.zeros(1, 1, 1, 1)
        )
        assert not out.any()


def test_lengths_are_whole_numbers(group: Any) -> None:
    parallel = context_parallel(group)
    assert len(parallel.positions(np.int64(3))) == 3  # type: ignore[arg-type]
    for wrong in (True, 2.0, "3", -1):
        with pytest.raises(InvalidProblem, match="length"):
            parallel.positions(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidProblem, match="length"):
            parallel.attention(*operands(), length=wrong)


def test_operands_that_are_no_rows_of_torch(group: Any) -> None:
    parallel = OneOfTwo(group, "ring")
    query, key, value = operands()
    with pytest.raises(InvalidProblem, match="expected a tensor of torch"):
        parallel.attention(query.numpy(), key.numpy(), value.numpy())
    with pytest.raises(InvalidProblem, match="four axes"):
        parallel.attention(query[0], key[0], value[0])
    with pytest.raises(InvalidProblem, match="dtype"):
        parallel.attention(query.half(), key, value)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    for offsets, words in (([0, 30], "30"), ([1, 24], "0 first"), ([0, 9, 7], "none less"), ([], "cu_seqlens")):
        with pytest.raises(InvalidProblem, match=words):
            parallel.attention_varlen(*rows, offsets)


@pytest.mark.parametrize(
    ("call", "said", "words"),
    [
        ("attention_varlen", {"max_seqlen_q": 24}, "over ranks has no max_seqlen_q: the host reads cu_seqlens_q"),
        ("attention_varlen", {"cu_seqlens_k": [0, 24]}, "has no cu_seqlens_k: keys begin where queries do"),
        ("attention_varlen", {"layout": "BHLD"}, r"has no layout: sequences are \(rows, H, D\)"),
        ("attention_varlen", {"key_lengths": [24]}, "has no key_lengths: .*without a mask"),
        ("attention_varlen", {"is_casual": True}, "did you mean 'is_causal'"),
        ("attention", {"cu_seqlens_q": [0, 24]}, "has no cu_seqlens_q: packed sequences.*are attention_varlen's"),
        ("attention", {"lenght": 24}, "did you mean 'length'"),
    ],
)
def test_keywords_of_other_calls(group: Any, call: str, said: dict[str, Any], words: str) -> None:
    where = ([0, 24],) if call == "attention_varlen" else ()
    with pytest.raises(InvalidProblem, match=words):
        getattr(OneOfTwo(group, "ring"), call)(*operands(), *where, **said)


def test_groups_and_names(group: Any) -> None:
    for said, words in (
        ({"method": "rings"}, "did you mean 'ring'"),
        ({"method": "ring-attention"}, "did you mean 'ring'"),
        ({"method": "ulysses"}, "did you mean 'all-to-all'"),
        ({"method": "DeepSpeed-Ulysses"}, "did you mean 'all-to-all'"),
        ({"method": "alltoall"}, "did you mean 'all-to-all'"),
        ({"order": "zig"}, "zigzag"),
        ({"order": ""}, "zigzag"),
        ({"method": None}, "method"),
    ):
        with pytest.raises(InvalidProblem, match=words):
            context_parallel(group, **said)
    for given, words in (
        ("ring", "say method='ring'"),
        ("ulysses", "say method='all-to-all'"),
        ([0, 1], "process group"),
    ):
        with pytest.raises(InvalidProblem, match=words):
            context_parallel(given)
    assert "ring, zigzag, rank 0 of 1" in repr(context_parallel())
    assert context_parallel(method="all-to-all").order == "contiguous"


def test_without_a_group_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(Unsupported, match="init_process_group"):
        context_parallel()


def test_a_second_derivative_raises(group: Any) -> None:
    leaves = [x.requires_grad_() for x in operands()]
    out = context_parallel(group).attention(*leaves)
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with contextlib.suppress(RuntimeError):
        torch.autograd.grad(grad.sum(), leaves[:1])
        raise AssertionError("a second derivative was made of a first one alone")


# -- over two ranks ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and what is around it."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.project, self.back, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        attended = self.attend(query, key, value, is_causal=True)
        added: torch.Tensor = x + self.back(attended.transpose(1, 2).flatten(2))
        return added


def made(attend: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(attend), Block(attend)).double()


def refused_alike(mesh: Any) -> None:
    """What no backend takes is refused on all ranks, and leaves nothing behind that the next call would wait for."""
    parallel = context_parallel(mesh)
    whole = operands(13)
    expected = attnswitch.attention(*whole, is_causal=True)
    for _ in range(3):
        mine = [parallel.shard(x, 2) for x in whole]
        with pytest.raises(Unsupported, match="sdpa-math"):
            parallel.attention(*mine, is_causal=True, length=13, backend="sdpa-math")
        out = parallel.attention(*mine, is_causal=True, length=13)
        torch.testing.assert_close(parallel.unshard(out, 2, 13), expected, rtol=1e-4, atol=1e-5)


def failed_alone(mesh: Any) -> None:
    """Where one rank alone fails, the others go on, and what they have of its share is NaN."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def failing(*given: Any, **said: Any) -> Any:
        raise MemoryError("of one rank alone")

    parallel = context_parallel(mesh)
    mine = [parallel.shard(x, 2).requires_grad_() for x in operands(13)]
    out = parallel.attention(*mine, length=13)
    with mock.patch.object(Call, "differentiate", failing) if rank == 1 else contextlib.nullcontext():
        if rank == 1:
            with pytest.raises(MemoryError):
                out.sum().backward()
        else:
            out.sum().backward()
            assert all(x.grad.isnan().all() for x in mine[1:])  # type: ignore[union-attr]
    trading = context_parallel(mesh, method="all-to-all")
    mine = [trading.shard(x, 2) for x in operands(13)]
    for _ in range(2):
        with mock.patch.object(way, "attention", failing) if rank == 1 else contextlib.nullcontext():
            if rank == 1:
                with pytest.raises(MemoryError):
                    trading.attention(*mine, length=13, return_lse=True)
            else:
                heads = 4 // ranks
                for result in trading.attention(*mine, length=13, return_lse=True):
                    assert result[:, heads : 2 * heads].isnan().all()
                    assert result[:, :heads].isfinite().all()
        expected = attnswitch.attention(*operands(13))
        ours = trading.unshard(trading.attention(*mine, length=13), 2, 13)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def refused_uneven(mesh: Any) -> None:
    """All ranks refuse rows that were cut out of a length which is not said, and which they do not hold evenly."""
    for method in METHODS:
        parallel = context_parallel(mesh, method=method)
        mine = [parallel.shard(x, 2) for x in operands(13)]
        with pytest.raises(InvalidProblem, match="length=13"):
            parallel.attention(*mine)
        with pytest.raises(InvalidProblem, match="length=13"):
            parallel.unshard(mine[0], 2)
        with pytest.raises(InvalidProblem, match="13"):
            parallel.attention_varlen(*(x[0].swapaxes(0, 1) for x in mine), [0, 13])
        even = [parallel.shard(x, 2) for x in operands(14)]
        assert parallel.unshard(parallel.attention(*even), 2).shape[2] == 14


def trained() -> None:
    """Weights sharded by FSDP2, and rows by ``context_parallel``: gradients are those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    refused_alike(mesh)
    failed_alone(mesh)
    refused_uneven(mesh)
    whole = made(attnswitch.attention)
    torch.manual_seed(1)
    x = torch.randn(2, 47, 32, dtype=torch.float64)
    whole(x).square().sum().backward()
    for method in METHODS:
        parallel = context_parallel(mesh, method=method)
        mine = made(functools.partial(parallel.attention, length=x.shape[1]))
        for block in mine:
            fully_shard(block, mesh=mesh)
        fully_shard(mine, mesh=mesh)
        out = mine(parallel.shard(x, 1))
        torch.testing.assert_close(parallel.unshard(out, 1, x.shape[1]), whole(x).detach())
        (out.square().sum() * ranks).backward()  # of which FSDP takes the mean
        for ours, theirs in zip(mine.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_model_under_fsdp_has_the_gradients_of_one_process() -> None:
    code, output = launched(2, __file__)
    assert code == 0, output[-3000:]


if __name__ == "__main__":
    trained()
    ended()
