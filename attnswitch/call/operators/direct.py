"""The way from torch's dispatcher to an operator's kernel where nothing is to be differentiated, and when that is so.

What ``register_autograd`` registers is written in Python, and sends every call through the dispatcher a second time.
That is a third of what an operator costs the host in a compiled graph, where nothing is differentiated any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Library", "plainly"]

_KEY = torch._C.DispatchKey
#: Keys below autograd, and those of devices, whose kernel comes next where no mode, subclass or transform does.
_BELOW = torch._C._after_autograd_keyset.remove(_KEY.ADInplaceOrView).remove(_KEY.BackendSelect)
_DEVICES = (_KEY.CUDA, _KEY.CPU)
#: The keys from which a call goes straight to them.
_PLAIN = (_KEY.AutogradCUDA, _KEY.AutogradCPU, _KEY.ADInplaceOrView, _KEY.BackendSelect, *_DEVICES)


class Library(torch.library.Library):
    """A library of operators whose kernels are called from the key of autograd, if that is where the call would end."""

    def __init__(self, namespace: str, kind: str) -> None:
        super().__init__(namespace, kind)  # type: ignore[no-untyped-call]
        self._kernels: dict[str, Callable[..., Any]] = {}

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", *, with_keyset: bool = False, **more: Any) -> None:
        """Register a kernel, as ``torch.library.Library`` does."""
        name = str(op_name).rsplit("::", 1)[-1]
        if dispatch_key == "CompositeExplicitAutograd":
            self._kernels[name] = fn
        elif dispatch_key == "Autograd" and with_keyset and name in self._kernels:
            fn = _at_once(self._kernels[name], fn)
        super().impl(op_name, fn, dispatch_key, with_keyset=with_keyset, **more)  # type: ignore[no-untyped-call]


def plainly(tensors: Iterable[Any]) -> bool:
    """Whether a call with ``tensors``, here and now, ends at a device's kernel with nothing that looks at it before."""
    keys = torch._C._dispatch_tls_local_include_set()
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or (tensor.requires_grad and torch.is_grad_enabled()):
            return False
        keys = keys | torch._C._dispatch_keys(tensor)
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    return keys.highestPriorityTypeId() in _PLAIN and (keys & _BELOW).highestPriorityTypeId() in _DEVICES


def _at_once(kernel: Callable[..., Any], differentiable: Callable[..., Any]) -> Callable[..., Any]:
    enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad

    def call(keys: Any, *operands: Any, **said: Any) -> Any:
        if (keys & _BELOW).highestPriorityTypeId() in _DEVICES and not (enabled() and any_requires_grad(*operands)):
            return kernel(*operands, **said)
        return differentiable(keys, *operands, **said)

    return call
