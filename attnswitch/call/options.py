"""``Options``: everything about a call that is not an array. The one list of what a call can say.

``attention`` has these names as keywords; ``plan``, ``explain`` and ``attention_backward`` take them as they are
declared here, and what describes calls by problems (plans, benchmarks, the verifier) gets them from ``of_problem``.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from attnswitch import arrays
from attnswitch.errors import InvalidProblem
from attnswitch.names import meant, one_of
from attnswitch.problem import Alignment, Problem, Window
from attnswitch.transformed import is_wrapped

__all__ = [
    "LAYOUTS",
    "Options",
    "check",
    "check_remembered",
    "flag",
    "in_order",
    "no_name",
    "of_call",
    "of_keywords",
    "of_problem",
    "said_by",
    "seed_of",
    "text_of",
    "unknown",
]

LAYOUTS = ("BHLD", "BLHD")
#: Types whose value is all there is to them.
_PLAIN = frozenset((float, int, bool, str, type(None)))


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Everything about a call that is not an array, checked; equal calls have the very same object."""

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

    def keywords(self) -> dict[str, Any]:
        """What it says beside the defaults, as keywords of ``attention``."""
        said = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in said.items() if value != getattr(_DEFAULT, name)}


def of_call(*given: Any) -> Options:
    """The options of a call, in the order of ``Options``. Raises ``InvalidProblem`` for what makes no sense.

    Where ``torch.use_deterministic_algorithms`` is on, calls are deterministic without saying so.
    """
    if given[_DETERMINISTIC] is False and (torch := sys.modules.get("torch")) is not None:
        enabled = getattr(torch, "are_deterministic_algorithms_enabled", None)  # None while torch is being imported
        if enabled is not None and enabled():
            given = (*given[:_DETERMINISTIC], True)
    if given[_WINDOW] is None:
        try:
            return _shared(*given)
        except (TypeError, ValueError):  # what is not hashable, or can change, is read every time
            pass
    return _shared(*(check(name, value) for (name, check), value in zip(_CHECKS.items(), given, strict=True)))


def of_keywords(keywords: dict[str, Any], what: str, function: Callable[..., Any]) -> Options:
    """The options that ``keywords`` of ``function`` say.

    Raises ``InvalidProblem``, beginning with ``what``, for an unknown one.
    """
    return of_call(*in_order(keywords, what, function))


def in_order(keywords: dict[str, Any], what: str, function: Callable[..., Any]) -> list[Any]:
    """The same, not looked at, in the order of ``Options``."""
    for name in keywords:
        if name not in _NAMES:
            raise unknown(name, what, function)
    return [keywords.get(name, usual) for name, usual in _USUAL.items()]


def check(name: str, value: Any) -> Any:
    """``value`` as the option ``name`` is meant. Raises ``InvalidProblem`` for what makes no sense."""
    return _CHECKS[name](name, value)


def check_remembered(function: str, dropout_p: float, seed: Any) -> None:
    """Raises ``InvalidProblem`` where gradients of ``function`` are asked for with a dropout mask that is lost."""
    if dropout_p and seed is None:
        raise InvalidProblem(f"{function}_backward with dropout needs the seed that {function} was given")


def unknown(name: str, what: str, function: Callable[..., Any]) -> InvalidProblem:
    """The error about a keyword that ``function`` does not have; it begins with ``what``."""
    parameters = inspect.signature(function).parameters.values()
    known = (*_NAMES, *(one.name for one in parameters if one.kind is not one.VAR_KEYWORD))
    return InvalidProblem(
        f"{what} an unexpected keyword {name!r}; the keywords are those of attention{meant(name, known)}"
    )


def of_problem(p: Problem, layout: str = "BHLD") -> Options:
    """The options of a call that is ``p``, for arrays in ``layout``."""
    return of_call(*said_by(p, layout))


def said_by(p: Problem, layout: str) -> tuple[Any, ...]:
    """What such a call says, in the order of ``Options``."""
    return p.dropout, p.causal, p.scale, None, p.alignment, p.window, p.softcap, p.lse, layout, p.deterministic


def seed_of(value: Any) -> int | None:
    """``seed`` as an integer from 0 to 2**64 - 1, or None. Raises ``InvalidProblem`` for what is neither."""
    if value is None:
        return None
    seed = _integer(value)
    if seed is None:
        raise InvalidProblem(f"seed={text_of(value)}: expected an integer")
    if not 0 <= seed < 2**64:
        raise InvalidProblem(f"seed={seed}: expected an integer from 0 to 2**64 - 1")
    return seed


#: By type as well: 1 is no flag, and True no number. A window's sides are plain integers by the time they are here.
@functools.lru_cache(maxsize=1024, typed=True)
def _shared(*given: Any) -> Options:
    """The options that all calls with these arguments have. Raises ``TypeError`` where more than values counts."""
    if not {type(value) for value in given if type(value) is not tuple} <= _PLAIN:
        raise TypeError("something here can change")
    return Options(*(check(name, value) for (name, check), value in zip(_CHECKS.items(), given, strict=True)))


def flag(name: str, value: Any) -> bool:
    """``value``, which is True or False and nothing that is taken for either. Raises ``InvalidProblem``."""
    if not isinstance(value, bool):
        raise InvalidProblem(f"{name}={text_of(value)}: expected True or False")
    return value


def _maybe_flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidProblem(f"{name}={text_of(value)}: expected True, False or None")
    return value


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            text = text_of(value)
            raise InvalidProblem(f"{name}={text}: {one_of(value if isinstance(value, str) else text, known)}")
        return str(value)

    return check


def _window(name: str, value: Any) -> Window | None:
    if value is None:
        return None
    sides = _listed(value)
    read = [side if side is None else _integer(side) for side in sides]
    if len(read) == 2 and all(side is None or number is not None for side, number in zip(sides, read, strict=True)):
        return read[0], read[1]
    raise InvalidProblem(f"{name}={text_of(value)}: expected (left, right), each a number of keys or None")


def _listed(value: Any) -> list[Any]:
    """What is in ``value``; nothing where it is one thing."""
    if not hasattr(value, "__iter__"):
        return []
    try:
        return list(value)
    except (TypeError, ValueError):  # an array without axes
        return []


def _integer(value: Any) -> int | None:
    """``value`` as an integer; None where it is none, as bools are."""
    if type(value) is int:  # a symbol too, in a graph of torch.compile
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool") or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except (RuntimeError, TypeError, ValueError):  # of an array that is deleted, or never had numbers, or not one
        return None


def no_name(backend: Any) -> InvalidProblem:
    """The error about a backend that is neither a name nor None."""
    return InvalidProblem(f"backend={text_of(backend)}: expected the name of a backend, or None to choose")


def text_of(value: Any) -> str:
    """``value`` for a message; its type where it has no text, as arrays without memory have none."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _real(name: str, value: Any) -> float:
    """``value`` as a float; 0-d arrays and NumPy scalars count as numbers, bools and strings do not."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise InvalidProblem(f"{name}={value}: expected a number that a float can hold") from None
    if getattr(value, "requires_grad", False):
        raise InvalidProblem(
            f"{name}={text_of(value)} requires_grad, and its gradient would be lost: multiply query by it"
        )
    if arrays.library_of(value) == "torch" and is_wrapped(value):
        raise InvalidProblem(f"{name} is inside torch.func or forward mode, and its derivative would be lost")
    try:
        kind = str(value.dtype).removeprefix("torch.")
        if value.shape == () and kind.startswith(("float", "bfloat", "int")) and not getattr(value, "mask", False):
            return float(value)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # without a number: deleted, masked, traced by JAX
        pass
    raise InvalidProblem(f"{name}={text_of(value)}: expected a number")


def _maybe_real(name: str, value: Any) -> float | None:
    return None if value is None else _real(name, value)


#: Each returns the value as it is meant, or raises ``InvalidProblem``.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "dropout_p": _real,
    "is_causal": flag,
    "scale": _maybe_real,
    "enable_gqa": _maybe_flag,
    "causal_alignment": _one_of(*get_args(Alignment)),
    "window": _window,
    "softcap": _real,
    "return_lse": flag,
    "layout": _one_of(*LAYOUTS),
    "deterministic": flag,
}
_NAMES = tuple(field.name for field in fields(Options))
_WINDOW, _DETERMINISTIC = _NAMES.index("window"), _NAMES.index("deterministic")
assert _NAMES[_DETERMINISTIC:] == ("deterministic",)
_DEFAULT = Options()
_USUAL = {name: getattr(_DEFAULT, name) for name in _NAMES}
assert tuple(_CHECKS) == _NAMES
