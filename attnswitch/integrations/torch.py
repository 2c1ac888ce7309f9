"""attnswitch in place of torch's own attention, in programs that call ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by
from torch.jit import _builtins as builtins_of_jit

from attnswitch import api
from attnswitch.call import like_torch
from attnswitch.call.torch_modes import rings
from attnswitch.errors import AttnswitchError
from attnswitch.machine import registry
from attnswitch.planning import policy as policies
from attnswitch.planning.policy import Policy

__all__ = ["install", "installed", "uninstall"]

_NAME = "scaled_dot_product_attention"
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class _Before:
    """What stood there before: torch's function, whether its modules may leave it out, and which kernels were on."""

    function: Callable[..., Any]
    fast_path: bool
    kernels: int


_before: _Before | None = None
_ours: Callable[..., Any] | None = None
#: What the contexts that are open have installed, and what was there before the first of them.
_open: list[Callable[..., Any] | None] = []
_base: Callable[..., Any] | None = None


def install(backend: str | None = None, policy: Policy | str | None = None) -> None:
    """Have ``torch.nn.functional.scaled_dot_product_attention`` mean attnswitch, in the whole process.

    Whoever looks the function up in ``torch.nn.functional`` gets it, ``nn.MultiheadAttention`` and the transformer
    layers included: their fast path, which calls no attention function, is switched off until ``uninstall``. A module
    that imported the function by name before keeps torch's. Three kinds of calls stay torch's: those within
    ``torch.nn.attention.sdpa_kernel``, which names kernels of torch's; those that ``torch.jit.trace`` and
    ``torch.jit.script`` record; and those of torch's ``context_parallel``, whose ring is of its own operators.
    Installed again, only ``backend`` and ``policy`` change.

    Args:
        backend: as for ``attention``: this one or an error; the planner's choice if None.
        policy: as for ``attention``.

    Raises:
        InvalidProblem: the backend or the policy is not known.
        AttnswitchError: something else has taken the function's place meanwhile.
    """
    global _before, _ours
    if backend is not None:
        registry.load(backend)
    if policy is not None:
        policy = policies.effective(policy)
    with _lock:
        _check_place()
        if _before is None:
            _before = _Before(getattr(F, _NAME), torch.backends.mha.get_fastpath_enabled(), _allowed())
        _ours = _replacement(_before, backend, policy)
        setattr(F, _NAME, _ours)
        torch.backends.mha.set_fastpath_enabled(False)


def uninstall() -> None:
    """Put back what ``install`` replaced. Nothing happens where nothing is installed.

    Raises ``AttnswitchError`` where something else has taken the function's place meanwhile: that is left as it is.
    """
    global _before, _ours
    with _lock:
        if _before is None:
            return
        _check_place()
        setattr(F, _NAME, _before.function)
        torch.backends.mha.set_fastpath_enabled(_before.fast_path)
        _before = _ours = None


@contextlib.contextmanager
def installed(backend: str | None = None, policy: Policy | str | None = None) -> Iterator[None]:
    """``install`` within the context, for the whole process; then what was installed before is again.

    Of contexts that overlap, in several threads, the latest that is open counts. Raises what ``install`` and
    ``uninstall`` raise.
    """
    global _base
    with _lock:
        if not _open:
            _base = _ours
        install(backend, policy)
        ours = _ours
        _open.append(ours)
    try:
        yield
    finally:
        with _lock:
            _open.remove(ours)
            if not _open:
                _put(_base)
            elif _ours not in _open:  # else another is still to end that counts
                _put(_open[-1])


def _put(ours: Callable[..., Any] | None) -> None:
    """Have ``ours`` count, or nothing where it is None, unless somebody has uninstalled meanwhile."""
    global _ours
    if ours is None or _before is None:
        uninstall()
        return
    _check_place()
    _ours = ours
    setattr(F, _NAME, ours)


def _check_place() -> None:
    if _before is not None and getattr(F, _NAME) is not _ours:
        raise AttnswitchError(
            f"torch.nn.functional.{_NAME} is no longer what attnswitch installed: undo what replaced it first"
        )


def _allowed() -> int:
    """Which of its kernels torch may choose, as ``sdpa_kernel`` sets it: a bit each."""
    of = torch._C
    efficient, cudnn = of._get_mem_efficient_sdp_enabled(), of._get_cudnn_sdp_enabled()
    return of._get_flash_sdp_enabled() + 2 * efficient + 4 * of._get_math_sdp_enabled() + 8 * cudnn


_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
#: Whether torch.jit.trace is recording; graphs of older torch know only the slower function.
_is_traced: Callable[[], bool] = torch._C._is_tracing if _VERSION >= (2, 15) else torch.jit.is_tracing  # type: ignore[attr-defined]
if _VERSION < (2, 11):  # whose graphs cannot ask: as it is while they are made
    _allowed = torch.compiler.assume_constant_result(_allowed)  # type: ignore[no-untyped-call]


def _replacement(before: _Before, backend: str | None, policy: Policy | str | None) -> Callable[..., Any]:
    function, usual = before.function, before.kernels

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if usual & ~_allowed() or _is_traced() or (type(query).__name__ == "DTensor" and rings()):
            return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        numbers, way = (dropout_p, is_causal, scale, enable_gqa), (backend, policy)
        called = scaled_dot_product_attention
        return like_torch.scaled_dot_product_attention(query, key, value, attn_mask, *numbers, *way, function=called)

    scaled_dot_product_attention.__doc__ = api.scaled_dot_product_attention.__doc__
    # Pickled by the name it is found by: as torch's function is.
    scaled_dot_product_attention.__module__ = F.__name__
    scaled_dot_product_attention.__qualname__ = _NAME
    _script_as_torchs(scaled_dot_product_attention)
    return scaled_dot_product_attention


def _script_as_torchs(function: Callable[..., Any]) -> None:
    """Have torch.jit.script take ``function``, which it cannot read, for torch's operator, which it knows by its id."""
    table = builtins_of_jit._get_builtin_table()  # type: ignore[no-untyped-call]
    table[id(function)] = f"aten::{_NAME}"
    weakref.finalize(function, table.pop, id(function), None)  # another function may come to lie there
