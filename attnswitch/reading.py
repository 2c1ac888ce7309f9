"""Reading files that anybody may have written: JSON within limits, whose values are held against types.

``parse`` takes text, ``load`` a file, ``tables`` one of TOML; ``table`` and ``made`` say what the values must be, in
the types of Python's annotations. Whatever is wrong raises ``InvalidProblem``, whose text is the end of a sentence
that begins with the file's name and a colon.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attnswitch.errors import InvalidProblem
from attnswitch.names import shown

__all__ = ["DEPTH", "SIZE", "checked", "content", "load", "made", "parse", "table", "tables"]

#: Bytes of a file, and lists and objects within each other. What this project writes has a hundredth and a fifth of it.
SIZE, DEPTH = 2**26, 32
#: Letters of a key that a sentence has whole.
_KEY = 40
#: Integers from here to there: those of 64 bits, with a sign and without.
_LEAST, _MOST = -(2**63), 2**64 - 1
_DIGITS = len(str(_MOST))

_Made = TypeVar("_Made")
_PLAIN: dict[Any, tuple[type | UnionType, str]] = {
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: (int | float, "a number"),
    str: (str, "text"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}


def load(path: Path, most: int = SIZE) -> Any:
    """``parse`` of a file, of which no more than ``most`` bytes are read. Raises ``OSError`` if it cannot be read."""
    return parse(content(path, most), most)


def content(path: Path, most: int = SIZE) -> bytes:
    """The bytes of a file, of which no more are read. Raises ``OSError`` if it cannot be read."""
    with path.open("rb") as file:
        return _within(file.read(most + 1), most)


def _within(text: bytes, most: int) -> bytes:
    if len(text) > most:
        raise InvalidProblem(f"it has more than {most:,} bytes, which no such file needs")
    return text


def parse(text: bytes, most: int = SIZE) -> Any:
    """The value of JSON in UTF-8. Integers have 64 bits at most; NaN and inf are taken, as Python writes them."""
    _within(text, most)
    try:
        value = json.loads(text.decode(), parse_int=_integer)
    except InvalidProblem:
        raise
    except UnicodeDecodeError:
        raise InvalidProblem("it is not JSON: not text in UTF-8") from None
    except RecursionError:
        raise InvalidProblem(_TOO_DEEP) from None
    except ValueError as error:
        raise InvalidProblem(f"it is not JSON: cut off, or written over: {error}") from None
    if text.count(b"[") + text.count(b"{") > DEPTH and _is_deep(value):
        raise InvalidProblem(_TOO_DEEP)
    if b"\\u" in text and not _is_text(value):
        raise InvalidProblem("it is not JSON: it has half of a surrogate pair, which is no letter")
    return value


def tables(path: Path, most: int = SIZE) -> dict[str, Any]:
    """The tables of a TOML file, of which no more than ``most`` bytes are read. Raises ``OSError``, as ``load``."""
    import tomllib  # slow to import

    try:
        return tomllib.loads(content(path, most).decode())
    except InvalidProblem:
        raise
    except UnicodeDecodeError:
        raise InvalidProblem("it is not TOML: not text in UTF-8") from None
    except RecursionError:
        raise InvalidProblem("it is not TOML that can be read: nested too deep") from None
    except ValueError as error:
        raise InvalidProblem(f"it is not TOML: {error}") from None


_TOO_DEEP = f"it is not JSON that can be read: nested more than {DEPTH} deep"


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _DIGITS else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise InvalidProblem(f"it has an integer of {len(digits)} digits: expected at most 64 bits")
    return number


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in level)


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def table(found: Any, wanted: Mapping[str, Any], name: str = "it") -> dict[str, Any]:
    """The fields ``wanted`` of an object, each of the type given. Those that may be None may be missing."""
    values = _object(found, name)
    return {field: _field(values, field, kind, name) for field, kind in wanted.items()}


def made(kind: type[_Made], found: Any, name: str = "it", *, others: bool = False) -> _Made:
    """An instance of a dataclass from an object. Fields that it has not raise, unless ``others`` are to be left out."""
    values, types, defaults = _object(found, name), *_fields(kind)  # type: ignore[arg-type]
    if not others and (unknown := values.keys() - types):
        raise InvalidProblem(f"{name} has unknown fields: {', '.join(shown(field) for field in sorted(unknown))}")
    taken = {
        field: _field(values, field, types[field], name) for field in types if field in values or field not in defaults
    }
    return kind(**taken)


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass, and which of its fields have a default."""
    types, listed = get_type_hints(kind), fields(kind)
    given = (f.name for f in listed if f.default is not MISSING or f.default_factory is not MISSING)
    return {f.name: types[f.name] for f in listed}, frozenset(given)


def _object(found: Any, name: str) -> dict[str, Any]:
    values: dict[str, Any] = checked(found, dict, name)
    return values


def _field(values: dict[str, Any], field: str, kind: Any, name: str) -> Any:
    value = values.get(field)
    if type(value) is kind:  # one of those of JSON
        return value
    if value is None and field not in values and NoneType not in _parts(kind)[1]:
        raise InvalidProblem(f"{name} has no field {field!r}")
    return checked(value, kind, field if name == "it" else f"{name}.{field}")


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a type is made of: ``list[int]`` of ``list`` and ``int``."""
    return get_origin(kind), get_args(kind)


def _cut(key: str) -> str:
    """A key of the file's own, as part of a sentence."""
    return key if len(key) <= _KEY else shown(key)


def checked(value: Any, kind: Any, name: str = "it") -> Any:
    """``value`` as the type ``kind``: a list becomes the tuple, and an object the dataclass, that ``kind`` says."""
    if kind in _PLAIN:
        wanted, expected = _PLAIN[kind]
        if isinstance(value, wanted) and isinstance(value, bool) is (kind is bool):
            return value
        raise InvalidProblem(f"{name} is {shown(value)}: expected {expected}")
    if kind is Any:
        return value
    origin, parts = _parts(kind)
    if origin in (Union, UnionType):
        (one,) = (part for part in parts if part is not NoneType)  # a type, or None
        return None if value is None else checked(value, one, name)
    if origin is Literal:
        if value not in parts:
            raise InvalidProblem(f"{name} is {shown(value)}: expected one of {', '.join(map(str, parts))}")
        return value
    if origin is dict:
        return {key: checked(item, parts[1], f"{name}.{_cut(key)}") for key, item in _object(value, name).items()}
    if origin in (list, tuple):
        items = checked(value, list, name)
        if parts[-1] is ... and set(map(type, items)) == {parts[0]}:
            return tuple(items)
        kinds = [parts[0]] * len(items) if origin is list or parts[-1] is ... else parts
        if len(items) != len(kinds):
            raise InvalidProblem(f"{name} is {shown(value)}: expected a list of {len(kinds)}")
        return origin(checked(*each, f"{name}[{place}]") for place, each in enumerate(zip(items, kinds, strict=True)))
    assert is_dataclass(kind), kind
    return made(kind, value, name)  # type: ignore[arg-type]
