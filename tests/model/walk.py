"""Every model class of the installed transformers, made small: eager attention against attnswitch.

uv run --group model python tests/model/walk.py [--shard 0/2] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import inspect
import json
import logging
import pkgutil
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from attnswitch import api
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers import register

#: Widths of every kind are divided by the same number, so that what fits together still does.
SHRINK = 8
VOCABULARY = 128
LENGTH, TARGET = 12, 7
#: A model is cut down further, or given up, above so many weights.
MOST = 40_000_000

_LAYERS = re.compile(
    r"layers?$|_layers_|^depths?$|^n_layer|num_blocks$|layer_(num|count)|^num_stages?_blocks|_depths?$"
)
_WIDTH = re.compile(
    r"(hidden_|embed_|inner_|ffn_|_)?(size|dim|dims|sizes|width|widths|channels|rank)$|d_model|d_ff|d_kv|n_embd|n_inner"
    r"|intermediate|ffn_dim|mrope_section|rotary_dim|lora_rank|head_dim|embed_dims|_dim$|_features$"
)
_NOT_WIDTH = re.compile(
    r"vocab|image|patch|window|num_channels|in_channels|kernel|stride|batch|type_|chunk|pool|block|input_size|crop|tile"
    r"|codebook_size|spatial|max_|group|_labels|beam|bin|state_size|conv_kernel|sequence|num_input|num_mel|temporal"
)
_HEADS = re.compile(r"heads?$|_heads_|n_head$|num_key_value")
_HEAD_WIDTH = re.compile(r"head_dim|rotary_dim|mrope_section|d_kv")
_TOKEN = re.compile(r"_token_(id|index)$|_token_ids$|^(image|audio|video)_token$")


class Result(NamedTuple):
    """What came of one class: ``right``, ``refused``, ``wrong``, ``as sdpa`` or ``not built``, and why."""

    family: str
    model: str
    outcome: str
    why: str
    calls: int
    #: Whether ``sdpa`` can be asked for, and whether it computes what eager attention does; None where not tried.
    sdpa: bool | None
    sdpa_right: bool | None
    seconds: float


def families() -> list[str]:
    return [row.name for row in pkgutil.iter_modules(transformers.models.__path__) if row.ispkg]


def classes(family: str) -> Iterator[type[PreTrainedModel]]:
    """The model classes of one folder of transformers, without the bases that they share."""
    package = importlib.import_module(f"transformers.models.{family}")
    for row in pkgutil.iter_modules(list(package.__path__)):
        if row.name.startswith("modeling_"):
            module = importlib.import_module(f"{package.__name__}.{row.name}")
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__:
                    if (
                        "forward" in dir(kind)
                        and "PreTrained" not in kind.__name__
                        and "Pretrained" not in kind.__name__
                    ):
                        yield kind


# -- small configs -----------------------------------------------------------------------------------------------------


def _shrunk(name: str, value: Any, factor: int, layers: int) -> Any:
    """One value of a config, made small."""
    given = factor
    if factor < 0:
        if _HEAD_WIDTH.search(name):
            return value
        factor = -factor
        if _HEADS.search(name) and type(value) is int:
            return max(value // factor, 1)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict):  # rope_parameters and its kin
        return {key: _shrunk(str(key), item, given, layers) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        if _TOKEN.search(name):
            return type(value)(_token(name, x) for x in value)
        if re.search(r"^depths$|_depths$|^layers$|num_blocks$|^num_layers$|num_hidden_layers$", name):
            return type(value)(min(x, 1) for x in value)
        if _WIDTH.search(name) and not _NOT_WIDTH.search(name):
            return type(value)(max(x // factor, 1) for x in value)
        return value
    if type(value) is not int:
        return value
    if _TOKEN.search(name):
        return _token(name, value)
    if re.search(r"vocab_size", name):
        return min(value, VOCABULARY)
    if name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        return min(value, 32)
    if (
        layers
        and _LAYERS.search(name)
        and not re.search(r"dense|sparse|type|index|adapter|out_|kv_shared|decoder_layers_to|feat_extract", name)
    ):
        return min(value, layers)
    if name == "image_size" and value > 256:
        return 224
    if name in ("num_query_tokens", "num_queries"):
        return min(value, 8)
    if _WIDTH.search(name) and not _NOT_WIDTH.search(name) and value >= factor:
        return value // factor
    return value


def _token(name: str, value: int) -> int:
    """A token that a small vocabulary has: a different one for each name."""
    if 0 <= value < 3:
        return value
    return VOCABULARY - 1 - sum(map(ord, name)) % 40 if value > 0 else value


def small(kind: Any, factor: int, layers: int, given: Any = None) -> Any:
    """A config of the class with every count and width made small, sub-configs included."""
    default = given if given is not None else kind()
    values: dict[str, Any] = {}
    subs = getattr(default, "sub_configs", {})
    names = inspect.signature(type(default).__init__).parameters
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("transformers_version", "model_type"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            values[name] = small(type(value), factor, layers, value)
        elif name not in subs and (name in names or type(value) in (int, list, tuple, dict)):
            made = _shrunk(name, value, factor, layers)
            if made != value:
                values[name] = made
    kept = values.get("num_hidden_layers", values.get("num_layers"))
    for name, value in vars(default).items():
        # One entry a layer: kept as long as there are layers, the last kinds too.
        if isinstance(value, (list, tuple)) and type(kept) is int and len(value) > kept:
            old = getattr(default, "num_hidden_layers", getattr(default, "num_layers", None))
            if len(value) == old:
                values[name] = [value[0], *value[len(value) - kept + 1 :]]
    if "pad_token_id" in vars(default) and default.pad_token_id is None:
        values["pad_token_id"] = 0
    if getattr(default, "prediction_length", 1) is None:
        values["prediction_length"] = 4
    return type(default)(**values)


#: In this order, until one can be made and run: by what widths are divided, negative for fewer heads of the same width,
#: and the most layers of a kind, 0 for as many as the default has.
ATTEMPTS: tuple[tuple[int, int], ...] = ((SHRINK, 2), (-4, 2), (SHRINK, 0), (1, 2), (2, 4))
#: Seconds after which no other attempt is made.
PATIENCE = 3.0


# -- inputs ------------------------------------------------------------------------------------------------------------


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


def inputs(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Batches that the model may take, the likeliest first; masks hide the left of row 0 and the right of row 1."""
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
    text = {name: value for name, value in text.items() if name in takes or name == "attention_mask"}
    target = {name: value for name, value in text.items() if name.startswith("decoder")}
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in takes or not any(p.kind is p.POSITIONAL_OR_KEYWORD for p in takes.values()):
        yield text
        if "codebook_idx" in takes:
            yield {"input_ids": ids[..., None].repeat(1, 1, 8), "codebook_idx": 2, "attention_mask": mask}
        if "bbox" in takes:
            yield {**text, "bbox": torch.zeros(3, LENGTH, 4, dtype=torch.int64)}
        if "MultipleChoice" in type(model).__name__:
            yield {name: value[:, None].repeat(1, 2, 1) for name, value in text.items()}
        yield {name: value for name, value in text.items() if name != "attention_mask"}
        if target:
            yield {name: value for name, value in text.items() if not name.startswith("decoder")}
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
    grid = next((x for x in ("grid_thw", "image_grid_thw") if x in takes), None)
    if grid is not None and "input_ids" not in takes:
        side = int(_find(config, "patch_size") or 14)
        channels = int(_find(config, "in_channels", "in_chans", "num_channels") or 3)
        patches = torch.randn(32, channels * int(_find(config, "temporal_patch_size") or 1) * side * side)
        name = next((x for x in ("hidden_states", "pixel_values") if x in takes), main)
        yield {name: patches, grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}
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
            bins = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim") or 80
            bins = int(bins) if isinstance(bins, int) else 80
            frames = 2 * int(_find(config, "max_source_positions") or 0)
            context = int(_find(config, "context_length") or 16)
            channels = int(_find(config, "num_input_channels") or 1)
            for shape in (
                ((3, bins, frames or 64), (3, 64, bins), (3, bins, 64), (3, 1024, 128), (3, 1, 1024, 64))
                if name == "input_features"
                else ((3, context, channels), (3, context))
                if name == "past_values"
                else ((3, 4000), (3, 1, 4000), (3, 1024, 128), (3, 64, bins), (3, LENGTH, 32))
            ):
                yield {name: torch.randn(shape), **target}
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
    except Exception:  # noqa: BLE001 - most models have none
        return


# -- one class ---------------------------------------------------------------------------------------------------------


def _made(kind: Any, config: Any, implementation: str) -> PreTrainedModel:
    """A model of random weights that are the same at every call."""
    torch.manual_seed(0)
    with no_init_weights():
        model: PreTrainedModel = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                near = 1.0 if name.endswith("weight") else 0.0
                weight.copy_(near + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                fan = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.2 / fan**0.5))
    return model.eval()


def _tensors(out: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(out, torch.Tensor):
        if out.is_floating_point() or out.is_complex():
            yield at, out
    elif isinstance(out, dict):
        for name, value in out.items():
            if name not in ("past_key_values", "cache_params", "rope_deltas"):
                yield from _tensors(value, f"{at}.{name}")
    elif isinstance(out, (list, tuple)):
        for number, value in enumerate(out):
            yield from _tensors(value, f"{at}.{number}")


def _run(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**copy.deepcopy(batch))
    return {name: x for name, x in _tensors(out) if x.numel()}


def _off(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], batch: dict[str, Any]) -> float:
    """The largest difference, by the largest number of that output; rows that are padding are not looked at."""
    mask = batch.get("attention_mask")
    worst = 0.0 if one.keys() == two.keys() else float("inf")
    for name, x in one.items():
        y = two.get(name)
        if y is None or y.shape != x.shape:
            return float("inf")
        if mask is not None and x.shape[:2] == mask.shape:
            x, y = x[mask.bool()], y[mask.bool()]
        x, y = x.to(torch.complex128), y.to(torch.complex128)
        x, y = torch.view_as_real(x), torch.view_as_real(y)
        # What eager attention makes NaN or infinite says nothing of another's numbers.
        known = x.isfinite()
        scale = x[known].abs().max().item() if known.any() else 0.0
        error = (x - y)[known].abs()
        if error.numel():
            largest = error.max().item()
            worst = max(worst, largest / (scale + 1e-6) if largest == largest else float("inf"))
    return worst


class _Calls:
    """How often attention is called while this is entered."""

    def __enter__(self) -> _Calls:
        self.count, self._kept = 0, api.attention

        def noted(*operands: Any, **options: Any) -> Any:
            self.count += 1
            return self._kept(*operands, **options)

        api.attention = noted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        api.attention = self._kept  # type: ignore[assignment]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _prepared(kind: Any) -> tuple[Any, PreTrainedModel, dict[str, Any], dict[str, torch.Tensor]]:
    """A small config, the model with eager attention, a batch that it takes and what comes out."""
    errors: list[str] = []
    began = time.perf_counter()
    for factor, layers in ATTEMPTS:
        if time.perf_counter() - began > PATIENCE:
            break
        try:
            config = small(kind.config_class, factor, layers)
            with torch.device("meta"), no_init_weights():
                weights = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
        except Exception as error:  # noqa: BLE001 - told in the result
            errors.append("config: " + _short(error))
            continue
        if weights > MOST:
            errors.append(f"config: {weights:,} weights")
            continue
        try:
            model = _made(kind, config, "eager")
        except Exception as error:  # noqa: BLE001
            errors.append("model: " + _short(error))
            continue
        torch.manual_seed(0)
        for batch in inputs(model):
            try:
                out = _run(model, batch)
            except Exception as error:  # noqa: BLE001
                errors.append(f"run with {', '.join(batch)}: " + _short(error))
                continue
            if any(bool(x.isfinite().any()) for x in out.values()):
                return config, model, batch, out
            errors.append("run: no finite output")
    ran = [error for error in errors if not re.search(r"missing \d|have to specify|unexpected keyword", error)]
    raise ValueError((ran or errors or ["no inputs to try"])[0])


def look(kind: Any) -> Result:
    """Eager attention against attnswitch, for one class."""
    began = time.perf_counter()
    family = kind.__module__.split(".")[2]

    def result(outcome: str, why: str = "", calls: int = 0, sdpa: Any = None, right: Any = None) -> Result:
        return Result(family, kind.__name__, outcome, why, calls, sdpa, right, time.perf_counter() - began)

    try:
        config, eager, batch, expected = _prepared(kind)
    except Exception as error:  # noqa: BLE001
        return result("not built", str(error))
    batches = [batch]
    if "attention_mask" in batch:
        batches.append({name: value for name, value in batch.items() if name != "attention_mask"})
    truths = [expected]
    for other in batches[1:]:
        try:
            truths.append(_run(eager, other))
        except Exception:  # noqa: BLE001 - it wants its mask
            batches.remove(other)

    def with_sdpa() -> tuple[bool, bool | None, list[dict[str, torch.Tensor]]]:
        try:
            model = _made(kind, config, "sdpa")
            outs = [_run(model, batch) for batch in batches]
        except Exception:  # noqa: BLE001 - it does not support it
            return False, None, []
        return True, all(_off(a, b, c) < 2e-3 for a, b, c in zip(truths, outs, batches, strict=True)), outs

    try:
        model = _made(kind, config, "attnswitch")
        with _Calls() as calls:
            outs = [_run(model, batch) for batch in batches]
    except Unsupported as error:
        return result("refused", str(error), 0, *with_sdpa()[:2])
    except Exception as error:  # noqa: BLE001
        sdpa, right, _ = with_sdpa()
        return result("wrong", _short(error), 0, sdpa, right)
    errors = [_off(a, b, c) for a, b, c in zip(truths, outs, batches, strict=True)]
    if max(errors) < 2e-3:
        return result("right", "", calls.count)
    # Choices (experts, codes) flip at a rounding: in double they do not.
    sdpa, right, others = with_sdpa()
    why = " ".join(f"{error:.2g}" for error in errors)
    try:
        pair = [m.double() for m in (eager, model)]
        doubled = [{n: v.double() if v.is_floating_point() else v for n, v in b.items()} for b in batches]
        truly = [_run(pair[0], b) for b in doubled]
        exact = [_off(truth, _run(pair[1], b), b) for truth, b in zip(truly, doubled, strict=True)]
        # Eager attention that takes its softmax in float32 has NaN there for rows of padding, which says nothing.
        known = all(
            bool((x.isfinite() | ~before[name].isfinite()).all())
            for truth, before in zip(truly, truths, strict=True)
            for name, x in truth.items()
        )
        if max(exact) < 1e-6 and known:
            return result("right", f"in float64; {why} in float32", calls.count)
        why += " in float32, " + " ".join(f"{error:.2g}" for error in exact) + " in float64"
    except Exception as error:  # noqa: BLE001 - not every model runs in double
        why += "; float64: " + _short(error)
    if others and all(_off(a, b, c) < 2e-3 for a, b, c in zip(others, outs, batches, strict=True)):
        return result("as sdpa", why, calls.count, sdpa, right)
    return result("wrong", why, calls.count, sdpa, right)


def walk(chosen: list[str], shard: int = 0, shards: int = 1) -> Iterator[Result]:
    """Look at every class of these families."""
    register()
    transformers.logging.set_verbosity(logging.CRITICAL)
    for family in chosen[shard::shards]:
        try:
            kinds = list(classes(family))
        except ImportError as error:
            yield Result(family, "", "not built", _short(error), 0, None, None, 0.0)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in kinds:
                yield look(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    for row in walk(args.families or families(), *map(int, args.shard.split("/"))):
        counts[row.outcome] += 1
        print(json.dumps(row._asdict()), flush=True)
    print(dict(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
