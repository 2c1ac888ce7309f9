"""attention of DTensors, and in modules that torch distributes: two processes, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import ended
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import attnswitch
from attnswitch.errors import InvalidProblem, Unsupported

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
MASK = {"bias": (4, 3, 9, 9), "shared bias": (1, 1, 9, 9), "rows": (9, 9)}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "batch": (Shard(0), "", {"is_causal": True, "return_lse": True}),
    "heads": (Shard(1), "", {"softcap": 3.0, "return_lse": True}),
    "heads that cannot be divided": (Shard(1), "", {"is_causal": True}),
    "keys and queries": (Shard(2), "", {"window": (2, 0)}),
    "whole": (Replicate(), "", {"is_causal": True}),
    "mask by batch": (Shard(0), "bias", {}),
    "mask that the batch shares": (Shard(0), "shared bias", {}),
    "mask that heads share": (Shard(1), "rows", {}),
    "lengths": (Shard(0), "", {"key_lengths": [9, 3, 1, 5]}),
    "heads inside": (Shard(2), "", {"layout": "BLHD", "return_lse": True}),
    "dropout": (Shard(0), "", {"dropout_p": 0.5, "seed": 7}),
    "slopes": (Shard(1), "", {"is_causal": True, "alibi_slopes": [0.5, -0.25, 0.0, 2.0], "return_lse": True}),
    "slopes by batch": (Shard(0), "", {"alibi_slopes": torch.arange(16.0).view(4, 4) / 8}),
}


def operands(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shared = 1 if "divided" in name else 2
    heads = (3, 1) if "divided" in name else (4, shared)
    shapes = [(4, heads[0], 9, 8), (4, heads[1], 9, 8), (4, heads[1], 9, 8)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.transpose(1, 2).contiguous() for x in made] if "inside" in name else made


def mask_of(kind: str, heads: int) -> torch.Tensor | None:
    if not kind:
        return None
    shape = tuple(heads if size == 3 else size for size in MASK[kind])
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def results(name: str, tensors: list[Any], mask: Any, keywords: dict[str, Any]) -> list[Any]:
    """Output, lse and gradients."""
    leaves = [x.detach().requires_grad_() for x in (*tensors, *(() if mask is None else (mask,)))]
    found = attnswitch.attention(*leaves[:3], attn_mask=leaves[3] if mask is not None else None, **keywords)
    parts = found if isinstance(found, tuple) else (found,)
    loss = sum((part * part).sum() for part in parts)
    return [*parts, *torch.autograd.grad(loss, leaves)]


def check_cases(mesh: Any) -> None:
    for name, (placement, kind, keywords) in CASES.items():
        tensors = operands(name)
        mask = mask_of(kind, tensors[0].shape[1])
        expected = results(name, tensors, mask, keywords)
        if "key_lengths" in keywords:
            keywords = {**keywords, "key_lengths": distribute_tensor(torch.tensor(keywords["key_lengths"]), mesh)}
        if "by batch" in name and "alibi_slopes" in keywords:
            keywords = {**keywords, "alibi_slopes": distribute_tensor(keywords["alibi_slopes"], mesh)}
        spread = [distribute_tensor(x, mesh, [Replicate() if x.shape[1] == 1 else placement]) for x in tensors]
        shared = None if mask is None else distribute_tensor(mask, mesh, [Replicate()])
        found = results(name, spread, shared, keywords)
        stays = name in ("batch", "heads", "heads inside", "mask by batch", "mask that the batch shares")
        if stays:
            assert found[0].placements == (placement,), name
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
            assert isinstance(ours, DTensor), name
            torch.testing.assert_close(ours.full_tensor(), theirs, msg=f"{name}: result {number}")


def check_compiled(mesh: Any) -> None:
    """One graph without a break, each process of its own part."""
    for name in ("batch", "heads", "keys and queries", "heads inside", "slopes", "slopes by batch"):
        placement, _, keywords = CASES[name]
        tensors = operands(name)
        torch.compiler.reset()
        attend = torch.compile(attnswitch.attention, fullgraph=True, backend="aot_eager")
        leaves = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in tensors]
        found = attend(*leaves, **keywords)
        parts = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad(sum((part * part).sum() for part in parts), leaves)
        for ours, theirs in zip((*parts, *grads), results(name, tensors, None, keywords), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, msg=name)


class Layer(torch.nn.Module):
    """Self-attention of one projection."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.into, self.attend = torch.nn.Linear(16, 48, dtype=torch.float64), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        out: torch.Tensor = self.attend(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def check_modules(mesh: Any) -> None:
    """DistributedDataParallel and fully_shard, half of the batch in each process."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine = x.chunk(2)[dist.get_rank()]
    grads = []
    for way in ("alone", "replicated", "sharded"):
        torch.manual_seed(3)
        attend: Any = torch.nn.functional.scaled_dot_product_attention if way == "alone" else attnswitch.attention
        layer: Any = Layer(attend)
        wrapped = DistributedDataParallel(layer) if way == "replicated" else layer
        if way == "sharded":
            fully_shard(layer, mesh=mesh)
        (wrapped(x if way == "alone" else mine).square().sum() / (2 if way == "alone" else 1)).backward()
        grad = layer.into.weight.grad
        grads.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def begin(rank: int, world: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def process(rank: int, world: int, store: str) -> None:
    begin(rank, world, store)
    mesh = init_device_mesh("cpu", (world,))
    check_cases(mesh)
    check_compiled(mesh)
    check_modules(mesh)


@pytest.mark.slow
def test_two_processes_give_what_one_does(tmp_path: Path) -> None:
    """This file as a program: pytest's own name of it cannot be imported in another process."""
    world, store = 2, str(tmp_path / "store")
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(world), store], stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(errors)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    begin(0, 1, str(tmp_path / "store"))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_mesh_of_one_process(mesh: Any) -> None:
    check_cases(mesh)


def test_a_graph_of_a_mesh_of_one_process(mesh: Any) -> None:
    check_compiled(mesh)


def test_operands_that_are_no_dtensors_are_refused(mesh: Any) -> None:
    q, k, v = (distribute_tensor(x, mesh) for x in operands("whole"))
    with pytest.raises(InvalidProblem, match="attn_mask is no DTensor"):
        attnswitch.attention(q, k, v, attn_mask=torch.zeros(9, 9, dtype=torch.float64))
    with pytest.raises(InvalidProblem, match="query is no DTensor"):
        attnswitch.attention(q.to_local(), k, v)
    with pytest.raises(InvalidProblem, match="query is no DTensor"):
        attnswitch.attention(
            q.to_local(), k.to_local(), v.to_local(), key_lengths=distribute_tensor(torch.ones(4), mesh)
        )
    with pytest.raises(InvalidProblem, match=r"torch\.tensor\(key_lengths\)"):
        attnswitch.attention(q, k, v, key_lengths=[9, 9, 9, 9])
    slopes = distribute_tensor(torch.ones(4), mesh)
    with pytest.raises(InvalidProblem, match="query is no DTensor"):
        attnswitch.attention(q.to_local(), k.to_local(), v.to_local(), alibi_slopes=slopes)
    row = distribute_tensor(torch.randn(8), mesh)
    with pytest.raises(InvalidProblem, match=r"query has shape .*expected four axes"):
        attnswitch.attention(row, row, row)
    with pytest.raises(Unsupported, match=r"dropout_p=0\.5 of DTensors"):
        attnswitch.attention(q, k, v, dropout_p=0.5)


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    ended()
