"""Calls that make no sense: the message names what was asked, and no backend was asked to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_upper_left

import attnswitch
from attnswitch import Gradients, InvalidProblem, Problem
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Config, Inputs, Kernel, Precision
from attnswitch.machine.device import Device


class Spy(Backend):
    """The tiled backend, which notes everything that it is asked to do."""

    name: ClassVar[str] = "spy"
    library: ClassVar[str] = "numpy"
    autograd: ClassVar[bool] = False
    done: ClassVar[list[str]] = []

    def __init__(self) -> None:
        tiled = registry.loaded("tiled")
        self.tiled = tiled

    def unavailable(self) -> str | None:
        return None

    def reasons(self, problem: Problem, device: Device) -> Any:
        return ()

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        return self.tiled.configs(problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        return self.tiled.precision(problem, device)

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        self.done.append("compile")
        return SpyKernel(self.tiled.compile(problem, device, config))


class SpyKernel(Kernel):
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        Spy.done.append("forward")
        return self.kernel.forward(inputs)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        Spy.done.append("backward")
        return self.kernel.backward(inputs, out, lse, grad_out, grad_lse)


@pytest.fixture(autouse=True)
def spied(register: Callable[[str, str], None]) -> list[str]:
    register("spy", f"{__name__}:Spy")
    Spy.done.clear()
    return Spy.done


rng = np.random.default_rng(0)
Q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
K = rng.standard_normal((2, 2, 5, 8)).astype(np.float32)
V = rng.standard_normal((2, 2, 5, 6)).astype(np.float32)
G = rng.standard_normal((2, 4, 3, 6)).astype(np.float32)
TQ, TK, TV = (torch.from_numpy(x) for x in (Q, K, V))


def test_the_spy_sees_what_runs(spied: list[str]) -> None:
    attnswitch.attention(Q, K, V)
    attnswitch.attention_backward(G, Q, K, V)
    assert spied == ["compile", "forward", "compile", "forward", "backward"]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"scale": math.nan}, r"scale=nan"),
    ({"scale": -math.inf}, r"scale=-inf"),
    ({"scale": "0.5"}, r"scale='0\.5'"),
    ({"scale": True}, r"scale=True"),
    ({"scale": np.True_}, r"scale=.*True"),
    ({"scale": np.str_("0.5")}, r"scale=.*0\.5"),
    ({"scale": np.array("fast")}, r"scale=.*fast"),
    ({"scale": 1j}, r"scale=1j"),
    ({"scale": np.array(1j)}, r"scale=.*1\.?j"),
    ({"scale": 10**400}, r"scale="),
    ({"scale": torch.tensor(0.5, requires_grad=True)}, r"scale=.*requires_grad"),
    ({"scale": np.array([1.0, 2.0])}, r"scale=array"),
    ({"softcap": -1.0}, r"softcap=-1\.0"),
    ({"softcap": math.nan}, r"softcap=nan"),
    ({"softcap": None}, r"softcap=None"),
    ({"dropout_p": -0.1}, r"dropout_p=-0\.1"),
    ({"dropout_p": 1.1}, r"dropout_p=1\.1"),
    ({"dropout_p": math.nan}, r"dropout_p=nan"),
    ({"dropout_p": "0.1"}, r"dropout_p='0\.1'"),
    ({"dropout_p": True}, r"dropout_p=True"),
    ({"is_causal": 1}, r"is_causal=1: expected True or False"),
    ({"is_causal": "yes"}, r"is_causal='yes'"),
    ({"return_lse": None}, r"return_lse=None"),
    ({"deterministic": 0}, r"deterministic=0"),
    ({"enable_gqa": False}, r"\(2, 4, 3, 8\).*\(2, 2, 5, 8\).*enable_gqa=False forbids"),
    ({"enable_gqa": 0}, r"enable_gqa=(0|False)"),
    ({"enable_gqa": "no"}, r"enable_gqa='no'"),
    ({"causal_alignment": "centre"}, r"causal_alignment='centre': expected one of top_left, bottom_right"),
    ({"causal_alignment": None}, r"causal_alignment=None"),
    ({"layout": "BHDL"}, r"layout='BHDL': expected one of BHLD, BLHD"),
    ({"layout": "bhld"}, r"layout='bhld'"),
    ({"layout": None}, r"layout=None"),
    ({"window": (-1, 0)}, r"window=\(-1, 0\).*None for unlimited"),
    ({"window": (0, -1)}, r"window=\(0, -1\)"),
    ({"window": (0.5, None)}, r"window=\(0\.5, None\)"),
    ({"window": (1,)}, r"window=\(1,\)"),
    ({"window": 4}, r"window=4"),
    ({"window": "12"}, r"window='12'"),
    ({"seed": -1}, r"seed=-1: expected an integer from 0 to 2\*\*64 - 1"),
    ({"seed": 2**64}, r"seed=18446744073709551616"),
    ({"seed": 1.0}, r"seed=1\.0: expected an integer"),
    ({"seed": "1"}, r"seed='1'"),
    ({"backend": "fastest"}, r"backend 'fastest' is not known; expected one of spy, .*tiled, reference"),
    ({"backend": ""}, r"backend '' is not known"),
    ({"backend": ["tiled"]}, r"backend.*\['tiled'\]"),
    ({"key_lengths": 5}, r"key_lengths=5: expected 2 integers"),
    ({"key_lengths": "35"}, r"key_lengths='35': expected 2 integers"),
    ({"key_lengths": [3.0, 5.0]}, r"key_lengths=\[3\.0, 5\.0\]: expected 2 integers"),
    ({"key_lengths": [3]}, r"key_lengths has shape \(1,\): expected \(2,\)"),
    ({"key_lengths": np.array([[3], [5]])}, r"key_lengths has shape \(2, 1\): expected \(2,\)"),
    ({"key_lengths": np.array([3.0, 5.0])}, r"key_lengths has dtype float64: expected integers"),
    ({"key_lengths": np.array([True, True])}, r"key_lengths has dtype bool: expected integers"),
    ({"key_lengths": [3, 6]}, r"key_lengths holds 6: expected 0 to Lk = 5"),
    ({"key_lengths": np.array([-1, 5], np.int8)}, r"key_lengths holds -1: expected 0 to Lk = 5"),
    ({"key_lengths": [2**64, 5]}, r"key_lengths holds 18446744073709551616"),
    ({"key_lengths": torch.tensor([3, 5])}, r"key_lengths is a torch array .* query a numpy array"),
    ({"attn_mask": [[True] * 5] * 3}, r"attn_mask is a list"),
    ({"attn_mask": np.ones((3, 5), np.int64)}, r"attn_mask has dtype int64: expected bool"),
    ({"attn_mask": np.ones((5, 3), np.bool_)}, r"attn_mask has shape \(5, 3\): .*\(2, 4, 3, 5\)"),
    ({"attn_mask": np.ones((2, 2, 3, 5), np.bool_)}, r"attn_mask has shape \(2, 2, 3, 5\): .*\(2, 4, 3, 5\)"),
    ({"attn_mask": np.ones((1, 2, 4, 3, 5), np.bool_)}, r"attn_mask has shape \(1, 2, 4, 3, 5\)"),
    ({"attn_mask": np.array(True)}, r"attn_mask has shape \(\)"),
    ({"attn_mask": np.ones((3, 0), np.bool_)}, r"attn_mask has shape \(3, 0\)"),
    ({"attn_mask": np.ma.masked_array(np.zeros((3, 5)), True)}, r"attn_mask is a NumPy masked array"),
    ({"attn_mask": torch.ones(3, 5)}, r"attn_mask is a torch array .* query a numpy array"),
    ({"attn_mask": np.ones((3, 5), ">f4")}, r"attn_mask has the byte order of another machine \(>f4\)"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(options)[:50] for options, _ in OPTIONS])
def test_an_option_that_makes_no_sense(options: dict[str, Any], message: str, spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.attention(Q, K, V, **options)
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.plan(Q, K, V, **options)
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.attention_backward(G, Q, K, V, **({"seed": 0} | options))
    assert spied == []


ARRAYS: list[tuple[str, tuple[Any, Any, Any], str]] = [
    ("lists", (Q.tolist(), K.tolist(), V.tolist()), r"query is a list: expected an array"),
    ("none", (Q, None, V), r"key is a NoneType|query stands without key and value"),
    ("scalars", (np.float32(1), K, V), r"query is a float32"),
    ("rank 3", (Q[0], K[0], V[0]), r"query has shape \(4, 3, 8\): expected four axes, B, H, L, D"),
    ("rank 5", (Q, K[None], V), r"key has shape \(1, 2, 2, 5, 8\): expected four axes"),
    ("batch", (Q[:1], K, V), r"query \(1, 4, 3, 8\), key \(2, 2, 5, 8\).*batch of query, key and value must agree"),
    ("value heads", (Q, K, V[:, :1]), r"value \(2, 1, 5, 6\).*head count of key and value must agree"),
    ("query heads", (Q[:, :3], K, V), r"query has 3 heads and key has 2: .*multiple"),
    ("fewer heads", (Q[:, :1], K, V), r"query has 1 heads and key has 2: .*multiple"),
    ("no heads", (Q[:, :0], K, V), r"heads_q=0"),
    ("length", (Q, K, V[:, :, :4]), r"value \(2, 2, 4, 6\).*length of key and value must agree"),
    ("dimension", (Q, K[..., :7], V), r"key \(2, 2, 5, 7\).*head dimension of query and key must agree"),
    ("D = 0", (Q[..., :0], K[..., :0], V), r"dim_qk=0: expected an integer of at least 1"),
    ("libraries", (Q, TK, V), r"differ in library: numpy, torch and numpy"),
    ("devices", (TQ, TK.to("meta"), TV), r"differ in device: cpu:0, meta:0 and cpu:0"),
    ("dtypes", (Q, K, V.astype(np.float64)), r"differ in dtype: float32, float32 and float64"),
    ("integers", (Q.astype(int), K.astype(int), V.astype(int)), r"dtype int64: expected one of float16"),
    ("complex", (TQ + 0j, TK + 0j, TV + 0j), r"dtype complex64: expected one of float16"),
    ("long double", tuple(x.astype(np.longdouble) for x in (Q, K, V)), r"dtype \w+: expected one of float16"),  # type: ignore[list-item]
    ("masked", (np.ma.masked_array(Q), K, V), r"query is a NumPy masked array, whose mask would be lost"),
    ("byte order", (Q, K.astype(">f4"), V), r"key has the byte order of another machine \(>f4\)"),
    ("sparse", (TQ, TK, TV.to_sparse()), r"value is a torch\.sparse_coo tensor"),
    ("nested", (torch.nested.nested_tensor([TQ[0]], layout=torch.jagged), TK, TV), r"query is a .*tensor.*dense"),
]


@pytest.mark.parametrize(("operands", "message"), [case[1:] for case in ARRAYS], ids=[case[0] for case in ARRAYS])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_arrays_that_make_no_sense(operands: Any, message: str, layout: str, spied: list[str]) -> None:
    if layout == "BLHD":
        operands = [x.swapaxes(1, 2) if getattr(x, "ndim", 0) == 4 and not _odd(x) else x for x in operands]
        message = message.replace("B, H, L, D", "B, L, H, D")
    for function in (attnswitch.attention, attnswitch.explain):
        with pytest.raises(InvalidProblem, match=message):
            function(*operands, layout=layout)
    assert spied == []


def _odd(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_nested or x.layout is not torch.strided)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(3, 5, device="meta")}, r"attn_mask is a torch array on meta:0"),
        ({"key_lengths": torch.tensor([1, 2], device="meta")}, r"key_lengths is a torch array on meta:0"),
        ({"attn_mask": torch.ones(3, 5).to_sparse()}, r"attn_mask is a torch\.sparse_coo tensor"),
        ({"attn_mask": torch.ones(3, 5, dtype=torch.uint8)}, r"attn_mask has dtype uint8"),
        ({"key_lengths": np.array([1, 2])}, r"key_lengths is a numpy array"),
        ({"attn_mask": causal_upper_left(3, 5)}, r"attn_mask is a CausalBias, .*: pass is_causal=True"),
    ],
)
def test_companions_of_tensors(options: dict[str, Any], message: str, spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.attention(TQ, TK, TV, **options)
    assert spied == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
def test_a_masked_tensor_would_lose_its_mask(spied: list[str]) -> None:
    masked = masked_tensor(torch.ones(3, 5), torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(InvalidProblem, match="attn_mask is a MaskedTensor, whose mask would be lost"):
        attnswitch.attention(TQ, TK, TV, attn_mask=masked)
    assert spied == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")  # torch's own, by make_dual
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_forward_mode_follows(name: str, spied: list[str]) -> None:
    """Its tangent would be lost."""
    one = torch.tensor(0.5)
    with pytest.raises(InvalidProblem, match=f"{name} is inside torch.func"):
        torch.func.jvp(lambda x: attnswitch.attention(TQ, TK, TV, **{name: x}), (one,), (one,))
    with forward_ad.dual_level(), pytest.raises(InvalidProblem, match=f"{name} is inside torch.func or forward mode"):
        attnswitch.attention(TQ, TK, TV, **{name: forward_ad.make_dual(one, one)})  # type: ignore[no-untyped-call]
    assert spied == []


def test_a_keyword_that_is_not_known(spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match=r"attention: .*'is_casual'.*; the keywords are those of attention"):
        attnswitch.attention(Q, K, V, is_casual=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match=r"the call .*'is_casual'.*; the keywords are those of attention"):
        attnswitch.plan(Q, K, V, is_casual=True)
    with pytest.raises(InvalidProblem, match=r"attention_backward: .*'is_casual'.*; the keywords are those of"):
        attnswitch.attention_backward(G, Q, K, V, is_casual=True)
    with pytest.raises(InvalidProblem, match="a described problem stands alone"):
        attnswitch.plan("b1.h1.s4.d8.fp32", is_causal=True)  # type: ignore[call-overload]
    assert spied == []


def test_no_argument_of_plan_is_dropped(spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match="device"):
        attnswitch.plan(Q, K, V, device="h200")
    assert spied == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.5}, r"dropout needs the seed"),
        ({"mask_grad": True}, r"gradient of attn_mask was asked for, but there is no float attn_mask"),
        ({"mask_grad": True, "attn_mask": np.ones((3, 5), np.bool_)}, r"there is no float attn_mask"),
        ({"grad_lse": G}, r"grad_lse has shape \(2, 4, 3, 6\): expected \(2, 4, 3\)"),
        ({"grad_lse": torch.ones(2, 4, 3)}, r"grad_lse is a torch array"),
        ({"out": G[:1], "lse": G[..., 0]}, r"out has shape \(1, 4, 3, 6\): expected \(2, 4, 3, 6\)"),
        ({"out": G, "lse": G}, r"lse has shape \(2, 4, 3, 6\): expected \(2, 4, 3\)"),
    ],
)
def test_a_backward_that_makes_no_sense(options: dict[str, Any], message: str, spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.attention_backward(G, Q, K, V, **options)
    assert not {"forward", "backward"} & set(spied)


@pytest.mark.parametrize(
    ("grad_out", "message"),
    [
        (G[:1], r"grad_out has shape \(1, 4, 3, 6\): expected \(2, 4, 3, 6\)"),
        (G.swapaxes(1, 2), r"grad_out has shape \(2, 3, 4, 6\): expected \(2, 4, 3, 6\)"),
        (torch.from_numpy(G), r"grad_out is a torch array"),
        (G.tolist(), r"grad_out is a list"),
        (np.ma.masked_array(G), r"grad_out is a NumPy masked array"),
        (G + 1j, r"grad_out has dtype complex64: expected one of float16, "),
        (G.astype(np.int32), r"grad_out has dtype int32"),
    ],
)
def test_an_upstream_gradient_that_makes_no_sense(grad_out: Any, message: str, spied: list[str]) -> None:
    with pytest.raises(InvalidProblem, match=message):
        attnswitch.attention_backward(grad_out, Q, K, V)
    assert not {"forward", "backward"} & set(spied)


@pytest.mark.parametrize("grad_out", [G[0], G[0, 0], G[0, 0, 0], G[None]])
def test_an_upstream_gradient_of_another_rank(grad_out: Any) -> None:
    operands = (array.swapaxes(1, 2) for array in (Q, K, V))
    with pytest.raises(InvalidProblem, match=r"grad_out has shape .* expected \(2, 4, 3, 6\)"):
        attnswitch.attention_backward(grad_out, *operands, layout="BLHD")


@pytest.mark.parametrize("window", [3, "ab", (), (1,), (1, 2, 3), (1.0, 2), (True, 1), np.array(3), torch.tensor(3)])
def test_a_window_that_is_none_is_explained(window: Any) -> None:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(InvalidProblem, match=r"expected \(left, right\), each a number of keys or None"):
        attnswitch.attention(x, x, x, window=window)
