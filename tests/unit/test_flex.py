"""FlexAttention: what its functions of indices say, as torch interprets them, and one call that is compiled."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import attnswitch
from attnswitch.machine import registry
from attnswitch.machine.backend import Config, Inputs
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

flex_module: Any = importlib.import_module("torch.nn.attention.flex_attention")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    backend = importlib.import_module("attnswitch.backends.installed.flex")
    monkeypatch.setattr(backend, "compiled", lambda function: function)


@pytest.mark.parametrize(
    "said",
    [
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"window": (3, None), "causal_alignment": "bottom_right"},
        {"key_lengths": [4, 0, 11], "is_causal": True, "causal_alignment": "bottom_right"},
        {"key_lengths": [4, 0, 11], "window": (2, 1)},
        {"alibi_slopes": [0.5, 0.25, 0.125, 1.0], "causal_alignment": "bottom_right"},
        {"alibi_slopes": [0.5, 0.25, 0.125, 1.0], "softcap": 3.0, "key_lengths": [4, 1, 11]},
        {"scale": -0.3},
        {"softcap": 2.0, "scale": 0.0},
    ],
)
@pytest.mark.parametrize(
    "mask",
    [
        None,
        *(("bool", shape) for shape in ((7, 11), (1, 1, 1, 11), (3, 1, 7, 11), (1, 4, 7, 1))),
        *(("float", shape) for shape in ((7, 11), (3, 1, 7, 11))),
    ],
    ids=str,
)
def test_all_that_is_given_applies_together(
    said: dict[str, Any], mask: tuple[str, tuple[int, ...]] | None, interpreted: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, h, n, 16, generator=generator) for h, n in ((4, 7), (2, 11), (2, 11)))
    if mask is not None:
        kind, shape = mask
        drawn = torch.randn(shape, generator=generator)
        said = {**said, "attn_mask": drawn > 0 if kind == "bool" else drawn}
    out = attnswitch.attention(query, key, value, backend="torch-flex", **said)
    torch.testing.assert_close(out, attnswitch.attention(query, key, value, backend="tiled", **said))


def test_the_lse_has_base_e_and_is_differentiable(interpreted: None) -> None:
    """As on a GPU, whose template the interpreter stands for; the CPU's compiled one has neither."""
    problem = Problem.parse("b2.h2.s5x9.d16.fp32.causal.lse")
    kernel = registry.loaded("torch-flex").compile(problem, Device.named("h100"), Config())
    query, key, value = (torch.randn(2, 2, n, 16) for n in (5, 9, 9))
    out, lse = kernel.forward(Inputs(query, key, value))
    expected = attnswitch.attention(query, key, value, is_causal=True, return_lse=True, backend="tiled")
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_blocks_of_positions_are_made_once(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    create = flex_module.create_block_mask

    def noted(*said: Any, **options: Any) -> Any:
        made.append(said)
        return create(*said, **options)

    monkeypatch.setattr(flex_module, "create_block_mask", noted)
    problem = Problem.parse("b2.h2.s6.d16.fp32.causal")
    lengths = problem.replace(key_lengths=True)
    query, key, value = (torch.randn(2, 2, 6, 16) for _ in range(3))
    for wanted, beside in ((problem, None), (lengths, torch.tensor([2, 6]))):
        made.clear()
        kernel = registry.loaded("torch-flex").compile(wanted, Device.cpu(), Config())
        for _ in range(3):
            kernel.forward(Inputs(query, key, value, key_lengths=beside))
        assert len(made) == (1 if beside is None else 3)
        assert made[0][1:3] == ((None, None) if beside is None else (2, None))


@pytest.mark.slow
def test_a_compiled_call_serves_every_mask_of_its_shape() -> None:
    """It takes half a minute."""
    query, key, value = (torch.randn(2, h, n, 32) for h, n in ((4, 40), (2, 70), (2, 70)))
    before = counters["stats"]["unique_graphs"]
    for lengths in ([70, 33], [12, 0]):
        said: dict[str, Any] = {
            "attn_mask": (torch.rand(2, 1, 40, 140) > 0.4)[..., ::2],  # the compiler has no loads in steps
            "key_lengths": torch.tensor([lengths[0], 0, lengths[1], 0])[::2],
            "is_causal": True,
            "causal_alignment": "bottom_right",
            "softcap": 5.0,
        }
        out = attnswitch.attention(query, key, value, backend="torch-flex", **said)
        torch.testing.assert_close(out, attnswitch.attention(query, key, value, backend="tiled", **said))
        assert not math.isnan(float(out.sum()))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "uint64"])
def test_lengths_of_every_integer_type(dtype: str, interpreted: None) -> None:
    query, key, value = (torch.randn(3, h, n, 16) for h, n in ((4, 140), (2, 11), (2, 11)))
    lengths = torch.tensor([4, 0, 11])
    said: dict[str, Any] = {"causal_alignment": "bottom_right", "alibi_slopes": [0.5, 0.25, 0.125, 1.0]}
    for call in (said, said | {"window": (140, 3)}):
        by_type, right = (
            attnswitch.attention(query, key, value, key_lengths=each, backend="torch-flex", **call)
            for each in (lengths.to(getattr(torch, dtype)), lengths)
        )
        torch.testing.assert_close(by_type, right, rtol=0.0, atol=0.0)
