"""attnswitch as an attention of transformers: models of random weights against eager attention, masks, refusals.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SplinterConfig,
    SplinterModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

import attnswitch
from attnswitch.integrations.transformers import fit, register

sys.path.append(str(Path(__file__).parent))
from small_decoders import DECODERS, SMALL, call, losses_of, randomised

# -- what other models ask for: random weights, against eager ----------------------------------------------------------


def both(model: Any, run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of ``run`` with eager attention and with attnswitch."""
    register()
    results = []
    for implementation in ("eager", "attnswitch"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(run(model))
    return results[0], results[1]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, cache: str | None, padding: int) -> None:
    """Grouped heads, softcap, sinks and windows, over a whole prompt and over both kinds of cache."""
    kind, config = DECODERS[name]
    model = randomised(kind(config))
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0

    def run(model: Any) -> torch.Tensor:
        if cache is None:
            return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]  # type: ignore[no-any-return]
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            cache_implementation=cache,
            disable_compile=True,
        )
        return torch.stack(made.logits)

    torch.testing.assert_close(*both(model, run), rtol=1e-4, atol=1e-5)


def test_sinks_and_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the kernel as they are, which gives them a gradient."""
    kind, config = DECODERS["gpt_oss"]
    model = randomised(kind(config)).train()
    sinks = [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    seen, attend = [], attnswitch.attention

    def noted(*operands: torch.Tensor, **keywords: Any) -> Any:
        seen.append((keywords.get("sinks"), keywords.get("return_lse", False)))
        return attend(*operands, **keywords)

    def run(model: Any) -> torch.Tensor:
        with torch.enable_grad():
            logits = model(input_ids=ids).logits
            gradients = torch.autograd.grad(logits.square().mean(), sinks)
        return torch.cat([logits.flatten(), *gradients])

    monkeypatch.setattr("attnswitch.api.attention", noted)
    torch.testing.assert_close(*both(model, run), rtol=1e-4, atol=1e-5)
    assert [(given is layer, lse) for (given, lse), layer in zip(seen, sinks, strict=True)] == [(True, False)] * 2


def test_a_position_bias_and_its_gradient() -> None:
    config = T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = randomised(T5ForConditionalGeneration(config))
    bias = model.get_parameter("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0

    def run(model: Any) -> torch.Tensor:
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits
            (gradient,) = torch.autograd.grad(logits.square().mean(), bias)
            return torch.cat([logits.flatten(), gradient.flatten()])

    torch.testing.assert_close(*both(model, run), rtol=1e-4, atol=1e-5)


def test_a_model_made_for_eager_is_refused() -> None:
    """Splinter is not causal and does not say so; transformers checks its marks for sdpa only."""
    small = {key: size for key, size in SMALL.items() if key not in ("num_key_value_heads", "head_dim")}
    register()
    model = SplinterModel(SplinterConfig(**small))
    with pytest.raises(attnswitch.Unsupported, match=r"SplinterModel.*_supports_"):
        model.set_attn_implementation("attnswitch")
    model.config._attn_implementation = "attnswitch"  # nobody is asked
    with pytest.raises(attnswitch.Unsupported, match=r"Splinter.*_supports_"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("MPNetModel", "_supports_"),
        ("BloomModel", "_supports_"),
        ("FalconModel", "FALCON_ATTENTION_CLASSES"),
        ("GPTJModel", "GPTJ_ATTENTION_CLASSES"),
        ("GPTNeoModel", "GPT_NEO_ATTENTION_CLASSES"),
    ],
)
def test_models_that_never_call_a_registered_attention_are_refused(kind: str, why: str) -> None:
    """They took its mask and attended otherwise, or ended in a KeyError."""
    register()
    model = getattr(transformers, kind)
    config = model.config_class()
    message = rf"{kind} cannot run on attnswitch: .*{why}.*'eager'"
    with torch.device("meta"):
        with pytest.raises(attnswitch.Unsupported, match=message):
            model._from_config(config, attn_implementation="attnswitch")
        made = model._from_config(config, attn_implementation="eager")
    for asked in ("attnswitch", {"": "attnswitch"}):
        with pytest.raises(attnswitch.Unsupported, match=message):
            made.set_attn_implementation(asked)
        with pytest.raises(attnswitch.Unsupported, match=message):
            made.set_attn_implementation(attn_implementation=asked)
    made.set_attn_implementation("eager")


def test_what_asks_models_can_be_put_back() -> None:
    register()
    kind: Any = transformers.PreTrainedModel
    wrapped = kind.set_attn_implementation, kind.get_correct_attn_implementation
    register()
    assert (kind.set_attn_implementation, kind.get_correct_attn_implementation) == wrapped
    fit.unwatch()
    plain = kind.set_attn_implementation, kind.get_correct_attn_implementation
    assert plain == tuple(method.__wrapped__ for method in wrapped)
    fit.watch()
    assert kind.set_attn_implementation.__wrapped__ is plain[0]


def test_a_mask_is_refused_where_nobody_was_asked() -> None:
    """Whoever writes to a config reaches no check of the model; its mask would be taken by eager attention."""
    register()
    config = transformers.MPNetConfig(vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model: Any = transformers.MPNetModel(config)
    model.config._attn_implementation = "attnswitch"
    with pytest.raises(attnswitch.Unsupported, match=r"MPNet.*cannot run"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.tensor([[1, 1, 1, 0]]))


def test_weights_are_what_they_are_with_sdpa(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and None for every layer."""
    register()
    model = randomised(LlamaForCausalLM(LlamaConfig(**SMALL)))
    ids = torch.arange(3, 9)[None]
    transformers.logging.enable_propagation()
    warn: Any = transformers.logging.get_logger().warning_once
    warn.cache_clear()
    weights = {}
    for name in ("sdpa", "attnswitch"):
        model.set_attn_implementation(name)
        out = model(input_ids=ids, output_attentions=True)
        weights[name] = out.attentions
    assert weights["attnswitch"] == weights["sdpa"]
    assert [row for row in caplog.messages if row.startswith("attnswitch gives no attention weights")]
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast_is_that_of_sdpa(name: str, device: str) -> None:
    """Rotary layers leave queries and keys in float32 beside values in bfloat16."""
    kind, config = DECODERS[name]
    model = randomised(kind(config)).to(device)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def run(model: Any) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]  # type: ignore[no-any-return]

    eager, ours = both(model, run)
    assert eager.dtype == ours.dtype
    # Eager attention rounds probabilities and logits to bfloat16 on its way.
    assert (eager - ours).abs().max() <= 0.05 * eager.abs().max()


def test_operands_are_cast_as_autocast_casts_them(device: str) -> None:
    register()
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(device)
    bias = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    module = torch.nn.Module()
    with torch.autocast(device, dtype=torch.bfloat16):
        outs = [ATTENTIONS[name](module, q, k, v.bfloat16(), bias)[0] for name in ("sdpa", "attnswitch")]
    assert [out.dtype for out in outs] == [torch.bfloat16] * 2
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)


def test_the_trainer_runs_in_bfloat16(tmp_path: Path, device: str) -> None:
    register()
    ids = torch.randint(3, 90, (6, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    losses = {name: losses_of(name, rows, tmp_path, device=device) for name in ("sdpa", "attnswitch")}
    assert len(losses["attnswitch"]) == 3
    assert losses["attnswitch"] == pytest.approx(losses["sdpa"], rel=1e-2)


# -- the function itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_q", [1, 3, 7])
def test_queries_behind_a_cache_are_the_newest_tokens(length_q: int) -> None:
    out, formula, i, j = call(length_q, 7)
    torch.testing.assert_close(out, formula(j <= i))


@pytest.mark.parametrize("length_q", [1, 3, 7])
def test_a_window_without_a_mask(length_q: int) -> None:
    out, formula, i, j = call(length_q, 7, sliding_window=3)
    torch.testing.assert_close(out, formula((j <= i) & (j > i - 3)))


def test_a_window_with_a_mask_is_the_mask() -> None:
    mask = torch.rand(1, 1, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    out, formula, _, _ = call(7, 7, sliding_window=3, mask=mask)
    torch.testing.assert_close(out, formula(mask))


@pytest.mark.parametrize("asked", [True, False])
def test_is_causal_when_asked_outranks_the_module(asked: bool) -> None:
    out, formula, i, j = call(7, 7, module_is_causal=not asked, is_causal=asked)
    torch.testing.assert_close(out, formula((j <= i) | (not asked)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cache", "pages"),
        ("indices", "may change the result"),
        ("never_heard_of", "may change the result"),
    ],
)
def test_what_is_not_honoured_is_refused(name: str, reason: str) -> None:
    with pytest.raises(attnswitch.Unsupported, match=f"{name} to attention: .*{reason}"):
        call(4, 4, **{name: "anything"})
    call(4, 4, **{name: None})


@pytest.mark.parametrize("masked", [False, True])
def test_keys_that_an_indexer_chose_are_the_only_ones(masked: bool) -> None:
    indices = torch.tensor([[[0, -1], [0, 1], [2, 0], [1, 3]]])
    chosen = torch.zeros(4, 4, dtype=torch.bool)
    for row, keys in enumerate(indices[0]):
        chosen[row, keys[keys >= 0]] = True
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril() if masked else None
    out, formula, i, j = call(4, 4, indices=indices, mask=mask)
    torch.testing.assert_close(out, formula(chosen & (j <= i)))


def test_more_queries_than_keys_need_a_mask_to_be_causal() -> None:
    with pytest.raises(attnswitch.Unsupported, match="7 queries, 3 keys"):
        call(7, 3)
    out, formula, _, j = call(7, 3, module_is_causal=False)
    torch.testing.assert_close(out, formula(j >= 0))


def test_learned_queries_serve_the_whole_batch() -> None:
    register()
    x = torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    one, each = (ATTENTIONS["attnswitch"](torch.nn.Module(), q, x, x, None)[0] for q in (x[:1], x[[0] * 5]))
    assert torch.equal(one, each)


def test_an_empty_static_cache_has_a_mask() -> None:
    """sdpa's mask function leaves it out, and gemma4 then slices the queries: no layer could tell where they were."""
    register()
    options: dict[str, Any] = {"batch_size": 1, "q_length": 3, "kv_length": 7}
    assert MASKS["sdpa"](**options) is None
    mask = MASKS["attnswitch"](**options)
    assert torch.equal(mask[0, 0], torch.arange(7) <= torch.arange(3)[:, None])
    assert MASKS["attnswitch"](**options | {"kv_length": 3}) is None


@pytest.mark.parametrize("change", ["none", "written to", "fewer queries", "a bias"])
def test_the_mask_of_an_empty_static_cache_is_not_looked_into(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    mask = MASKS["attnswitch"](batch_size=2, q_length=3, kv_length=7)
    assert mask.contiguous() is mask  # generate asks for that
    q, k, v = torch.randn(3, 2, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    q, options = q[:, :, :3], {}
    if change == "written to":
        mask[0, :, 2, 0] = False
    if change == "fewer queries":
        q, mask = q[:, :, 1:], mask[:, :, 1:]
    if change == "a bias":
        options["position_bias"] = torch.randn(1, 2, 3, 7, generator=torch.Generator().manual_seed(1))
    seen, attend = [], attnswitch.attention

    def noted(*operands: torch.Tensor, **keywords: Any) -> Any:
        seen.append(("attn_mask" in keywords, keywords.get("is_causal", False), operands[1].shape[2]))
        return attend(*operands, **keywords)

    monkeypatch.setattr("attnswitch.api.attention", noted)
    out, _ = ATTENTIONS["attnswitch"](torch.nn.Module(), q, k, v, mask, **options)
    assert seen == [(False, True, 3) if change == "none" else (True, False, 7)]
    scores = (q @ k.mT / 2 + options.get("position_bias", 0.0)).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out, (torch.softmax(scores, -1) @ v).transpose(1, 2))


def test_a_mask_that_nobody_may_track_is_looked_into() -> None:
    register()
    with torch.inference_mode():
        mask = MASKS["attnswitch"](batch_size=1, q_length=3, kv_length=7)
        x = torch.randn(1, 2, 7, 4)
        out, _ = ATTENTIONS["attnswitch"](torch.nn.Module(), x[:, :, :3], x, x, mask)
        expected, _ = ATTENTIONS["sdpa"](torch.nn.Module(), x[:, :, :3], x, x, mask)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_attention_has_a_mask_where_sdpa_has_one(cache: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = DECODERS["llama"]
    model = randomised(kind(config))
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    register()
    masked: dict[str, list[bool]] = {}
    where = {"sdpa": "torch.nn.functional.scaled_dot_product_attention", "attnswitch": "attnswitch.api.attention"}
    calls: dict[str, Any] = {"sdpa": F.scaled_dot_product_attention, "attnswitch": attnswitch.attention}
    for name, target in where.items():
        model.set_attn_implementation(name)
        seen = masked.setdefault(name, [])

        def noted(*operands: Any, _name: str = name, _seen: list[bool] = seen, **keywords: Any) -> Any:
            _seen.append(keywords.get("attn_mask") is not None)
            return calls[_name](*operands, **keywords)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(target, noted)
            options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
            model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
    assert masked["attnswitch"] == masked["sdpa"]
    if cache == "dynamic" and not padding:
        assert not any(masked["attnswitch"])


@pytest.mark.parametrize("name", ["my-flash", "flex_attention", "org/attnswitch", "paged|attnswitch", "eager"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="choose another name"):
        register(name)


def test_an_unknown_backend_is_refused_at_once() -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="expected one of"):
        register(backend="fastest")
