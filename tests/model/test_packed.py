"""Sequences that a padding-free collator laid one after another: each attends to itself alone, or the call is refused.

uv run --group model pytest tests/model
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

import attnswitch
from attnswitch.integrations.transformers import register

sys.path.append(str(Path(__file__).parent))
from small_decoders import DECODERS, call, losses_of, randomised


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


@pytest.mark.parametrize("said", [True, False], ids=["starts", "positions"])
@pytest.mark.parametrize("which", DECODERS)
def test_gradients_of_a_step_are_those_of_each_sequence_alone(which: str, said: bool, tmp_path: Path) -> None:
    """Of the Trainer; the collator says where sequences begin, or gives no more than positions that begin anew."""
    register()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=generator) for n in (7, 2, 9, 5)]
    kind, config = DECODERS[which]
    eager, ours = (randomised(kind._from_config(config, attn_implementation=name)) for name in ("eager", "attnswitch"))
    tokens = sum(len(row) - 1 for row in rows)
    for row in rows:
        loss = F.cross_entropy(eager(row[None]).logits[0, :-1], row[1:], reduction="sum") / tokens
        loss.backward()  # type: ignore[no-untyped-call]

    found: dict[str, torch.Tensor] = {}
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda x, name=name: found.update({name: x.grad.clone()}))
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": len(rows), "max_grad_norm": 0.0}
    options |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    collator: Any = transformers.DataCollatorWithFlattening
    trainer = transformers.Trainer(
        model=ours,
        args=transformers.TrainingArguments(output_dir=str(tmp_path), **options),
        train_dataset=[{"input_ids": row.tolist()} for row in rows],
        data_collator=collator(return_flash_attn_kwargs=said),
    )
    trainer.train()
    expected = {name: x.grad for name, x in eager.named_parameters() if x.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("which", DECODERS)
def test_positions_that_begin_anew_keep_sequences_apart(which: str, use_cache: bool, masked: bool) -> None:
    """Also where transformers' own masks do not: with a cache, with a 2D mask of ones, in gpt_oss always."""
    register()
    lengths = [7, 3, 1, 6]
    (kind, config), ids = DECODERS[which], torch.randint(3, 90, (1, sum(lengths)))
    eager, ours = (randomised(kind._from_config(config, attn_implementation=name)) for name in ("eager", "attnswitch"))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    said: dict[str, Any] = {"position_ids": positions, "attention_mask": torch.ones_like(ids) if masked else None}
    out = ours(input_ids=ids, use_cache=use_cache, **said).logits
    with torch.inference_mode():
        again = ours(input_ids=ids.clone(), use_cache=use_cache, **said | {"position_ids": positions.clone()}).logits
    torch.testing.assert_close(again, out)
    for part, here in zip(torch.split(ids, lengths, 1), torch.split(out, lengths, 1), strict=True):
        torch.testing.assert_close(here, eager(input_ids=part).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("begin", [[0, 1], [1, 2], [7, 8]])
def test_positions_that_are_written_to_are_read_again(begin: list[int]) -> None:
    positions = torch.tensor([[*begin, 0, 1, 2]])
    out, formula, i, j = call(5, 5, position_ids=positions)
    torch.testing.assert_close(out, formula((j <= i) & ((i < 2) == (j < 2))))
    positions.copy_(torch.arange(5))
    out, formula, i, j = call(5, 5, position_ids=positions)
    torch.testing.assert_close(out, formula(j <= i))


@pytest.mark.parametrize(
    "positions",
    [[0, 0, 0, 0, 0], [0, 1, 2, 0, 2], [0, 1, 3, 4, 5], [0.0, 1.0, 0.0, 1.0, 2.0]],
    ids=["one for all", "both ways", "a gap", "no integers"],
)
def test_other_positions_say_nothing_of_sequences(positions: list[int]) -> None:
    out, formula, i, j = call(5, 5, position_ids=torch.tensor([positions]))
    torch.testing.assert_close(out, formula(j <= i))


def made(padding: list[int] | None = None, **options: Any) -> torch.Tensor:
    """A mask of the registered function, of five queries and keys."""
    register()
    two = None if padding is None else torch.tensor([padding], dtype=torch.bool)
    options |= {"batch_size": 1, "q_length": 5, "kv_length": 5, "attention_mask": two, "allow_is_causal_skip": False}
    mask: torch.Tensor = MASKS["attnswitch"](**options)
    return mask


def test_a_mask_beside_positions_that_begin_anew() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    mask = made()
    for _ in range(2):  # the second time, of another layer, nothing is looked at
        out, formula, i, j = call(5, 5, mask=mask, position_ids=positions)
        torch.testing.assert_close(out, formula((j <= i) & ((i < 2) == (j < 2))))
    own = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()  # the caller's means what it says
    out, formula, i, j = call(5, 5, mask=own, position_ids=positions)
    torch.testing.assert_close(out, formula(j <= i))
    with pytest.raises(attnswitch.Unsupported, match="hides keys within its sequences"):
        call(5, 5, mask=made([1, 1, 1, 1, 0]), position_ids=positions)
    with pytest.raises(attnswitch.Unsupported, match="position bias"):
        call(5, 5, position_ids=positions, position_bias=torch.zeros(1, 2, 5, 5, dtype=torch.float64))


@pytest.mark.parametrize("left", [False, True])
def test_positions_of_padding_are_no_sequences(left: bool) -> None:
    mask = made([0, 0, 1, 1, 1] if left else [1, 1, 1, 0, 0])
    positions = [0, 0, 0, 1, 2] if left else [0, 1, 2, 0, 0]
    out, formula, _, _ = call(5, 5, mask=mask, position_ids=torch.tensor([positions]))
    rows = slice(2, None) if left else slice(None)
    torch.testing.assert_close(out[:, rows], formula(mask)[:, rows])


@pytest.mark.parametrize(
    "padding", [[1, 0, 0, 1, 1], [1, 0, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0, 1]]
)
def test_padding_between_words_is_no_other_sequence(padding: list[int]) -> None:
    """Positions count the words, as ``generate`` makes them of the mask."""
    mask = made(padding)
    seen = torch.tensor([padding], dtype=torch.bool)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    out, formula, _, _ = call(5, 5, mask=mask, position_ids=positions)
    torch.testing.assert_close(out[:, seen[0]], formula(mask)[:, seen[0]])


def test_a_graph_does_not_look_at_positions() -> None:
    register()
    eager = randomised(DECODERS["llama"][0](DECODERS["llama"][1]))
    eager.set_attn_implementation("attnswitch")
    compiled: Any = torch.compile(eager, backend="eager", fullgraph=True)
    ids, positions = torch.arange(3, 10)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    out = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits  # its mask keeps them apart
    torch.testing.assert_close(out, eager(input_ids=ids, position_ids=positions, use_cache=False).logits)
