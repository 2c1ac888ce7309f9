"""attnswitch in diffusers: registered in its dispatch, or installed for models that call torch's function.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import copy
import enum
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import attnswitch
from attnswitch.call.finite import checking
from attnswitch.call.like_torch import as_autocast
from attnswitch.integrations import diffusers as integration
from attnswitch.integrations.diffusers import register
from attnswitch.machine import registry
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.truth.bounds import bounds
from attnswitch.verify.truth.oracle import answer

sys.path.append(str(Path(__file__).parent))
from small_diffusion import MODELS

DISPATCHED, OLDER = ("flux", "wan"), ("unet", "sd3", "cogvideox")
#: A backend of each device that is not the first to be chosen there.
NAMED = {"cpu": "tiled", "cuda": "sdpa-math"}
#: Those whose attention of SD3 is held to its bound, and where.
BOUNDED = [
    *(("cpu", backend) for backend in ("sdpa-flash", "sdpa-math", "tiled")),
    *(("cuda", backend) for backend in ("sdpa-flash", "sdpa-efficient", "sdpa-math", "triton", "cuda")),
][: None if torch.cuda.is_available() else 3]
#: How far values and gradients in float32 may be off; a GPU's kernels differ more in how they sum.
NEAR = {"cpu": (1e-5, 1e-4), "cuda": (1e-4, 1e-3)}
BACKENDS = dispatch._AttentionBackendRegistry


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that a model sets is set for the process: put back after each test."""
    monkeypatch.setattr(BACKENDS, "_active_backend", dispatch.AttentionBackendName.NATIVE)
    register()


def calls(recording: Any) -> int:
    return sum(recording.problems.values())


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def run(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).sample  # type: ignore[no-any-return]


def most(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """How far gradients are off. That of a key's bias is 0, but for rounding: as small as that is no measure."""
    sizes = [float(x.norm()) for x in expected]
    errors = [float((x - y).norm()) for x, y in zip(found, expected, strict=True)]
    return max(error / max(size, 1e-3 * max(sizes)) for error, size in zip(errors, sizes, strict=True))


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(model(**inputs).sample.square().sum(), parameters, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


# -- whole models, against diffusers' native backend -------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", DISPATCHED)
def test_registered(name: str, named: bool, device: str) -> None:
    """By the model's setter, which holds for the process, and within diffusers' context."""
    register(backend=NAMED[device] if named else None)
    near, near_gradients = NEAR[device]
    model, inputs = MODELS[name].make(device)
    expected, of_expected = run(model, inputs), gradients(model, inputs)
    with attention_backend("attnswitch"), attnswitch.record() as in_context:
        assert off(run(model, inputs), expected) < near
    model.set_attention_backend("attnswitch")
    with attnswitch.record() as recording:
        assert off(run(model, inputs), expected) < near
    assert calls(recording) == calls(in_context) == MODELS[name].attentions
    assert most(gradients(model, inputs), of_expected) < near_gradients


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_installed(name: str, named: bool, device: str) -> None:
    near, near_gradients = NEAR[device]
    model, inputs = MODELS[name].make(device)
    expected, of_expected = run(model, inputs), gradients(model, inputs)
    with attnswitch.installed(NAMED[device] if named else None), attnswitch.record() as recording:
        assert off(run(model, inputs), expected) < near
        assert calls(recording) == MODELS[name].attentions
        assert most(gradients(model, inputs), of_expected) < near_gradients


@pytest.mark.parametrize("name", MODELS)
def test_attention_makes_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the two above."""
    model, inputs = MODELS[name].make()
    expected = run(model, inputs)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, *_, **__: torch.zeros_like(query))
    assert off(run(model, inputs), expected) > 0.03


# -- autocast ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's rms_norm
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", ["sd3", "flux", "unet"])
def test_under_autocast(name: str, named: bool, device: str) -> None:
    """As near to the same model in float64 as torch's own attention is; another order of sums moves it by a tenth."""
    backend = NAMED[device] if named else None
    model, inputs = MODELS[name].make(device)
    exact = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    truth = run(copy.deepcopy(model).double(), exact)
    with torch.autocast(device, torch.bfloat16):
        torchs = run(model, inputs)
        with attnswitch.installed(backend), attnswitch.record() as recording:
            ours = run(model, inputs)
        if name in DISPATCHED:
            register(backend=backend)
            with attention_backend("attnswitch"):
                assert off(run(model, inputs), ours) < (1e-9 if device == "cpu" else 1e-2)
    assert ours.dtype == torchs.dtype == torch.bfloat16
    assert {problem.dtype for problem in recording.problems} == {"bfloat16"}
    assert calls(recording) == MODELS[name].attentions
    assert 0.001 < off(torchs, truth) < 0.02
    assert off(ours, truth) < 1.25 * off(torchs, truth)


@pytest.mark.parametrize(("device", "backend"), BOUNDED)
def test_each_attention_of_sd3_is_within_the_running_error_bound(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normed queries and keys are float32 beside values in bfloat16: all are rounded to bfloat16, as torch does it."""
    model, inputs = MODELS["sd3"].make(device)
    seen: list[tuple[torch.Tensor, ...]] = []
    torchs = F.scaled_dot_product_attention

    def record(query: Any, key: Any, value: Any, **options: Any) -> Any:
        assert set(options) <= {"dropout_p", "is_causal"}
        assert not any(options.values())
        assert (query.dtype, key.dtype, value.dtype) == (torch.float32, torch.float32, torch.bfloat16)
        with attnswitch.installed(backend):
            seen.append((*as_autocast(query, key, value), F.scaled_dot_product_attention(query, key, value)))
        return torchs(query, key, value, **options)

    with torch.autocast(device, torch.bfloat16), monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", record)
        run(model, inputs)
    assert len(seen) == MODELS["sd3"].attentions
    for query, key, value, out in seen:
        batch, heads, length, dim = query.shape
        case = Case(batch, heads, 1, length, length, dim, dim, dtype="bfloat16", scale=None, grads="")
        data = {role: x.double().cpu().numpy() for role, x in (("query", query), ("key", key), ("value", value))}
        exact = answer(case, data | {"grad_out": np.zeros(out.shape), "grad_lse": np.zeros(out.shape[:3])})
        plan = attnswitch.plan(query, key, value, backend=backend)
        implementation = registry.loaded(backend)
        assert not isinstance(implementation, str)
        bound = bounds(exact, implementation.precision(plan.problem, plan.device))["out"]
        assert np.all(np.abs(out.double().cpu().numpy() - exact.values["out"]) <= bound)
        assert bound.max() < 0.1 * np.abs(exact.values["out"]).max()


# -- every argument of the dispatch ------------------------------------------------------------------------------------


def operands(
    batch: int = 2, heads: int = 4, heads_kv: int = 4, device: str = "cpu", **_: Any
) -> tuple[torch.Tensor, ...]:
    """Query (B, 5, Hq, 8), key and value (B, 7, Hkv, 8)."""
    torch.manual_seed(1)
    return tuple(torch.randn(batch, n, h, 8).to(device) for n, h in ((5, heads), (7, heads_kv), (7, heads_kv)))


def padded(value: Any = None) -> torch.Tensor:
    """Keys of two sequences of which the second is shorter, (2, 7): bool, or float with ``value`` where none is."""
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    return mask if value is None else torch.where(mask, 0.25, value)


NATIVE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "keys of each sequence": {"attn_mask": padded()},
    "keys of each sequence, added": {"attn_mask": padded(-torch.inf)},
    "keys of each sequence, four axes": {"attn_mask": padded()[:, None, None]},
    "queries and keys": {"attn_mask": torch.ones(5, 7).tril(2).bool()},
    "queries and keys of each head": {"attn_mask": torch.linspace(-2, 2, 140).reshape(4, 5, 7)},
    "groups": {"heads_kv": 2, "enable_gqa": True},
    "one key head": {"heads_kv": 1},
    "as many sequences as queries": {"batch": 5, "attn_mask": torch.ones(5, 7).tril(2).bool()},
}


@pytest.mark.parametrize("asked", NATIVE)
def test_arguments_mean_what_native_makes_of_them(asked: str, device: str) -> None:
    q, k, v = operands(**NATIVE[asked], device=device)
    options = {name: given for name, given in NATIVE[asked].items() if name not in ("batch", "heads_kv")}
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].to(device)
    expected = dispatch_attention_fn(q, k, v, **options, backend="native")
    with attnswitch.record() as recording:
        found = dispatch_attention_fn(q, k, v, **options, backend="attnswitch")
    assert calls(recording) == 1
    assert off(found, expected) < 0.1 * NEAR[device][0]


def test_a_batch_of_one_broadcasts(device: str) -> None:
    q, k, v = operands(device=device)
    found = dispatch_attention_fn(q[:1], k, v, backend="attnswitch")
    assert off(found, dispatch_attention_fn(q[:1], k, v, backend="native")) < 0.1 * NEAR[device][0]


def test_arguments_of_other_backends_are_honoured(device: str) -> None:
    """``window_size`` of flash-attn counts from the last query and key: 7 keys are 2 ahead of 5 queries."""
    q, k, v = operands(device=device)
    kwargs = {"window_size": (1, -1), "softcap": 0.5, "deterministic": True, "return_lse": True}
    with attnswitch.record() as recording:
        out, lse = dispatch_attention_fn(q, k, v, attention_kwargs=kwargs, backend="attnswitch")
    assert all(problem.deterministic for problem in recording.problems)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = (0.5 * torch.tanh(scores / 0.5)).masked_fill(torch.ones(5, 7, device=device).tril(0).bool(), -torch.inf)
    assert out.shape == (2, 5, 4, 8)
    assert lse.shape == (2, 5, 4)
    near = NEAR[device][0]
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2), rtol=near, atol=near)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), rtol=near, atol=near)


def test_dropout_arrives(device: str) -> None:
    q, k, v = operands(device=device)
    with attnswitch.record() as recording:
        found = dispatch_attention_fn(q, k, torch.ones_like(v), dropout_p=0.5, backend="attnswitch")
    assert [problem.dropout for problem in recording.problems] == [0.5]
    assert found.std() > 0.1


def test_nothing_is_copied_and_the_layout_is_kept() -> None:
    q, k, v = (torch.randn(2, 64, 3, 4, 16)[:, :, n] for n in range(3))  # as one projection to all three has them
    found = dispatch_attention_fn(q, k, v, backend="attnswitch")
    with checking("never"), profile(activities=[ProfilerActivity.CPU]) as seen:  # looking for NaN makes new numbers
        dispatch_attention_fn(q, k, v, backend="attnswitch")
    names = {event.key for event in seen.key_averages()}
    assert any("attention" in name for name in names)
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::cat"}
    assert found.is_contiguous()


@pytest.mark.parametrize("name", [None, "attnswitch"])
def test_a_graph_has_no_break(name: str | None) -> None:
    torch.compiler.reset()
    q, k, v = operands()
    member = None if name is None else dispatch.AttentionBackendName(name)
    graph: Any = torch.compile(
        lambda *x: dispatch_attention_fn(*x, attn_mask=padded(), backend=member), fullgraph=True, backend="eager"
    )
    with attention_backend("attnswitch"), attnswitch.record() as recording:
        found = graph(q, k, v)
    assert calls(recording) == 1
    assert off(found, dispatch_attention_fn(q, k, v, attn_mask=padded(), backend="native")) < 1e-6


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_kwargs": {"return_attn_probs": True}}, "passes return_attn_probs .* no attention weights"),
        ({"attention_kwargs": {"no_such": 1.0}}, "passes no_such to attention: it may change the result"),
        ({"attn_mask": object()}, "attn_mask that is a object and no tensor; use the backend 'flex'"),
    ],
)
@pytest.mark.parametrize("checked", [False, True])
def test_what_is_not_honoured_is_refused(
    given: dict[str, Any], reason: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with DIFFUSERS_ATTN_CHECKS, which warns of arguments that it takes away, and takes none."""
    monkeypatch.setattr(BACKENDS, "_checks_enabled", checked)
    with pytest.raises(attnswitch.Unsupported, match=reason):
        dispatch_attention_fn(*operands(), **given, backend="attnswitch")


def test_unequal_heads_need_the_flag() -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="enable_gqa"):
        dispatch_attention_fn(*operands(heads_kv=2), backend="attnswitch")


def test_a_model_with_context_parallelism_takes_the_name() -> None:
    """``test_diffusers_parallel.py`` has what it computes."""
    model, _ = MODELS["flux"].make()
    model.transformer_blocks[0].attn.processor._parallel_config = object()
    model.set_attention_backend("attnswitch")


@pytest.mark.parametrize("name", OLDER)
def test_models_that_look_up_nothing_are_refused(name: str) -> None:
    model, inputs = MODELS[name].make()
    with pytest.raises(attnswitch.Unsupported, match=r"never look one up; attnswitch.install\(\) serves"):
        model.set_attention_backend("attnswitch")
    model.set_attention_backend("native")
    with attention_backend("attnswitch"), attnswitch.record() as recording:
        run(model, inputs)
    assert not recording.problems


def test_a_model_with_layers_of_both_kinds_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(integration._log, "warning", said.append)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "rope_axes_dim": (2, 2, 4)}
    layers = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    text = {"text_embed_dim": 8, "pooled_projection_dim": 8}
    HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, **sizes, **layers, **text).set_attention_backend(
        "attnswitch"
    )
    assert ["AttnProcessor2_0 look up no registered attention" in text for text in said] == [True]
    MODELS["flux"].make()[0].set_attention_backend("attnswitch")
    assert len(said) == 1


def test_names() -> None:
    register("ours-tiled", backend="tiled")
    register("ours-tiled", backend="reference")
    member = dispatch.AttentionBackendName("ours-tiled")
    assert isinstance(member, dispatch.AttentionBackendName)
    assert list(dispatch.AttentionBackendName).count(member) == 1
    assert copy.deepcopy(member) is member
    q, k, v = operands()
    with pytest.raises(attnswitch.Unsupported, match="reference"):  # which has no dropout without a seed
        dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="ours-tiled")
    for name in ("native", "flash", "_native_math"):
        with pytest.raises(attnswitch.InvalidProblem, match="diffusers' own"):
            register(name)
    with pytest.raises(attnswitch.InvalidProblem, match="lower case"):
        register("Attnswitch")
    with pytest.raises(attnswitch.InvalidProblem, match="no-such"):
        register(backend="no-such")


@pytest.mark.parametrize(
    "way", ["no names", "other names", "no registry", "another registry", "no template", "no dispatch"]
)
def test_another_diffusers_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "no dispatch":
        monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    elif way == "no names":
        monkeypatch.delattr(dispatch, "AttentionBackendName")
    elif way == "other names":
        monkeypatch.setattr(dispatch, "AttentionBackendName", enum.Enum("Names", ["A"]))
    elif way == "no template":
        monkeypatch.delattr(dispatch, "_templated_context_parallel_attention")
    elif way == "no registry":
        monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")
    else:
        monkeypatch.delattr(BACKENDS, "set_active_backend")
    with pytest.raises(attnswitch.Unsupported, match=r"diffusers [\d.]+ cannot take attnswitch .* use diffusers 0.37"):
        register()


class Passing(TorchFunctionMode):
    """A mode that looks on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_mode_that_skips_scores_is_seen() -> None:
    """Perturbed attention guidance asks it of every layer: by torch's function, which 'native' calls."""
    query, key, value = (torch.randn(1, 5, 2, 8) for _ in range(3))
    with AttentionScoreSkipFunctionMode(), attention_backend("attnswitch"):
        assert torch.equal(dispatch_attention_fn(query, key, value), value)
    with Passing(), attention_backend("attnswitch"):
        found = dispatch_attention_fn(query, key[:, :, :1], value[:, :, :1], enable_gqa=True)
    torch.testing.assert_close(found, dispatch_attention_fn(query, key[:, :, :1], value[:, :, :1], enable_gqa=True))
