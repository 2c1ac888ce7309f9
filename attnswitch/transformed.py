"""Whether transforms of torch's are at work on a tensor."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_dual", "is_wrapped"]


def is_wrapped(tensor: Any) -> bool:
    """Whether a torch tensor is inside torch.func, or carries a tangent of forward mode."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor)) or is_dual(tensor)


def is_dual(tensor: Any) -> bool:
    """Whether a torch tensor carries a tangent of forward mode."""
    forward_ad: Any = sys.modules["torch.autograd.forward_ad"]
    if forward_ad._current_level < 0:
        return False
    functorch: Any = sys.modules["torch"]._C._functorch
    while functorch.is_batchedtensor(tensor):  # which cannot be asked
        tensor = functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None
