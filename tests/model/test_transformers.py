"""attnswitch as an attention of transformers: models of random weights against eager attention, masks, refusals.

uv run --group model pytest tests/model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
import transformers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
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

# -- what other models ask for: random weights, against eager ----------------------------------------------------------

SMALL: dict[str, Any] = {
    **{"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GEMMA: dict[str, Any] = {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
GPT_OSS: dict[str, Any] = {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SMALL, **GEMMA)),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SMALL, **GPT_OSS)),
}


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def llama(implementation: str) -> Any:
    kind: Any = LlamaForCausalLM
    return kind._from_config(LlamaConfig(**SMALL), attn_implementation=implementation)


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


def losses_of(name: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> list[float]:
    """The losses of three steps of the Trainer in bfloat16."""
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        bf16=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        use_cpu=options.pop("device") == "cpu",
    )
    trainer = transformers.Trainer(model=llama(name), args=arguments, train_dataset=rows, **options)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_trainer_runs_in_bfloat16(tmp_path: Path, device: str) -> None:
    register()
    ids = torch.randint(3, 90, (6, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    losses = {name: losses_of(name, rows, tmp_path, device=device) for name in ("sdpa", "attnswitch")}
    assert len(losses["attnswitch"]) == 3
    assert losses["attnswitch"] == pytest.approx(losses["sdpa"], rel=1e-2)


def test_the_trainer_runs_without_padding(tmp_path: Path, device: str) -> None:
    """With the collator that lays sequences one after another, and says where they begin."""
    register()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 90, (n,), generator=generator).tolist()} for n in (5, 9, 1, 7, 3, 8)]
    losses = {}
    for name in ("sdpa", "attnswitch"):
        make: Any = transformers.DataCollatorWithFlattening
        collator = make(return_flash_attn_kwargs=name == "attnswitch")
        losses[name] = losses_of(name, rows, tmp_path, device=device, data_collator=collator)
    assert len(losses["attnswitch"]) == 3
    assert losses["attnswitch"] == pytest.approx(losses["sdpa"], rel=1e-2)


@pytest.mark.parametrize("which", list(DECODERS))
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_one_after_another_are_each_alone(which: str, masked: bool) -> None:
    register()
    lengths = [7, 3, 1, 6]
    (kind, config), ids = DECODERS[which], torch.randint(3, 90, (1, sum(lengths)))
    eager, ours = (randomised(kind._from_config(config, attn_implementation=name)) for name in ("eager", "attnswitch"))
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    said: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if not masked:  # as where a program makes masks for flash-attn, which takes none
        said["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"))
        if which == "llama":
            said.pop("attention_mask")
    out = ours(input_ids=ids, position_ids=positions, **said).logits
    for part, here in zip(torch.split(ids, lengths, 1), torch.split(out, lengths, 1), strict=True):
        torch.testing.assert_close(here, eager(input_ids=part).logits, rtol=1e-4, atol=1e-4)


def test_a_mask_beside_sequences_may_hide_no_more() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    starts: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 2, 5]))
    out, formula, i, j = call(5, 5, mask=mask, **starts)
    torch.testing.assert_close(out, formula((j <= i) & ((i < 2) == (j < 2))))
    mask[..., 3, 2] = False
    with pytest.raises(attnswitch.Unsupported, match="hides keys within its sequences"):
        call(5, 5, mask=mask, **starts)
    near = mask.tril().triu(-1) | torch.eye(5, dtype=torch.bool)
    near[..., 3, 2] = True
    call(5, 5, mask=near, sliding_window=2, **starts)
    with pytest.raises(attnswitch.Unsupported, match="hides keys within its sequences"):
        call(5, 5, mask=near, **starts)  # a layer without a window, of the same model
    with torch.inference_mode():
        call(5, 5, mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), **starts)
    with pytest.raises(attnswitch.Unsupported, match="goes with one over all rows"):
        call(5, 5, mask=mask[..., :4], **starts)
    with pytest.raises(attnswitch.Unsupported, match="max_length_q to attention without cu_seq_lens_q"):
        call(5, 5, max_length_q=3)


def test_a_mask_beside_sequences_may_hide_what_is_past_the_last() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask[..., 4, :] = False
    out, formula, i, j = call(5, 5, mask=mask, cu_seq_lens_q=[0, 2, 4])
    torch.testing.assert_close(out[:, :4], formula((j <= i) & ((i < 2) == (j < 2)))[:, :4])
    assert not out[:, 4].any()


def test_continuous_batching_is_refused() -> None:
    register()
    model = llama("attnswitch")
    with pytest.raises(ValueError, match="attnswitch is not supported for continuous batching"):
        model.generate_batch(inputs=[[3, 4, 5]], max_new_tokens=2)


# -- the function itself -----------------------------------------------------------------------------------------------


def call(length_q: int, length_k: int, *, module_is_causal: Any = True, mask: Any = None, **options: Any) -> Any:
    """The registered function, and the same by the formula with all positions visible, on (1, 2, length, 4)."""
    register()
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, n, 4))) for n in (length_q, length_k, length_k))
    module = torch.nn.Module()
    module.is_causal = module_is_causal
    out, weights = ATTENTIONS["attnswitch"](module, q, k, v, mask, **options)
    assert weights is None
    i, j = torch.arange(length_q)[:, None] + (length_k - length_q), torch.arange(length_k)

    def formula(visible: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / 2).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)

    return out, formula, i, j


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
