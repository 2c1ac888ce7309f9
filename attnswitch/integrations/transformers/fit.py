"""Which models can call a registered attention, and the refusal of the others before they compute anything.

transformers asks its models' marks and sources for its own implementations only. A registered one is taken by every
model: its mask is used, and where the model never looks the attention up, another attention gets that mask.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from attnswitch.errors import Unsupported

__all__ = ["check_config", "check_layer", "names", "unwatch", "watch"]

#: The names that mean attnswitch.
names: set[str] = set()

_LOOKS_UP = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b")
_OWN_TABLE = re.compile(r"\b(\w*ATTENTION_CLASSES)\[")
_ATTENDS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
#: Whatever makes a model depend on the name: masks of transformers' making, or the name itself.
_LOOKS_AT_NAME = re.compile(r"\bcreate_\w*masks?\w*\(|\b_attn_implementation\b")
_REMEDY = (
    "use attn_implementation='eager' for this model; where it is a part of another,"
    " attn_implementation={'': 'attnswitch', 'name_of_its_sub_config': 'eager'}"
)


@functools.cache
def _source(module: str) -> str | None:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None


@functools.cache
def _why_not(model: type[PreTrainedModel]) -> str | None:
    """Why a class of models cannot run on a registered attention; None if it can, or has no attention of its own."""
    # Models with softcap or sinks support flash-attn and not sdpa; both features are honoured here.
    marked = model._supports_sdpa or (model._supports_flash_attn and model._supports_attention_backend)
    source = _source(model.__module__)
    if source is None:  # a notebook's: its layers are looked at when they call
        return None if marked else "it supports neither sdpa nor other attention backends, as its _supports_* marks say"
    table = _OWN_TABLE.search(source)
    if table:
        return (
            f"its layers are chosen by name from a table of its own ({table[1]}), which knows no registered attention"
        )
    attends = bool(_ATTENDS.search(source))
    if not marked:
        if attends or _LOOKS_UP.search(source) or _LOOKS_AT_NAME.search(source):
            return "it supports neither sdpa nor other attention backends, as its _supports_* marks say"
    elif attends and not _LOOKS_UP.search(source) and _LOOKS_AT_NAME.search(source):
        return "its layers attend without looking up the registered attention, and would only take its mask"
    return None


def _refuse(what: str, why: str) -> None:
    raise Unsupported(f"{what} cannot run on attnswitch: {why}; {_REMEDY}")


def _models_of(module: str) -> list[Any]:
    kinds = list(vars(sys.modules[module]).values()) if module in sys.modules else ()
    return [
        kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == module
    ]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_layer(layer: type) -> None:
    """Refuse layers of a model made for eager attention only: its causal flag, or what it does to a mask, may be wrong.

    Raises:
        Unsupported: no model of the layer's module supports sdpa or other attention backends.
    """
    if why := _why_not_layer(layer):
        _refuse(*why)


@functools.cache
def _why_not_layer(layer: type) -> tuple[str, str] | None:
    models = _models_of(layer.__module__)
    reasons = [_why_not(model) for model in models]
    if models and all(reasons):
        return f"{layer.__name__}, part of {models[-1].__name__},", str(reasons[0])
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_config(config: type) -> None:
    """Refuse the models of a config that would take a mask only: whoever wrote to a config was not asked before.

    Raises:
        Unsupported: no model made from this config, beside it in its package, calls a registered attention.
    """
    if why := _why_not_config(config):
        _refuse(*why)


@functools.cache
def _why_not_config(config: type) -> tuple[str, str] | None:
    models = [
        model
        for model in _models_of(config.__module__.replace(".configuration_", ".modeling_"))
        if model.config_class is config
    ]
    reasons = [_why_not(model) for model in models]
    return (models[-1].__name__, str(reasons[0])) if models and all(reasons) else None


def _wrapped(method: Any) -> Any:
    """A method of models whose first argument is the attention asked for: refuse what cannot have it, then go on."""

    @functools.wraps(method)
    def asked(self: PreTrainedModel, *given: Any, **named: Any) -> Any:
        attention = given[0] if given else named.get("attn_implementation", named.get("requested_attention"))
        name = attention.get("") if isinstance(attention, dict) else attention
        kind: Any = type(self)
        why = _why_not(kind) if isinstance(name, str) and name in names else None
        if why is not None:
            _refuse(kind.__name__, why)
        return method(self, *given, **named)

    asked._attnswitch = True  # type: ignore[attr-defined]
    return asked


def watch() -> None:
    """Ask models when they are made, and when their attention is set.

    transformers has no hook there: it asks its models about implementations of its own and only whether a registered
    name is known. So two methods are wrapped, once: what every (sub)model is asked by, and the setter, which warns and
    goes on with another attention. Names other than ours pass through.
    """
    for name in ("get_correct_attn_implementation", "set_attn_implementation"):
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "_attnswitch"):
            setattr(PreTrainedModel, name, _wrapped(method))


def unwatch() -> None:
    """Put the two methods back."""
    for name in ("get_correct_attn_implementation", "set_attn_implementation"):
        method = getattr(PreTrainedModel, name)
        if hasattr(method, "_attnswitch"):
            setattr(PreTrainedModel, name, method.__wrapped__)
