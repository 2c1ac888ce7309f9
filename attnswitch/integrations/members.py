"""Other libraries keep the names of their kernels in enumerations: one more name in such a one."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["member"]


def member(names: type[enum.Enum], name: str) -> Any:
    """The member of the enumeration ``names`` whose value is ``name``, made if it is not there.

    Python has no way to extend an enumeration, but looks its members up in these tables and nowhere else. Another
    enumeration in its place would be missed by every module that imported this one before.
    """
    if name in names._value2member_map_:
        return names(name)
    made: Any = str.__new__(names, name) if issubclass(names, str) else object.__new__(names)
    made._name_, made._value_ = name.upper(), name
    setattr(names, made._name_, made)
    names._member_names_.append(made._name_)
    names._member_map_[made._name_] = made
    names._value2member_map_[name] = made
    getattr(names, "_hashable_values_", []).append(name)  # Python 3.13 and later
    return made
