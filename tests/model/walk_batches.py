"""Batches that a model of transformers may take, by the names of its arguments and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from walk_configs import VOCABULARY

__all__ = ["batches"]

LENGTH, TARGET = 12, 7
#: What configs call the width of a frame of sound.
_BINS = [
    "feature_projection_input_dim",
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "n_mels",
    "input_dim",
]


def _find(config: Any, *names: str) -> Any:
    """The first value of that name in a config or one within it."""
    for name in names:
        todo = [config]
        while todo:
            at = todo.pop(0)
            value = getattr(at, name, None)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
            todo += [x for x in vars(at).values() if isinstance(x, transformers.PreTrainedConfig)]
    return None


def _image(config: Any) -> torch.Tensor:
    size = _find(config, "image_size", "input_size", "crop_size") or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _find(config, "num_channels", "in_channels", "in_chans", "num_input_channels") or 3
    return torch.randn(3, int(channels), int(height), int(width))


def _patches(config: Any, takes: Any, text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Images as rows of patches, for models that take them so."""
    side, channels = _find(config, "patch_size"), int(_find(config, "num_channels") or 3)
    width = channels * side * side if isinstance(side, int) else int(_find(config, "patch_embed_hidden_size") or 0)
    text = {name: value for name, value in text.items() if name in takes}
    if "spatial_shapes" in takes and width:
        sizes = {"spatial_shapes": torch.tensor([[3, 4], [4, 3], [2, 5]])}
        seen = (torch.arange(12) < torch.tensor([[12], [12], [10]])).long()
        yield {**text, "pixel_values": torch.randn(3, 12, width), "pixel_attention_mask": seen, **sizes}
    if "flattened_patches" in takes and width:
        where = torch.stack([torch.arange(12) // 4 + 1, torch.arange(12) % 4 + 1], -1).float()
        patches = torch.cat([where.expand(3, -1, -1), torch.randn(3, 12, width)], -1)
        target = {name: value for name, value in text.items() if name.startswith("decoder")}
        yield {"flattened_patches": patches, **target}


def batches(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Batches that the model may take, the likeliest first; masks hide the left of row 0 and the right of row 1."""
    named = {
        name: p.default is p.empty
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    for all_masks in (False, True):
        for batch in _likely(model):
            wanted = [
                name
                for name, required in named.items()
                if name not in batch and (required or (all_masks and name.endswith(("_mask", "_lengths"))))
            ]
            beside = {name: x for name in wanted if (x := _by_name(model.config, name, batch)) is not None}
            if beside or not all_masks:
                yield {**batch, **beside}


def _by_name(config: Any, name: str, batch: dict[str, Any]) -> torch.Tensor | None:
    """What a model asks for beside ``batch``, as far as the name says what it is."""
    tensors = {key: x for key, x in batch.items() if isinstance(x, torch.Tensor)}
    if name.endswith("input_ids"):
        return torch.randint(5, VOCABULARY - 45, (3, LENGTH))
    if name == "pixel_values":
        image, frames = _image(config), _find(config, "num_frames")
        return image[:, None].repeat(1, frames, 1, 1, 1) if isinstance(frames, int) else image
    of = tensors.get(name.removesuffix("_mask").removesuffix("_attention"))
    if of is None:
        of = next((x for x in tensors.values() if x.ndim == 3), None)
    if of is None or not name.endswith(("_mask", "_lengths")):
        return None
    length = max(of.shape[1:]) if of.ndim == 3 and "features" in name else of.shape[1]
    if name.endswith("_mask"):
        return torch.ones(of.shape[0], length, dtype=torch.int64)
    return torch.full((of.shape[0],), length, dtype=torch.int64)


def _likely(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Batches of the arguments that models have in common."""
    config = model.config
    takes = inspect.signature(model.forward).parameters
    # Small numbers are special tokens, large ones too.
    ids = torch.randint(5, VOCABULARY - 45, (3, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    # Some models look for padding and for the end in the tokens themselves.
    end = _find(config, "eos_token_id")
    ids[:, -1] = ids[1, -4] = end if isinstance(end, int) and 0 <= end < VOCABULARY else VOCABULARY - 45
    padding = _find(config, "pad_token_id")
    ids[mask == 0] = padding if isinstance(padding, int) and 0 <= padding < VOCABULARY else 0
    text: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in takes:
        text["decoder_input_ids"] = torch.randint(5, VOCABULARY - 45, (3, TARGET))
    # A wrapper of *args and **kwargs says nothing of what it takes.
    anything = not any(p.kind is p.POSITIONAL_OR_KEYWORD for p in takes.values())
    text = {name: value for name, value in text.items() if anything or name in takes or name == "attention_mask"}
    target = {name: value for name, value in text.items() if name.startswith("decoder")}
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in takes or anything:
        yield text
        if "use_cache" in takes:
            yield {**text, "use_cache": False}
            yield {"input_ids": ids, "use_cache": False}
        if "codebook_idx" in takes:
            yield {"input_ids": ids[..., None].repeat(1, 1, 8), "codebook_idx": 2, "attention_mask": mask}
        if "bbox" in takes:
            yield {**text, "bbox": torch.zeros(3, LENGTH, 4, dtype=torch.int64)}
        if "MultipleChoice" in type(model).__name__:
            yield {name: value[:, None].repeat(1, 2, 1) for name, value in text.items()}
        yield {name: value for name, value in text.items() if name != "attention_mask"}
        if target:
            yield {name: value for name, value in text.items() if not name.startswith("decoder")}
            books = int(_find(config, "num_codebooks") or 1)
            yield {**text, **{name: value.repeat_interleave(books, 0) for name, value in target.items()}}
        if "pixel_values" in takes:
            yield {**text, "pixel_values": _image(config)}
    if "pixel_values" in takes:
        image = _image(config)
        yield {"pixel_values": image, **target}
        yield {"pixel_values": torch.randn(3, 3, 224, 224), **target}
        yield {"pixel_values": torch.randn(3, int(_find(config, "num_frames") or 2), *image.shape[1:]), **target}
        patch = _find(config, "patch_size") or 14
        patch = patch if isinstance(patch, int) else patch[-1]
        yield {"pixel_values": torch.randn(3, 3, 4 * patch, 4 * patch), **target}
        if "decoder_input_ids" not in target:
            yield {"pixel_values": image, "decoder_input_ids": ids[:, :TARGET]}
    if "visual_feats" in takes:
        seen = torch.randn(3, LENGTH, int(_find(config, "visual_feat_dim") or 2048))
        yield {**text, "visual_feats": seen, "visual_pos": torch.rand(3, LENGTH, 4)}
    if "image_attention_mask" in takes and "pixel_values" in takes:  # images between words, any number
        yield {**text, "pixel_values": _image(config)[:, None]}
        seen = torch.ones(3, LENGTH, 1, dtype=torch.int64)
        yield {**text, "pixel_values": _image(config)[:, None], "image_attention_mask": seen}
    yield from _patches(config, takes, text)
    grid = next((x for x in ("grid_thw", "image_grid_thw") if x in takes), None)
    if grid is not None and "input_ids" not in takes:
        side = int(_find(config, "patch_size") or 14)
        channels = int(_find(config, "in_channels", "in_chans", "num_channels") or 3)
        patches = torch.randn(32, channels * int(_find(config, "temporal_patch_size") or 1) * side * side)
        name = next((x for x in ("hidden_states", "pixel_values") if x in takes), main)
        grids = {grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}
        yield {name: patches, **grids}
        yield {name: patches, **grids, "merge_sizes": torch.tensor([1, 1])}
        yield {name: patches.reshape(1, 32, channels, -1, side)[:, :, :, :side], **grids}
    if "past_time_features" in takes:
        past = int(_find(config, "context_length") or 8) + max(_find(config, "lags_sequence") or [0])
        ahead, times = int(_find(config, "prediction_length") or 4), int(_find(config, "num_time_features") or 0)
        yield {
            "past_values": torch.randn(3, past),
            "past_time_features": torch.randn(3, past, times),
            "past_observed_mask": torch.ones(3, past),
            "future_values": torch.randn(3, ahead),
            "future_time_features": torch.randn(3, ahead, times),
        }
    for name in ("input_features", "input_values", "past_values", main):
        if name in takes and name not in ("input_ids", "pixel_values"):
            bins = _find(config, *_BINS) or 80
            bins = int(bins) if isinstance(bins, int) else 80
            frames = 2 * int(_find(config, "max_source_positions") or 0)
            context = int(_find(config, "context_length") or 16)
            channels = int(_find(config, "num_input_channels") or 1)
            for shape in (
                ((3, bins, frames or 64), (3, 64, bins), (3, bins, 64), (3, 1024, 128), (3, 1, 1024, 64))
                if name == "input_features"
                else ((3, context, channels), (3, context))
                if name == "past_values"
                else ((3, 4000), (3, 1, 4000), (3, 32000), (3, 1024, 128), (3, 64, bins), (3, LENGTH, 32))
            ):
                yield {name: torch.randn(shape), **target}
                if "input_ids" in takes:
                    yield {**text, name: torch.randn(shape)}
                if "decoder_input_ids" not in target:
                    yield {name: torch.randn(shape), "decoder_input_ids": ids[:, :TARGET]}
    if "inputs_embeds" in takes or "hidden_states" in takes or "encoder_hidden_states" in takes:
        width = int(_find(config, "hidden_size", "d_model", "dim") or 32)
        name = next(x for x in ("inputs_embeds", "hidden_states", "encoder_hidden_states") if x in takes)
        with_mask = {"attention_mask": mask} if "attention_mask" in takes else {}
        if "encoder_hidden_states" in takes and "hidden_states" in takes:
            yield {name: torch.randn(3, LENGTH, width), "encoder_hidden_states": torch.randn(3, TARGET, width)}
        yield {name: torch.randn(3, LENGTH, width), **with_mask}
        yield {name: torch.randn(3, LENGTH, width)}
    try:
        if "input_ids" in takes:
            yield dict(model.dummy_inputs)
    except Exception:  # most models have none
        return
