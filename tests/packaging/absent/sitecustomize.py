"""Makes packages absent from a process and from its children, as if they had never been installed.

Python runs this file at start where its folder is in PYTHONPATH. HIDDEN has the names, separated by spaces.
"""

import os
import sys
from typing import Any

_HIDDEN = frozenset(os.environ["HIDDEN"].split())


class _Without:
    """A finder that has no answer for what is hidden, and another's for the rest."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.partition(".")[0] in _HIDDEN else self._finder.find_spec(name, *where)

    def find_distributions(self, *context: Any) -> Any:
        found = getattr(self._finder, "find_distributions", lambda *_: ())(*context)
        return (each for each in found if not _HIDDEN & {each.name.replace("-", "_"), each.name.partition("-")[0]})


sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
