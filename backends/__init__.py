"""The backends. None imports another; each is reached through its row in ``attnswitch.machine.registry``."""

from __future__ import annotations

import sys
from types import ModuleType


class _Callable(ModuleType):
    """``attnswitch.backends`` is this package and also a public function: importing the one must not hide the other."""

    def __call__(self) -> dict[str, str | None]:
        from attnswitch.choice import backends

        return backends()


sys.modules[__name__].__class__ = _Callable
