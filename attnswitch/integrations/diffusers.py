"""attnswitch as an attention backend of Hugging Face diffusers, 0.37 and later (tried: each minor version to 0.42).

After ``register()``, ``model.set_attention_backend("attnswitch")`` and ``with attention_backend("attnswitch")`` work
for the layers that call ``dispatch_attention_fn``. What they ask of attention is honoured, or refused with
``Unsupported``; nothing is dropped.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import diffusers
import torch
from diffusers.utils import logging
from torch.utils._device import DeviceContext

from attnswitch import api
from attnswitch.call.like_torch import as_autocast
from attnswitch.call.torch_modes import refuse_ring
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.integrations.diffusers_parallel import TEMPLATE, over_processes
from attnswitch.integrations.members import member
from attnswitch.integrations.torch import installed
from attnswitch.machine import registry

__all__ = ["register"]

#: Of diffusers' registry of backends, what is written to or called.
_NEEDED = ("_backends", "_supported_arg_names", "register", "set_active_backend")
_REASONS = {
    "return_attn_probs": "attnswitch gives no attention weights; return_lse=True gives the lse",
}
_UNKNOWN = "it may change the result in a way not known here; use the backend 'native' for this model"
_INSTALL = "attnswitch.install() serves those that call F.scaled_dot_product_attention"
#: Options of a call that torch's function can answer as well.
_OF_TORCH = {"layout", "backend"}
_log = logging.get_logger(__name__)
#: The names that mean attnswitch.
_names: set[str] = set()


def register(name: str = "attnswitch", backend: str | None = None) -> None:
    """Make ``name`` an attention backend of diffusers that means attnswitch.

    Layers of older models call ``F.scaled_dot_product_attention`` whatever the backend: those of UNets, SD3, CogVideoX,
    PixArt, Sana, most autoencoders. ``attnswitch.install()`` serves them. A model that has no others refuses the name
    with ``Unsupported`` when it is set, one with both kinds warns; ``with attention_backend(name)`` cannot tell.

    diffusers keeps the names in an enumeration, which gets one more member, and asks nobody when a name is set: that
    method of its models is wrapped, once. Other names pass through.

    Args:
        name: what models ask for, in lower case; a name that is registered again changes its meaning.
        backend: as for ``attnswitch.attention``: this one or an error; the planner's choice if None.

    Raises:
        InvalidProblem: the backend is not known, or the name is not in lower case or is one of diffusers' own.
        Unsupported: this version of diffusers has no such registry.
    """
    dispatch = _dispatch()
    if not name or name != name.lower():
        raise InvalidProblem(f"name={name!r}: diffusers looks for names in lower case; choose such a name")
    known = dispatch.AttentionBackendName.__members__
    if name not in _names and (name.upper() in known or name in {one.value for one in known.values()}):
        raise InvalidProblem(f"name={name!r} is a backend of diffusers' own; choose another name")
    if backend is not None:
        registry.load(backend)
    ours, kept = member(dispatch.AttentionBackendName, name), dispatch._AttentionBackendRegistry
    kept.register(ours, supports_context_parallel=True)(functools.partial(_attention, backend))
    kept._supported_arg_names[ours] = _Everything()
    _names.add(name)
    _watch(diffusers.ModelMixin)


# -- diffusers' registry -----------------------------------------------------------------------------------------------


def _dispatch() -> ModuleType:
    """The part of diffusers that hands attention on. Raises ``Unsupported`` where it is not as it is known here."""
    found = f"diffusers {diffusers.__version__} cannot take attnswitch as an attention backend"
    remedy = "use diffusers 0.37 to 0.42, or attnswitch.install(), which serves its 'native' attention"
    try:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    except ModuleNotFoundError as error:
        raise Unsupported(f"{found}: {error}; {remedy}") from error
    kept = getattr(dispatch, "_AttentionBackendRegistry", None)
    missing = [f"_AttentionBackendRegistry.{name}" for name in _NEEDED if not hasattr(kept, name)]
    missing += [] if hasattr(dispatch, TEMPLATE) else [TEMPLATE]
    names = getattr(dispatch, "AttentionBackendName", None)
    if not (isinstance(names, type) and issubclass(names, str) and issubclass(names, enum.Enum)):
        missing.append("AttentionBackendName, an enumeration of strings")
    if missing:
        raise Unsupported(f"{found}: attention_dispatch lacks {', '.join(missing)}; {remedy}")
    return dispatch


class _Everything:
    """Stands for the names of the arguments of ``_attention``.

    diffusers leaves out, without a word, arguments whose names are not in there. So that none is dropped all are, and
    ``_attention`` refuses what it does not know. With DIFFUSERS_ATTN_CHECKS=1 diffusers warns of those not listed.
    """

    def __contains__(self, name: str) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter((*inspect.signature(_attention).parameters, *_REASONS))


def _watch(models: Any) -> None:
    """Have models asked whether they call a registered attention, when a name of ours is set."""
    method = models.set_attention_backend
    if hasattr(method, "_attnswitch"):
        return

    @functools.wraps(method)
    def set_attention_backend(self: torch.nn.Module, backend: str) -> None:
        if backend.lower() in _names:
            _check_served(self)
        method(self, backend)

    set_attention_backend._attnswitch = True  # type: ignore[attr-defined]
    models.set_attention_backend = set_attention_backend


def _check_served(model: torch.nn.Module) -> None:
    layers = list(model.modules())
    processors = [layer.processor for layer in layers if hasattr(layer, "processor")]
    if not any(map(_dispatches, (*layers, *processors))):
        raise Unsupported(
            f"{type(model).__name__} cannot run on a registered attention: its layers never look one up; {_INSTALL}"
        )
    older = sorted({type(processor).__name__ for processor in processors if not _dispatches(processor)})
    if older:
        _log.warning(
            f"{type(model).__name__}: layers with {', '.join(older)} look up no registered attention; {_INSTALL}"
        )


def _modes_look() -> bool:
    """Whether a mode looks at functions of torch's, as diffusers' own do that skip attention's scores."""
    if torch.compiler.is_compiling():
        return False
    return any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _shown(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None,
) -> torch.Tensor:
    """The call as torch's function, which modes know by where it stands."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    with installed(backend):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out.transpose(1, 2)


def _dispatches(part: Any) -> bool:
    return hasattr(sys.modules.get(type(part).__module__), "dispatch_attention_fn")


# -- the attention -----------------------------------------------------------------------------------------------------


def _attention(
    backend: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **rest: Any,
) -> Any:
    """Output (B, Lq, Hq, Dv) for query (B, Lq, Hq, D), key (B, Lk, Hkv, D) and value (B, Lk, Hkv, Dv).

    A mask is what 'native' takes it for: (B, Lk), or what broadcasts to (B, Hq, Lq, Lk). ``window_size``, softcap and
    deterministic are those of flash-attn; a window counts from the last query and key, and is_causal beside it too.
    With ``return_lse`` also the lse, (B, Lq, Hq). With ``_parallel_config`` Lq and Lk are this process's share.

    Raises:
        Unsupported: something is passed that is not honoured.
    """
    for name, given in rest.items():
        if given is not None and given is not False:
            raise Unsupported(f"diffusers passes {name} to attention: {_REASONS.get(name, _UNKNOWN)}")
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            kind = type(attn_mask).__name__
            raise Unsupported(
                f"diffusers passes an attn_mask that is a {kind} and no tensor; use the backend 'flex' for this model"
            )
        if attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    # Only what is said is passed on. A batch of one and a single key head broadcast as torch's do.
    query, key, value = (x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (query, key, value))
    options: dict[str, Any] = {"layout": "BLHD", "backend": backend}
    left, right = window_size
    if left >= 0 or right >= 0:
        options["window"] = None if left < 0 else left, None if right < 0 else right
        options["causal_alignment"] = "bottom_right"
    if softcap:
        options["softcap"] = softcap
    if deterministic:
        options["deterministic"] = True
    said = attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
    if _parallel_config is not None:
        return over_processes(query, key, value, *said, config=_parallel_config, options=options)
    refuse_ring("use the backend 'native' there, or diffusers' own context parallelism")
    enable_gqa = enable_gqa or key.shape[2] == 1
    if not return_lse and options.keys() == _OF_TORCH and _modes_look():
        return _shown(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)
    if return_lse:
        options["return_lse"] = True
    found = api.attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        **options,
    )
    return (found[0], found[1].transpose(1, 2)) if return_lse else found
