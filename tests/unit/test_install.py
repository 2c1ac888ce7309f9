"""attnswitch in place of F.scaled_dot_product_attention, and back."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnswitch
from attnswitch.errors import AttnswitchError, BackendUnavailable, InvalidProblem

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is TORCHS
    assert torch.backends.mha.get_fastpath_enabled()


def operands() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 4, 6, 8).unbind()


def test_install_and_uninstall() -> None:
    q, k, v = operands()
    attnswitch.install()
    assert F.scaled_dot_product_attention is not TORCHS
    with attnswitch.record() as recording:
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attnswitch.uninstall()
    attnswitch.uninstall()
    assert len(recording.problems) == 1
    torch.testing.assert_close(found, TORCHS(q, k, v, is_causal=True))


def test_contexts_nest_and_end_with_errors() -> None:
    q, k, v = operands()
    with attnswitch.installed(backend="tiled"):
        outer = F.scaled_dot_product_attention
        with attnswitch.installed(backend="reference"):
            assert F.scaled_dot_product_attention is not outer
        assert F.scaled_dot_product_attention is outer
        torch.testing.assert_close(outer(q, k, v), TORCHS(q, k, v))
    with pytest.raises(KeyError), attnswitch.installed():
        raise KeyError
    with pytest.raises(InvalidProblem, match="backend 'no-such' is not known"):
        attnswitch.install(backend="no-such")
    with pytest.raises(InvalidProblem, match="policy='no-such'"):
        attnswitch.install(policy="no-such")


def test_the_backend_that_is_named_is_meant() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    q, k, v = operands()
    with attnswitch.installed(backend="sdpa-cudnn"), pytest.raises(BackendUnavailable):
        F.scaled_dot_product_attention(q, k, v)


def test_what_replaced_it_since_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attnswitch.install()
    ours = F.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *_: None)
        for change in (attnswitch.install, attnswitch.uninstall):
            with pytest.raises(AttnswitchError, match="no longer what attnswitch installed"):
                change()
    assert F.scaled_dot_product_attention is ours
    attnswitch.uninstall()


def test_a_kernel_switched_on_after_install_changes_nothing() -> None:
    query = torch.randn(1, 2, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):
        attnswitch.install()
    try:
        with attnswitch.record() as recording:
            F.scaled_dot_product_attention(query, query, query)
        assert recording.problems
    finally:
        attnswitch.uninstall()


def test_installed_again_within_a_choice_of_kernels_calls_go_to_torch() -> None:
    query = torch.randn(1, 2, 4, 8)
    math, outer, inner = sdpa_kernel(SDPBackend.MATH), attnswitch.installed(), attnswitch.installed("tiled")
    with attnswitch.record() as recording, outer, math, inner:
        F.scaled_dot_product_attention(query, query, query)
    assert not recording.problems


def test_torchs_own_kernels_stay_torchs() -> None:
    q, k, v = operands()
    with attnswitch.installed(), attnswitch.record() as recording, sdpa_kernel(SDPBackend.MATH):
        found = F.scaled_dot_product_attention(q, k, v)
    assert not recording.problems
    torch.testing.assert_close(found, TORCHS(q, k, v))


@pytest.mark.parametrize("training", [False, True])
def test_modules_of_torch_go_there(training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x, hidden = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.set_grad_enabled(training):
        expected = layer(x, src_key_padding_mask=hidden)
        with attnswitch.installed(), attnswitch.record() as recording:
            found = layer(x, src_key_padding_mask=hidden)
    assert recording.problems
    torch.testing.assert_close(found[~hidden], expected[~hidden])


def test_a_graph_of_an_installed_program_has_no_break() -> None:
    torch.compiler.reset()
    q, k, v = operands()
    with attnswitch.installed():
        found = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="eager")(q, k, v)
    torch.testing.assert_close(found, TORCHS(q, k, v))


def test_contexts_that_overlap_leave_nothing_behind() -> None:
    """As those of two threads may: the one that began first ends first."""
    first, second, third = attnswitch.installed("tiled"), attnswitch.installed("reference"), attnswitch.installed()
    first.__enter__()
    second.__enter__()
    seconds = F.scaled_dot_product_attention
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is seconds
    third.__enter__()
    attnswitch.install("tiled")
    third.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is seconds
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is TORCHS
    attnswitch.install("tiled")
    base = F.scaled_dot_product_attention
    with attnswitch.installed(), attnswitch.installed():
        assert F.scaled_dot_product_attention is not base
    assert F.scaled_dot_product_attention is base
    attnswitch.uninstall()


def test_threads_install_and_uninstall_together() -> None:
    q, k, v = operands()
    expected, wrong = TORCHS(q, k, v), []

    def work() -> None:
        for _ in range(50):
            with attnswitch.installed():
                pass
            if not torch.allclose(F.scaled_dot_product_attention(q, k, v), expected, atol=1e-5):
                wrong.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attnswitch.uninstall()
    assert not wrong


def test_a_symbolic_trace_records_the_call_that_stands_there() -> None:
    """As it does with torch's function: a proxy is no tensor, and wants to see the call."""

    class Attends(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, key, is_causal=True)

    q, k, _ = operands()
    with attnswitch.installed("tiled"):
        graph = torch.fx.symbolic_trace(Attends())
        (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
        assert node.target is F.scaled_dot_product_attention
        assert node.kwargs == {"is_causal": True}
        with attnswitch.record() as recording:
            found = graph(q, k)
    assert len(recording.problems) == 1
    torch.testing.assert_close(found, TORCHS(q, k, k, is_causal=True))


@pytest.mark.parametrize("wrong", ["dtype", "heads", "dropout", "sparse"])
def test_what_a_program_catches_of_torchs_it_catches_here(wrong: str) -> None:
    q, k, v = operands()
    options: dict[str, Any] = {}
    if wrong == "dtype":
        k = k.double()
    elif wrong == "heads":
        k, v = k[:, :3], v[:, :3]
    elif wrong == "dropout":
        options["dropout_p"] = 1.5
    else:
        options["attn_mask"] = torch.eye(6).to_sparse()
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v, **options)
    with attnswitch.installed(), pytest.raises(RuntimeError) as caught:
        F.scaled_dot_product_attention(q, k, v, **options)
    assert isinstance(caught.value, InvalidProblem)


class Attends(torch.nn.Module):
    """It keeps the function that stands there when it is made, as models do whose attention can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.attend(query, key, key, is_causal=True)


def test_a_module_that_holds_the_function_is_pickled() -> None:
    q, k, _ = operands()
    with attnswitch.installed("tiled"):
        again = pickle.loads(pickle.dumps(Attends()))
        assert again.attend is F.scaled_dot_product_attention
        text = pickle.dumps(Attends())
    elsewhere = pickle.loads(text)  # in a process that has not installed it
    assert elsewhere.attend is TORCHS
    torch.testing.assert_close(again(q, k), elsewhere(q, k))


class Scripted(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=mask is None, scale=0.3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")  # torch's own
@pytest.mark.parametrize("traced", [False, True])
def test_what_jit_records_is_torchs(traced: bool) -> None:
    """It records operators of torch's; a program that needs them still runs."""
    q, k, _ = operands()
    module, others = Scripted(), torch.randn(2, 3, 2, 7, 8).unbind()
    expected = module(q, k), module(*others)
    with attnswitch.installed():
        F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3)  # a launch is known
        graph: Any = torch.jit.trace(module, (q, k)) if traced else torch.jit.script(module)  # type: ignore[no-untyped-call]
        with attnswitch.record() as recording:
            found = graph(q, k), graph(*others)
    assert "aten::scaled_dot_product_attention" in str(graph.graph)
    assert not recording.problems
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_layers_of_torch_are_scripted() -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    with attnswitch.installed():
        found = torch.jit.script(layer)(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_jagged_result_is_padded_as_its_query_is(causal: bool) -> None:
    """What a nested tensor knows of its lengths goes with the result: the longest says how wide it is padded."""

    rows = [torch.linspace(-1, 1, n * 32).reshape(n, 4, 8) for n in (3, 5, 2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    out = attnswitch.scaled_dot_product_attention(nested, nested, nested, is_causal=causal)
    found = out.transpose(1, 2).to_padded_tensor(0.0)
    assert found.shape == (3, 5, 4, 8)
    for row, one in zip(rows, found, strict=True):
        x = row.transpose(0, 1)[None]
        expected = TORCHS(x, x, x, is_causal=causal)[0].transpose(0, 1)
        torch.testing.assert_close(one[: len(row)], expected)
        assert not one[len(row) :].any()


def test_torchs_flag_makes_calls_deterministic() -> None:
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    rows = x[0].transpose(0, 1)
    torch.use_deterministic_algorithms(True)
    try:
        with attnswitch.installed(), attnswitch.record() as recording:
            F.scaled_dot_product_attention(x, x, x)
            attnswitch.attention(x, x, x)
            attnswitch.attention_varlen(rows, rows, rows, [0, 4], [0, 4])
        assert len(recording.problems) == 2
        assert all(problem.deterministic for problem in (*recording.problems, attnswitch.plan(x, x, x).problem))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not attnswitch.plan(x, x, x).problem.deterministic


def test_torchs_context_parallel_keeps_its_ring() -> None:
    """It gives the function parts of rows, which by themselves are another call."""
    script = """
import torch, torch.distributed as dist, torch.nn.functional as F, attnswitch
from attnswitch.call.torch_modes import rings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
endings = []
for install in (False, True):
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    if install:
        attnswitch.install()
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        assert rings()
        try:
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        except Exception as error:
            endings.append(type(error).__name__)
    assert not rings()
assert endings == ["NotImplementedError"] * 2, endings
"""
    subprocess.run([sys.executable, "-c", script], check=True)
