"""Small configs of any model of transformers: fewer layers, narrower, a small vocabulary."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, NamedTuple

import transformers

__all__ = ["ATTEMPTS", "VOCABULARY", "Attempt", "small"]


class Attempt(NamedTuple):
    """One way to make a config small."""

    #: By what widths of every kind are divided, so that what fits together still does; negative for fewer heads of the
    #: same width.
    factor: int = 8
    #: The most layers of a kind; 0 for as many as the default has, and images of its size.
    layers: int = 2
    #: Whether what the default leaves open is filled in, and tuples are lists, as in a config that was read from JSON;
    #: 2 for what may be left open as well: any number of experts or heads, any width.
    filled: int = 0


#: In this order, until one can be made and run.
ATTEMPTS = (
    Attempt(),
    Attempt(factor=-16),
    Attempt(factor=-4),
    Attempt(layers=0),
    Attempt(filled=1),
    Attempt(factor=-16, filled=1),
    Attempt(factor=4, filled=1),
    Attempt(layers=0, filled=1),
    Attempt(factor=1, filled=1),
    Attempt(filled=2),
    Attempt(factor=-16, filled=2),
)
VOCABULARY = 128

_LAYERS = re.compile(
    r"layers?$|_layers_|^depths?$|^n_layer|num_blocks$|num_self_attends_per_block|layer_(num|count)|^num_stages?_blocks|_depths?$"
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
    if re.search(r"vocab_size|_vocab$", name):
        return min(value, VOCABULARY)
    if name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        return min(value, 32)
    if (
        layers
        and _LAYERS.search(name)
        and not re.search(r"dense|sparse|type|index|adapter|out_|kv_shared|decoder_layers_to|feat_extract", name)
    ):
        return min(value, layers)
    if layers and name in ("image_size", "patch_size") and value > 256:
        return 224
    if name in ("num_query_tokens", "num_queries"):
        return min(value, 8)
    wide = name in ("upsample_groups", "d_latents") or (_WIDTH.search(name) and not _NOT_WIDTH.search(name))
    return value // factor if wide and value >= factor else value


def _token(name: str, value: int) -> int:
    """A token that a small vocabulary has: a different one for each name."""
    if 0 <= value < 3:
        return value
    return VOCABULARY - 1 - sum(map(ord, name)) % 40 if value > 0 else value


def small(kind: Any, attempt: Attempt, given: Any = None) -> Any:
    """A config of the class with every count and width made small, sub-configs included."""
    factor, layers, filled = attempt
    default = given if given is not None else kind()
    values: dict[str, Any] = {}
    subs = getattr(default, "sub_configs", {})
    names = inspect.signature(type(default).__init__).parameters
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("transformers_version", "model_type"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            values[name] = small(type(value), attempt, value)
        elif name not in subs and (name in names or type(value) in (int, list, tuple, dict)):
            made = _shrunk(name, value, factor, layers)
            if filled and isinstance(made, tuple):
                made = list(made)
            if filled and "intermediate" in name and type(made) is int:
                made = -(-made // 8) * 8  # products of groups take whole 16 bytes
            if made != value:
                values[name] = made
    if given is not None:
        values = _told(given) | values
    kept = values.get("num_hidden_layers", values.get("num_layers"))
    for name, value in vars(default).items():
        # One entry a layer: kept as long as there are layers, the last kinds too.
        if isinstance(value, (list, tuple)) and type(kept) is int and len(value) > kept:
            old = getattr(default, "num_hidden_layers", getattr(default, "num_layers", None))
            if len(value) == old:
                values[name] = [value[0], *value[len(value) - kept + 1 :]]
    for name, token in (("pad_token_id", 0), ("image_token_id", VOCABULARY - 1), ("image_token_index", VOCABULARY - 1)):
        if getattr(default, name, 0) is None:
            values[name] = token
    if getattr(default, "prediction_length", 1) is None:
        values["prediction_length"] = 4
    if filled:
        values = _open(default, values, filled) | values
    return type(default)(**values)


def _told(given: Any) -> dict[str, Any]:
    """What a config that is part of another says, where its class by itself says something else."""
    default, subs = vars(type(given)()), getattr(given, "sub_configs", {})
    return {
        name.removeprefix("_") if name == "_out_indices" else name: value
        for name, value in vars(given).items()
        if (not name.startswith("_") or name == "_out_indices")
        and name not in subs
        and name not in ("transformers_version", "model_type")
        and (name not in default or default[name] != value)
    }


#: What stands for a number that a default leaves open, by its name.
_FILLED = (
    (r"vocab_size", VOCABULARY),
    (r"_per_tok|top_?k$", 2),
    (r"^n_group$|^topk_group$", 1),
    (r"(moe|expert).*_(size|dim)$", 32),
    (r"^vocabulary_map$", {"<image>": VOCABULARY - 1}),
)
#: The same for what is a number in the annotation of its class, where a default may mean that there is none.
_FILLED_TOO = (
    (r"experts?$|experts_", 4),
    (r"kernel|stride|n_group|rate", 1),
)


def _open(default: Any, values: dict[str, Any], filled: int) -> dict[str, Any]:
    """What the default leaves open and a checkpoint would say, as far as names tell."""

    def at(name: str) -> Any:
        return values.get(name, getattr(default, name, None))

    found: dict[str, Any] = {}
    width, heads = at("hidden_size"), at("num_attention_heads")
    known = isinstance(width, int) and isinstance(heads, int) and heads
    kinds = [vars(kind).get("__annotations__", {}) for kind in type(default).__mro__]
    numbers = {name for each in kinds for name, kind in each.items() if re.search(r"\bint\b", str(kind))}
    for name, value in vars(default).items():
        if value is not None or name in values:
            continue
        if name == "num_key_value_heads":
            found[name] = heads
        elif name == "head_dim" and known:
            found[name] = width // heads
        elif name == "layer_types" and isinstance(at("num_hidden_layers"), int):
            kinds_of_layers = ["conv", "full_attention"] if '"conv"' in _source(default) else ["full_attention"]
            found[name] = (kinds_of_layers * at("num_hidden_layers"))[: at("num_hidden_layers")]
        elif name == "mlp_layer_types" and isinstance(at("num_hidden_layers"), int):
            found[name] = (["dense", "sparse"] * at("num_hidden_layers"))[: at("num_hidden_layers")]
        elif name == "default_language":
            found[name] = next(iter(at("languages") or ()), None)
        elif fitting := [number for pattern, number in _FILLED if re.search(pattern, name)]:
            found[name] = fitting[0]
        elif filled == 2 and name in numbers:
            fitting = [number for pattern, number in _FILLED_TOO if re.search(pattern, name)]
            if fitting:
                found[name] = fitting[0]
            elif _HEADS.search(name) and known:
                found[name] = heads
            elif _HEAD_WIDTH.search(name) and known:
                found[name] = width // heads
            elif _WIDTH.search(name) and not _NOT_WIDTH.search(name) and known:
                found[name] = width
    rope = at("rope_parameters") or {}
    if not rope and "rope_parameters[layer_type]" in _source(default):
        for_all = {"rope_type": "default", "rope_theta": 10000.0}
        found["rope_parameters"] = dict.fromkeys(at("layer_types") or ["full_attention"], for_all)
    elif known and "mrope_section" in _source(default) and not ({"mrope_section", "full_attention"} & set(rope)):
        half = int((at("head_dim") or width // heads) * rope.get("partial_rotary_factor", 1.0)) // 2
        third = half // 3
        section = [half - 2 * third, third, third]
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0} | rope | {"mrope_section": section}
        values.pop("rope_parameters", None)
    return found


def _source(config: Any) -> str:
    """The source of the models of a config."""
    module = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return inspect.getsource(module) if module else ""
