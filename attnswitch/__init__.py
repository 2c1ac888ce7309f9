"""attnswitch: one attention call over every kernel a machine has; the choice explained, verified on that machine.

    out = attnswitch.attention(query, key, value, is_causal=True)

Importing this package imports no array library: arrays are recognised by the libraries that are already loaded.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from attnswitch.api import (
    attention,
    attention_backward,
    backends,
    explain,
    plan,
    scaled_dot_product_attention,
)
from attnswitch.call.merge import merge
from attnswitch.call.recording import record
from attnswitch.errors import (
    AttnswitchError,
    BackendUnavailable,
    CompileError,
    InvalidProblem,
    Unsupported,
    VerificationError,
)
from attnswitch.machine.backend import Gradients
from attnswitch.machine.device import Device
from attnswitch.paged import attention_paged
from attnswitch.planning.candidate import Candidate
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy, using
from attnswitch.problem import Mask, Memory, Problem
from attnswitch.varlen import attention_varlen, attention_varlen_backward

if _TYPE_CHECKING:
    from attnswitch.integrations.torch import install, installed, uninstall

# The folder of backends is empty but for its backends. Imported now, it does not take the function's place later.
_backends = backends
_import_module("attnswitch.backends")
backends = _backends

__all__ = [
    "AttnswitchError",
    "BackendUnavailable",
    "Candidate",
    "CompileError",
    "Device",
    "Gradients",
    "InvalidProblem",
    "Mask",
    "Memory",
    "Plan",
    "Policy",
    "Problem",
    "Unsupported",
    "VerificationError",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "backends",
    "explain",
    "install",
    "installed",
    "merge",
    "plan",
    "record",
    "scaled_dot_product_attention",
    "uninstall",
    "using",
]


def __getattr__(name: str) -> _Any:
    if name in ("install", "installed", "uninstall"):  # of torch, which is not imported before it is asked for
        return getattr(_import_module("attnswitch.integrations.torch"), name)
    if name == "__version__":
        from importlib import metadata  # slow to import, and seldom needed

        return metadata.version("attnswitch")
    raise AttributeError(f"module 'attnswitch' has no attribute {name!r}")
