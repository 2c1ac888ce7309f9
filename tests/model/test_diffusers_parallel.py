"""diffusers' context parallelism on attnswitch: what two processes come to is what one call makes of the whole.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnswitch
from attnswitch import api, attention_backward
from attnswitch.integrations import diffusers_parallel as parallel
from attnswitch.integrations.diffusers import register
from attnswitch.verify import Case

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
import ranks
from parts import GRADIENTS, Whole
from small_diffusion import MODELS

BACKEND = "tiled"
CASE = Case(batch=2, heads_kv=4, group=1, seq_q=24, seq_k=24, dim_qk=16, dim_v=16, library="torch", grads="qkv")
CROSS = CASE.replace(seq_k=40)
RING, ULYSSES, BOTH = {"ring_degree": 2}, {"ulysses_degree": 2}, {"ring_degree": 2, "ulysses_degree": 2}
EXACT = {"convert_to_fp32": False}  # a ring merges in float32 otherwise


class Way(NamedTuple):
    """How a case is dealt, and what the call says."""

    degrees: dict[str, Any]
    case: Case
    said: Mapping[str, Any] = MappingProxyType({})
    backward: bool = True


WAYS = {
    "ring, float64": Way(RING | EXACT, CASE.replace(dtype="float64")),
    "ring, float32": Way(RING, CASE.replace(dtype="float32")),
    "ring, bfloat16": Way(RING, CASE.replace(dtype="bfloat16")),
    "ring, scale and softcap": Way(
        RING | EXACT,
        CASE.replace(dtype="float64", scale=0.4, softcap=2.0),
        {"scale": 0.4, "attention_kwargs": {"softcap": 2.0}},
    ),
    "ring, more keys than queries": Way(RING | EXACT, CROSS.replace(dtype="float64")),
    "ring, unlike shares": Way(
        RING | EXACT | {"ring_anything": True}, CASE.replace(dtype="float64", seq_q=23, seq_k=27), backward=False
    ),
    "ulysses, float64": Way(ULYSSES, CASE.replace(dtype="float64")),
    "ulysses, float32": Way(ULYSSES, CASE.replace(dtype="float32")),
    "ulysses, bfloat16": Way(ULYSSES, CASE.replace(dtype="bfloat16")),
    "ulysses, a window": Way(
        ULYSSES,
        CASE.replace(dtype="float64", window=(5, 3)),
        {"attention_kwargs": {"window_size": (5, 3)}},
    ),
    "ulysses, unlike shares": Way(
        ULYSSES | {"ulysses_anything": True}, CASE.replace(dtype="float64", seq_q=23, seq_k=27), backward=False
    ),
    "ulysses, unlike heads": Way(
        ULYSSES | {"ulysses_anything": True}, CASE.replace(dtype="float64", heads_kv=3), backward=False
    ),
}
OF_FOUR = {name: Way(BOTH | EXACT, CASE.replace(dtype="float64")) for name in ("ring and ulysses",)}
FAULTY = "ring, bfloat16"
#: What fails in the processes themselves.
REFUSED = {
    "the gradient of the lse": "its backward drops the gradient of the lse",
    "a causal ring": "Causal attention is not yet supported for templated attention",
    "grouped heads": "GQA is not yet supported for templated attention",
}


def config(degrees: dict[str, Any]) -> ParallelConfig:
    """Set up as ``model.enable_parallelism`` does it."""
    made = ParallelConfig(context_parallel_config=ContextParallelConfig(**degrees))
    inner = made.context_parallel_config
    mesh = init_device_mesh("cpu", inner.mesh_shape, mesh_dim_names=inner.mesh_dim_names)
    made.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return made


# -- in each process ---------------------------------------------------------------------------------------------------


def share(array: torch.Tensor) -> torch.Tensor:
    """Of (B, H, L, D), this rank's part of the sequence as diffusers has it, (B, L, H, D)."""
    return array.transpose(1, 2).tensor_split(dist.get_world_size(), 1)[dist.get_rank()].clone()


def computed(way: Way) -> dict[str, torch.Tensor]:
    """Of this rank: output and lse by their names, gradients by those of the operands."""
    *operands, grad_out, _ = map(share, Whole.of(way.case).arrays())
    for tensor in operands:
        tensor.requires_grad_(way.backward)
    said = {**way.said, "attention_kwargs": {"return_lse": True, **way.said.get("attention_kwargs", {})}}
    out, lse = dispatch_attention_fn(*operands, **said, backend="attnswitch", parallel_config=config(way.degrees))
    results = {"out": out.detach().transpose(1, 2), "lse": lse.detach().transpose(1, 2)}
    if way.backward:
        grads = torch.autograd.grad(out, operands, grad_out)
        results |= {name: grad.transpose(1, 2) for name, grad in zip(GRADIENTS, grads, strict=True)}
    return results


def of_its_own_keys(*call: Any, out: torch.Tensor, lse: torch.Tensor, **said: Any) -> Any:
    """A fault: gradients of each part come from its own output and lse, not from those of all keys."""
    return attention_backward(*call, **said)


def masked() -> dict[str, torch.Tensor]:
    """Ulysses with a mask of the keys that each process holds: (B, Lk), as models give it."""
    whole = Whole.of(CASE.replace(dtype="float64", lengths=(24, 9)))
    *operands, grad_out, _ = map(share, whole.arrays())
    mask = torch.arange(24) < torch.tensor([[24], [9]])
    mine = mask.tensor_split(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    for tensor in operands:
        tensor.requires_grad_()
    out = dispatch_attention_fn(*operands, attn_mask=mine, backend="attnswitch", parallel_config=config(ULYSSES))
    grads = torch.autograd.grad(out, operands, grad_out)
    return {name: x.detach().transpose(1, 2) for name, x in zip(("out", *GRADIENTS), (out, *grads), strict=True)}


def refused() -> dict[str, str]:
    """What is said to calls that fail only once they are under way."""
    q, k, v = (share(x).requires_grad_() for x in Whole.of(CASE).arrays()[:3])
    given: dict[str, dict[str, Any]] = {
        "the gradient of the lse": {"attention_kwargs": {"return_lse": True}},
        "a causal ring": {"is_causal": True},
        "grouped heads": {"enable_gqa": True},
    }
    said = {}
    for name, options in given.items():
        try:
            out, lse = dispatch_attention_fn(q, k, v, **options, backend="attnswitch", parallel_config=config(RING))
            (out.sum() + lse.sum()).backward()
        except Exception as error:
            said[name] = str(error)
    return said


def flux(degrees: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """A model's output and the gradients of its parameters; each rank's are of its own share, whose sum is all."""
    model, inputs = MODELS["flux"].make()
    inputs["encoder_hidden_states"], inputs["txt_ids"] = torch.ones(2, 6, 32).cumsum(1) / 6, torch.ones(6, 3)
    model, inputs = model.double(), {name: x.double() for name, x in inputs.items()}
    model.set_attention_backend("attnswitch")
    if degrees is not None:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and has no need of it with a mesh
        inner = ContextParallelConfig(**degrees)
        inner.mesh = init_device_mesh("cpu", inner.mesh_shape, mesh_dim_names=inner.mesh_dim_names)
        model.enable_parallelism(config=inner)
    with attnswitch.record() as recording:
        (out,) = model(**inputs, return_dict=False)  # of which alone context parallelism knows
    assert sum(recording.problems.values()) >= MODELS["flux"].attentions
    out.square().sum().backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"out": out.detach(), **grads}


def process() -> None:
    """One rank: everything, so that the libraries are loaded once."""
    ranks.joined()
    register(backend=BACKEND)
    if dist.get_world_size() == 4:
        ranks.save({name: computed(way) for name, way in OF_FOUR.items()})
    results: dict[str, Any] = {name: computed(way) for name, way in WAYS.items()}
    with mock.patch.object(api, "attention_backward", of_its_own_keys):
        results["faulty"] = computed(WAYS[FAULTY])
    results |= {"masked": masked(), "refused": refused()}
    results |= {"flux, ring": flux(RING | EXACT), "flux, ulysses": flux(ULYSSES)}
    ranks.save(results)


# -- against the whole -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(__file__, 2, tmp_path_factory)


def check(found: list[dict[str, torch.Tensor]], whole: Whole, parts: int) -> None:
    """The shares of all ranks against float64, within what rounding allows of keys dealt in so many parts."""
    results = {name: np.concatenate([x[name].double().numpy() for x in found], 2) for name in found[0]}
    keys, rows = (
        [slice(x[0], x[-1] + 1) for x in np.array_split(np.arange(length), parts)]
        for length in (whole.case.seq_k, whole.case.seq_q)
    )
    whole.check(results, whole.precision(BACKEND), keys, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_two_processes_are_the_whole(name: str, two: list[dict[str, Any]]) -> None:
    """Output, lse and all gradients; where shares are unlike, diffusers has no backward."""
    way = WAYS[name]
    check([found[name] for found in two], Whole.of(way.case), way.degrees.get("ring_degree", 1))


@pytest.mark.slow
def test_local_lse_in_the_backward_would_be_seen(two: list[dict[str, Any]]) -> None:
    """The control of the above: its forward is right, and a gradient is beyond its bound."""
    found, whole = [each["faulty"] for each in two], Whole.of(WAYS[FAULTY].case)
    check([{name: each[name] for name in ("out", "lse")} for each in found], whole, 2)
    for name in GRADIENTS:
        with pytest.raises(AssertionError, match="more than rounding explains"):
            check([{name: each[name]} for each in found], whole, 2)


@pytest.mark.slow
def test_a_mask_of_each_process_hides_in_ulysses(two: list[dict[str, Any]]) -> None:
    check([found["masked"] for found in two], Whole.of(CASE.replace(dtype="float64", lengths=(24, 9))), 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_a_model_and_the_gradients_of_its_parameters(way: str, two: list[dict[str, Any]]) -> None:
    """Flux, made parallel by ``enable_parallelism``: the sum over ranks is the gradient of one process."""
    register(backend=BACKEND)
    whole = flux(None)
    one, other = (found[f"flux, {way}"] for found in two)
    assert one.keys() == other.keys() == whole.keys()
    for name, expected in whole.items():
        found = one[name] if name == "out" else one[name] + other[name]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_under_way(name: str, two: list[dict[str, Any]]) -> None:
    assert [REFUSED[name] in found["refused"][name] for found in two] == [True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_processes_are_the_whole(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two rings of two: each holds half of the heads."""
    found = ranks.run(__file__, 4, tmp_path_factory)
    check([each[name] for each in found], Whole.of(OF_FOUR[name].case), 2)


# -- refused before anything moves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "given", "reason"),
    [
        (RING, {"dropout_p": 0.5}, "does not know which weights the forward dropped"),
        (ULYSSES, {"dropout_p": 0.5}, "does not know which weights the forward dropped"),
        (RING, {"attn_mask": torch.ones(2, 24).bool()}, "this process's mask to the keys of every other"),
        (BOTH, {"attn_mask": torch.ones(2, 24).bool()}, "use ulysses_degree without ring_degree"),
        (ULYSSES, {"attn_mask": torch.zeros(2, 24, requires_grad=True)}, "attn_mask requires a gradient"),
        (ULYSSES | {"ulysses_anything": True}, {"attn_mask": torch.ones(2, 24)}, "with their padding between them"),
        (RING, {"attention_kwargs": {"window_size": (3, 3)}}, "from the corner of each part"),
        (RING, {"dtype": "float64"}, "merged in float32; set convert_to_fp32=False"),
        (ULYSSES, {"dim_v": 8}, "value has head dimension 8: it takes that of query and key, 16"),
    ],
)
def test_what_the_template_would_make_wrong_is_refused(
    degrees: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    register()
    case = CASE.replace(**{name: given.pop(name) for name in ("dtype", "dim_v") if name in given})
    q, k, v = (x.transpose(1, 2) for x in Whole.of(case).arrays()[:3])
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**degrees))
    with pytest.raises(attnswitch.Unsupported, match=reason):
        dispatch_attention_fn(q, k, v, **given, backend="attnswitch", parallel_config=config)


def test_a_ring_that_hands_over_no_keys_is_refused() -> None:
    """That of diffusers before 0.40, whose gradients of keys and values are wrong."""
    with pytest.raises(attnswitch.Unsupported, match="in place of those that come by"):
        parallel._Ops(True, {}).backward(None, torch.zeros(1))


if __name__ == "__main__":
    process()
