"""Continuous batching of transformers goes to the paged attention of the name that a model has."""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation import continuous_batching

from attnswitch.errors import Unsupported

__all__ = ["names", "unwatch", "watch"]

#: The paged attention of each name that means attnswitch.
names: dict[str, str] = {}


def _places() -> list[tuple[Any, str]]:
    """Whose they are, and the names of the two functions that are wrapped."""
    manager, module = (
        getattr(continuous_batching, name, None) for name in ("ContinuousBatchingManager", "initialization")
    )
    return [(manager, "switch_to_cb_friendly_attn"), (module, "ensure_decode_fast_path_is_available")]


def _switching(method: Any) -> Any:
    """The manager's choice of an attention: the one registered beside ours, which it puts back when it stops."""

    @functools.wraps(method)
    def switch(self: Any, model: Any, *given: Any, **named: Any) -> None:
        name = model.config._attn_implementation
        if name in names:
            model.set_attn_implementation(names[name])
            if model.config._attn_implementation != names[name]:
                raise Unsupported(f"{type(model).__name__} cannot have another attention for continuous batching")
            self._original_attn_impl = name
        elif name not in names.values():
            method(self, model, *given, **named)

    switch._attnswitch = True  # type: ignore[attr-defined]
    return switch


def _with_tables(method: Any, module: Any) -> Any:
    """The check that leaves tables of pages to flash-attn: ours takes them, for layers whose cache has them."""

    @functools.wraps(method)
    def ensure(config: Any, cb_config: Any, *given: Any, **named: Any) -> None:
        tables = [module.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in module.group_layers_by_attn_type(config)]
        if config._attn_implementation not in names.values() or not all(kind.supports_block_table for kind in tables):
            method(config, cb_config, *given, **named)

    ensure._attnswitch = True  # type: ignore[attr-defined]
    return ensure


def watch() -> bool:
    """Wrap the two functions in which transformers knows no attention but its own, once.

    Returns:
        Whether this transformers has them; others refuse the name themselves.
    """
    places = _places()
    if not all(hasattr(place, name) for place, name in places):
        return False
    (manager, switch), (module, ensure) = places
    if not hasattr(getattr(manager, switch), "_attnswitch"):
        setattr(manager, switch, _switching(getattr(manager, switch)))
        setattr(module, ensure, _with_tables(getattr(module, ensure), module))
    return True


def unwatch() -> None:
    """Put the two functions back."""
    for place, name in _places():
        method: Any = getattr(place, name, None)
        if hasattr(method, "_attnswitch"):
            setattr(place, name, method.__wrapped__)
