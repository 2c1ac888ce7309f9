"""attnswitch as one of torch's implementations of flash attention: here for the CPU, which has none of its own."""

from __future__ import annotations

import contextlib
import functools
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
from torch.nn import attention as of_torch

import attnswitch
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.integrations import flash
from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

pytestmark = pytest.mark.skipif(
    not hasattr(of_torch, "register_flash_attention_impl"), reason="torch has no registry of flash attention"
)
BOTTOM: dict[str, Any] = {"causal_alignment": "bottom_right"}
LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads outside": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "a slice": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


@pytest.fixture
def replaced() -> Iterator[None]:
    handle = flash.replaced(dict(BOTTOM), "CPU")
    yield
    handle.remove()


def operands(lies: str = "heads outside", queries: int = 9, heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, queries, 8), (2, heads, 11, 8), (2, heads, 11, 8)
    return [LIES[lies](torch.randn(shape, dtype=torch.float32)).requires_grad_() for shape in shapes]


def operator(*given: Any, **options: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(*given, **options)


def results(found: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [found, *torch.autograd.grad(found, leaves, torch.cos(torch.arange(found.numel()).reshape(found.shape)))]


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_output_lse_and_gradients(replaced: None, lies: str, heads: int, options: dict[str, Any]) -> None:
    leaves = operands(lies, heads=heads)
    out, lse, *_ = operator(*leaves, **options)
    attend: Any = attnswitch.attention
    expected, exact = attend(*leaves, **options, **BOTTOM, return_lse=True, backend="reference")
    torch.testing.assert_close(lse, exact)
    for ours, theirs in zip(results(out, leaves), results(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("lies", LIES)
def test_results_lie_as_a_graph_expects(replaced: None, lies: str) -> None:
    leaves = operands(lies)

    def step(*given: torch.Tensor) -> Any:
        out = operator(*given)[0]
        return out, *torch.autograd.grad(out.sum(), given)

    found = step(*leaves)
    planned = [x.stride() for x in step(*(x.detach().to("meta").requires_grad_() for x in leaves))]
    assert [x.stride() for x in found] == planned
    compiled = torch.compile(lambda *x: operator(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), found[0] * 2)


def test_dropout_is_the_same_backward(replaced: None) -> None:
    leaves = operands()
    found = operator(*leaves, 0.5)
    seed = int(found[6][0])
    assert found[6].shape == (2,)
    for ours, theirs in zip(
        results(found[0], leaves), results(attnswitch.attention(*leaves, dropout_p=0.5, seed=seed), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert int(operator(*leaves, 0.5)[6][0]) != seed


def test_weights_are_refused(replaced: None) -> None:
    with pytest.raises(Unsupported, match="return_debug_mask"):
        operator(*operands(), 0.5, False, True)


def test_a_handle_gives_back_once() -> None:
    handle = flash.replaced(dict(BOTTOM), "CPU")
    handle.remove()
    handle.remove()
    with pytest.raises(NotImplementedError):
        operator(*operands())


# -- torch's registry --------------------------------------------------------------------------------------------------


@pytest.fixture
def activated() -> Iterator[None]:
    flash.register()
    of_torch.activate_flash_attention_impl(flash.NAME)
    yield
    of_torch.restore_flash_attention_impl()
    assert of_torch.current_flash_attention_impl() is None


def kernel_of(name: str) -> str:
    return str(torch._C._dispatch_dump(f"aten::{name}"))


def test_torch_knows_it_by_name(activated: None) -> None:
    assert flash.NAME in of_torch.list_flash_attention_impls()
    assert of_torch.current_flash_attention_impl() == flash.NAME
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        assert "integrations/flash" in kernel_of(name).replace("\\", "/")


def test_what_is_no_longer_flashattention_2_is_refused(activated: None) -> None:
    problem = Problem(batch=1, heads_q=8, heads_kv=8, seq_q=512, seq_k=512, dim_qk=64, dim_v=64, dtype="float16")
    gpu = Device("cuda", "NVIDIA H100", (9, 0))
    flash_2: Any = registry.load("sdpa-flash")
    assert any("attnswitch" in reason for reason in flash_2.reasons(problem, gpu))
    planned = functools.partial(attnswitch.plan, problem, device="h200", backend="sdpa-flash")
    with pytest.raises(Unsupported, match="flash attention is attnswitch now"):
        planned()
    of_torch.restore_flash_attention_impl()
    assert planned().backend == "sdpa-flash"
    assert not any("attnswitch" in reason for reason in flash_2.reasons(problem, gpu))
    of_torch.activate_flash_attention_impl(flash.NAME)


def test_registered_for_a_backend() -> None:
    with pytest.raises(InvalidProblem, match="nothing"):
        flash.register("nothing")
    with pytest.raises(InvalidProblem, match="sometimes"):
        flash.register(policy="sometimes")
    leaves = operands()
    for backend, same in (("tiled", True), ("sdpa-math", False)):
        handle = flash.replaced({**BOTTOM, "backend": backend}, "CPU")
        expected = attnswitch.attention(*leaves, backend="tiled")
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(handle.remove)
            if same:
                assert torch.equal(operator(*leaves)[0], expected)
            else:
                with pytest.raises(Unsupported, match="sdpa-math"):  # which returns no lse
                    operator(*leaves)


# -- torch's context parallelism: two processes ------------------------------------------------------------------------


def ring(rank: int, world: int, store: str) -> None:
    """A causal problem whose queries and keys are split over processes, by torch's ring, against one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as parallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    handle = flash.replaced(dict(BOTTOM), "CPU")
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 16, 8).requires_grad_() for _ in range(3)]
    expected = results(attnswitch.attention(*whole, is_causal=True), whole)
    parallel._cp_options.enable_load_balance = False
    parallel._enable_context_parallel_dispatcher_impl(seq_dim=2, mesh=mesh)
    split = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole]
    out = operator(*split, 0.0, True)[0]
    upstream = torch.cos(torch.arange(expected[0].numel()).reshape(expected[0].shape))
    grads = torch.autograd.grad(out, split, distribute_tensor(upstream, mesh, [Shard(2)]))
    for ours, theirs in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
    handle.remove()
    dist.barrier()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_torchs_ring_runs_on_it(tmp_path: Path) -> None:
    """This file as a program: pytest's own name of it cannot be imported in another process."""
    store = str(tmp_path / "store")
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), "2", store], stderr=subprocess.PIPE) for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    ring(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    ended()
