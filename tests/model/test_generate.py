"""``attnswitch bench generate``: the tokens of both, where they differ, and what is written down."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

from attnswitch.bench import generate
from attnswitch.bench.generate import Load, measured, model_of

SHORT = {"batch": 2, "prompt": 5, "new_tokens": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("tiny", "cpu", torch.float32, layers=1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_both_generate_the_same(cache: Any, padded: bool, model: Any) -> None:
    rate = measured(model, Load(cache, padded, **SHORT), 2)
    assert rate.difference is None
    assert rate.ratio_low <= rate.ratio <= rate.ratio_high
    assert min(rate.ours, rate.theirs) > 0


def test_a_backend_that_is_named_is_the_one_that_serves(model: Any) -> None:
    assert measured(model, Load("dynamic", padded=False, **SHORT), 2, backend="sdpa-math").difference is None
    assert ATTENTIONS["attnswitch"].args == ("sdpa-math",)


def test_another_answer_is_found_and_placed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that is wrong for one query: the prompt and its first token are right, the next is not."""
    attend = generate.__dict__["_generated"]

    def wrong(model: Any, load: Load, ids: Any, mask: Any, **options: Any) -> Any:
        made, seconds = attend(model, load, ids, mask, **options)
        if model.config._attn_implementation == "attnswitch":
            made[1, ids.shape[1] + 1] = (made[1, ids.shape[1] + 1] + 1) % model.config.vocab_size
        return made, seconds

    monkeypatch.setattr(generate, "_generated", wrong)
    found = measured(model, Load("dynamic", padded=True, **SHORT), 2).difference
    assert found is not None
    assert (found.turn, found.prompt, found.token, found.fault) == (0, 1, 1, True)
    assert found.gap > 0  # sdpa's own choice has the larger logit


def test_rounding_is_no_fault(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with the same logit: either may be chosen."""
    head = model.lm_head.weight.detach()
    attend = generate.__dict__["_generated"]

    def other(model: Any, load: Load, ids: Any, mask: Any, **options: Any) -> Any:
        made, seconds = attend(model, load, ids, mask, **options)
        if model.config._attn_implementation == "attnswitch":
            made = made.clone()
            made[0, ids.shape[1]] = (made[0, ids.shape[1]] + 500) % 1000
        return made, seconds

    before = head.clone()
    head[500:] = head[:500]
    monkeypatch.setattr(generate, "_generated", other)
    found = measured(model, Load("dynamic", padded=False, **SHORT), 2).difference
    head.copy_(before)
    assert found is not None
    assert (found.token, found.gap, found.fault) == (0, 0.0, False)


def command() -> int:
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    threads = torch.get_num_threads()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        torch.set_num_threads(threads)
    return 0


@pytest.mark.parametrize("arguments", [(), ("--backend", "tiled", "--cache", "static", "--padding", "left")])
def test_the_command(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "generate.json"
    small = ("--device", "cpu", "--layers", "1", "--prompt", "5", "--new-tokens", "2", "--rounds", "2")
    monkeypatch.setattr(sys, "argv", ["attnswitch", "bench", "generate", *small, *arguments, "--json", str(path)])
    assert command() == 0
    read = json.loads(path.read_text())
    assert (read["schema"], read["device"], read["model"]["layers"]) == (1, "cpu", 1)
    assert {"transformers", "torch", "attnswitch"} <= read["environment"].keys()
    assert len(read["rates"]) == (1 if arguments else 4)
    for rate in read["rates"]:
        assert rate["difference"] is None
        assert rate["ratio"] > 0
