"""Continuous batching of transformers on pages of its cache: the tokens and their probabilities are eager attention's.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, continuous_api
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

import attnswitch
from attnswitch.integrations.transformers import pages, register, serving

sys.path.append(str(Path(__file__).parent))
from small_decoders import DECODERS, randomised

if not serving.watch():
    pytest.skip("this transformers has another way of continuous batching", allow_module_level=True)

#: What is not typed, or typed otherwise in other versions.
MANAGER: Any = ContinuousBatchingManager
GENERATION: Any = GenerationConfig
MPNET: Any = transformers.MPNetModel

#: Two that begin alike over three pages, one longer than a batch, one token alone.
PROMPTS = [[*range(3, 17), 40, 41], [*range(3, 17), 50], [*range(20, 45)], [60]]
NEW = 6


def small(which: str, name: str = "attnswitch") -> Any:
    kind, config = DECODERS[which]
    return randomised(kind._from_config(copy.deepcopy(config), attn_implementation=name))


@functools.cache
def expected(which: str) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens that each prompt alone generates with eager attention, and the log of their probabilities."""
    model, tokens, logs = small(which, "eager"), [], []
    for prompt in PROMPTS:
        config = GENERATION(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        options = {"generation_config": config, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(torch.tensor([prompt]), **options)
        new = made.sequences[0, len(prompt) :]
        tokens.append(new.tolist())
        rows = torch.stack(made.logits)[:, 0].log_softmax(-1)
        logs.append(rows.gather(1, new[:, None])[:, 0])
    return tokens, torch.stack(logs)


def batched(model: Any, **options: Any) -> list[Any]:
    """What ``generate_batch`` gives for each prompt, in order: pages of four rows, batches of sixteen tokens."""
    said = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    config = ContinuousBatchingConfig(**said | {"return_logprobs": True} | options)
    greedy = GENERATION(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
    results = model.generate_batch(PROMPTS, greedy, continuous_batching_config=config, progress_bar=False)
    return list(results.values())


def check(which: str, results: list[Any]) -> None:
    tokens, logs = expected(which)
    assert [row.generated_tokens for row in results] == tokens
    torch.testing.assert_close(torch.tensor([row.logprobs for row in results]), logs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The function of each call of attention that continuous batching makes, and the backend that it names."""
    register()
    seen: list[tuple[str, str | None]] = []
    for module, name in (("pages", "attention_paged"), ("sequences", "attention_varlen")):
        attend = getattr(attnswitch, name)

        def noted(*operands: Any, _name: str = name, _attend: Any = attend, **options: Any) -> Any:
            seen.append((_name, options["backend"]))
            return _attend(*operands, **options)

        monkeypatch.setattr(f"attnswitch.integrations.transformers.{module}.{name}", noted)
    return seen


@pytest.mark.parametrize("which", DECODERS)
def test_tokens_and_their_probabilities(which: str, calls: list[tuple[str, str | None]]) -> None:
    """Chunks of prompts, pages that are shared, softcap, sinks, windows; decoding reads pages where all layers can."""
    model = small(which)
    check(which, batched(model))
    made = {name for name, _ in calls}
    assert made == ({"attention_varlen", "attention_paged"} if which == "llama" else {"attention_varlen"})
    assert model.config._attn_implementation == "attnswitch"


def test_without_tables_of_pages(calls: list[tuple[str, str | None]]) -> None:
    check("llama", batched(small("llama"), max_blocks_per_request=0))
    assert {name for name, _ in calls} == {"attention_varlen"}


def test_a_backend_that_is_named_is_the_one_that_serves(calls: list[tuple[str, str | None]]) -> None:
    register("attnswitch-tiled", backend="tiled")
    check("llama", batched(small("llama", "attnswitch-tiled")))
    assert {backend for _, backend in calls} == {"tiled"}


@pytest.mark.parametrize("which", ["llama", "gpt_oss"])
def test_batches_that_are_padded(
    which: str, calls: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for graphs: by tokens of no sequence, and by sequences of no length. What would be compiled runs as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = CompileConfig(fullgraph=False)
    graphs = {"varlen_compile_config": config, "decode_compile_config": config if which == "llama" else None}
    check(which, batched(small(which), q_padding_interval_size=8, kv_padding_interval_size=16, **graphs))
    assert ("attention_paged" in {name for name, _ in calls}) is (which == "llama")


def test_flash_attn_is_not_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    model = small("llama")
    check("llama", batched(model, auto_switch_to_flash=True))


def test_the_name_beside_ours_serves_as_well() -> None:
    register()
    model = small("llama", "attnswitch-paged")
    check("llama", batched(model))
    assert model.config._attn_implementation == "attnswitch-paged"


def test_a_refusal_reaches_the_caller() -> None:
    """As transformers tells of errors in its thread."""
    register("attnswitch-math", backend="sdpa-math")
    model = small("gpt_oss", "attnswitch-math")
    errors = [row.error for row in batched(model)]
    assert len(errors) == len(PROMPTS)
    assert all("sinks: its kernels know of none" in error for error in errors)
    assert model.config._attn_implementation == "attnswitch-math"


def test_a_model_that_cannot_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = small("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda kind: False))
    with pytest.raises(attnswitch.Unsupported, match="LlamaForCausalLM cannot have another attention"):
        batched(model)


def test_models_that_never_call_it_are_refused_by_this_name_too() -> None:
    register()
    with torch.device("meta"), pytest.raises(attnswitch.Unsupported, match="MPNetModel cannot run on attnswitch"):
        MPNET._from_config(transformers.MPNetConfig(), attn_implementation="attnswitch-paged")


def test_other_attention_is_as_it_was() -> None:
    register()
    check("llama", batched(small("llama", "eager"), auto_switch_to_flash=False))
    wrapped = MANAGER.switch_to_cb_friendly_attn
    serving.watch()
    assert MANAGER.switch_to_cb_friendly_attn is wrapped
    serving.unwatch()
    with pytest.raises(ValueError, match="attnswitch is not supported for continuous batching"):
        batched(small("llama"))
    assert MANAGER.switch_to_cb_friendly_attn is wrapped.__wrapped__
    serving.watch()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cache": None}, "generate_batch"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention_mask beside a cache"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"position_bias": torch.zeros(1, 2, 2, 2)}, "position_bias to attention"),
    ],
)
def test_what_is_not_honoured_is_refused(changed: dict[str, Any], reason: str) -> None:
    register()
    x, starts = torch.zeros(1, 2, 2, 4), torch.tensor([0, 2])
    said: dict[str, Any] = {"cache": object(), "cu_seq_lens_q": starts, "cu_seq_lens_k": {"full_attention": starts}}
    with pytest.raises(attnswitch.Unsupported, match=reason):
        ATTENTIONS["attnswitch-paged"](torch.nn.Module(), x, x, x, **{"attention_mask": None} | said | changed)


def test_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(pages, "_in_cuda_graph", lambda query: True)
    assert all("use_cuda_graph=False" in row.error for row in batched(small("llama")))


def test_a_sequence_of_no_length_writes_nowhere() -> None:
    table = torch.tensor([[5, 2, -1], [-1, -1, -1], [3, -1, -1]], dtype=torch.int32)
    rows = pages._rows(table, torch.tensor([6, 0, 4]), page=4, nowhere=1)
    assert rows.tolist() == [2 * 4 + 1, 1, 3 * 4 + 3]
