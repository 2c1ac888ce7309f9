"""``Options``: everything about a call that is not an array, checked one by one."""

from __future__ import annotations

import functools
import numbers
import operator
from dataclasses import dataclass, field
from typing import Any, get_args

from attnswitch import arrays
from attnswitch.errors import InvalidProblem
from attnswitch.problem import Alignment, Window

__all__ = ["Options", "of", "of_few"]

_LAYOUTS = ("BHLD", "BLHD")


#: Types whose value is all there is to them.
_PLAIN = frozenset((float, int, bool, str, type(None)))


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Everything about a call that is not an array; the names and defaults are ``attention``'s.

    ``shared`` says that all calls with the same arguments have this very object, which stands for them.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool | None = None
    causal_alignment: Alignment = "top_left"
    window: Window | None = None
    softcap: float = 0.0
    return_lse: bool = False
    layout: str = "BHLD"
    deterministic: bool = False
    seed: int | None = None
    shared: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("is_causal", "return_lse", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidProblem(f"{name}={value!r}: expected True or False")
        if self.enable_gqa is not None and not isinstance(self.enable_gqa, bool):
            raise InvalidProblem(f"enable_gqa={self.enable_gqa!r}: expected True, False or None")
        for name in ("dropout_p", "scale", "softcap"):
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        for name, known in (("layout", _LAYOUTS), ("causal_alignment", get_args(Alignment))):
            if (value := getattr(self, name)) not in known:
                raise InvalidProblem(f"{name}={value!r}: expected one of {', '.join(known)}")
        if self.window is not None:
            try:
                left, right = self.window
                sides = tuple(None if side is None else _index(side) for side in (left, right))
            except (TypeError, ValueError):
                raise InvalidProblem(
                    f"window={self.window!r}: expected (left, right), each a number of keys or None"
                ) from None
            object.__setattr__(self, "window", sides)
        if self.seed is not None:
            try:
                seed = _index(self.seed)
            except TypeError:
                raise InvalidProblem(f"seed={self.seed!r}: expected an integer") from None
            if not 0 <= seed < 2**64:
                raise InvalidProblem(f"seed={seed}: expected an integer from 0 to 2**64 - 1")
            object.__setattr__(self, "seed", seed)


def of(
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    causal_alignment: Any,
    window: Any,
    softcap: Any,
    return_lse: Any,
    layout: Any,
    deterministic: Any,
    seed: Any,
) -> Options:
    """The options of a call, shared where numbers and flags say all that is no array. Raises ``InvalidProblem``."""
    rest = softcap, return_lse, layout, deterministic, seed
    try:
        if window is None:
            return _shared(dropout_p, is_causal, scale, enable_gqa, causal_alignment, (), *rest)
        if type(window) is tuple and window:
            sides = map(type, window)
            return _shared(dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, *rest, *sides)
    except TypeError:  # what is not hashable, or can change, is read every time
        pass
    return Options(dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, *rest)


@functools.lru_cache(maxsize=1024)
def of_few(is_causal: bool, scale: float | None) -> Options:
    """``of`` what says no more than these, of these very types."""
    return of(0.0, is_causal, scale, None, "top_left", None, 0.0, False, "BHLD", False, None)


#: By type as well: 1 is no flag, and True no number; nor are they as sides of a window, whose types come last.
@functools.lru_cache(maxsize=1024, typed=True)
def _shared(*arguments: Any) -> Options:
    """The options that all calls with these arguments have. Raises ``TypeError`` where more than values counts."""
    *before, window = arguments[:6]
    *after, seed = arguments[6:11]
    if seed is not None or not {type(argument) for argument in (*before, *window, *after)} <= _PLAIN:
        raise TypeError("something here can change, or is for one call")
    made = Options(*(*before, window or None, *after))
    object.__setattr__(made, "shared", True)
    return made


def _index(value: Any) -> int:
    """``value`` as an integer. Raises ``TypeError`` for what is none, bools included."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a count")
    return operator.index(value)


def _real(name: str, value: Any) -> float | None:
    """``value`` as a float; 0-d arrays and NumPy scalars count as numbers, bools and strings do not."""
    if value is None and name == "scale":
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise InvalidProblem(f"{name}={value}: expected a number that a float can hold") from None
    kind = getattr(getattr(value, "dtype", None), "name", str(getattr(value, "dtype", "")))
    if getattr(value, "requires_grad", False):
        raise InvalidProblem(f"{name}={value!r} requires_grad, and its gradient would be lost: multiply query by it")
    if arrays.library_of(value) == "torch":
        arrays.facts(value, name)  # refuses what forward mode and function transforms follow
    if getattr(value, "shape", None) == () and kind.removeprefix("torch.").startswith(("float", "bfloat", "int")):
        return float(value)
    raise InvalidProblem(f"{name}={value!r}: expected a number")
