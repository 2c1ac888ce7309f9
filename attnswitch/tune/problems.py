"""What to measure: the catalogue, the shapes of a public model, or what an application recorded."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of
from attnswitch.planning.choice import stands_for
from attnswitch.problem import Problem
from attnswitch.tune.trial import plainly
from attnswitch.wisdom.classes import TILE, SpeedClass, speed_class

__all__ = ["catalogue", "distinct", "models", "of_model", "recorded"]

#: The shortest prompt of a model that is measured. Beside each prompt that is a multiple of the tile one is measured
#: that has so many tokens less.
_SHORTEST, _LESS = 128, 24


def catalogue(kind: str) -> list[Problem]:
    """The problems of the catalogue for a kind of device, "cpu" or "cuda"."""
    return [Problem.parse(text) for text in _data("catalogue.toml")[kind]]


def models() -> dict[str, dict[str, Any]]:
    """The table of models, by name; ``models.toml`` explains the keys."""
    return _data("models.toml")


def of_model(
    name: str, context: int | None = None, *, batch: int = 1, dtype: str = "bf16", train: bool = False
) -> list[Problem]:
    """The calls that a model makes with up to ``context`` tokens, by default as many as it was trained for.

    A causal model has prompts of 128 tokens to ``context``, prompts that are slightly shorter (most are no multiple of
    a tile), and single tokens that follow prompts of these lengths. Other models have whole inputs. With ``train``
    there are only whole inputs, with gradients.

    Raises ``InvalidProblem`` for a model that is not in the table, or a context that makes no sense or no difference.
    """
    if name not in models():
        raise InvalidProblem(f"model {name!r} is not known; {one_of(name, models())}")
    model = models()[name]
    if context is not None and "tokens" in model:
        lengths = ", ".join(model["tokens"])
        raise InvalidProblem(
            f"context {context}: calls of {name} have as many tokens as its input always has: {lengths}"
        )
    context = model["context"] if context is None else context
    if context < 1:
        raise InvalidProblem(f"context {context}: expected a number of tokens")
    head = f"b{batch} h{model['heads']}"
    tail = f"d{model['dim']} {dtype}" + (f" softcap={model['softcap']}" if "softcap" in model else "")
    if model.get("padded"):
        tail += " mask=bool:bk"
    calls = []
    prompts = model["causal"] and not train
    for length in model.get("tokens") or map(str, _lengths(context)):
        ragged = [str(int(length) - _LESS)] if prompts and int(length) % TILE == 0 else []
        for size in (*ragged, length):
            whole = f"{head} s{size} {tail}" + (" causal" if model["causal"] else "")
            calls.append(whole + (" grad" if train else ""))
            if "window" in model and int(size) > model["window"]:
                calls.append(f"{calls[-1]} window={model['window'] - 1},0")
        if prompts:
            calls.append(f"{head} s1x{length} {tail}")
    return [Problem.parse(text) for text in calls]


def _lengths(context: int) -> Iterator[int]:
    """Powers of two below ``context``, then it."""
    length = _SHORTEST
    while length < context:
        yield length
        length *= 2
    yield context


def recorded(path: Path) -> list[Problem]:
    """The problems of a file that ``attnswitch.record`` wrote.

    Raises:
        InvalidProblem: it is not text, or a line is not a problem; the message says which.
        OSError: it cannot be read.
    """
    try:
        text = reading.content(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidProblem(f"{path} is not a recording: it is not text in UTF-8 ({error.reason})") from None
    except InvalidProblem as problem:
        raise InvalidProblem(f"{path} is not a recording: {problem}") from None
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                problems.append(Problem.parse(line))
            except InvalidProblem as error:
                raise InvalidProblem(f"{path}, line {number}: {error}") from None
    return problems


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """The first problem of each class. Empty problems, which take no time, are left out.

    In place of one whose choice is another's it is that one: what is measured of it alone changes nothing.
    """
    classes: dict[SpeedClass, Problem] = {}
    for problem in map(stands_for, problems):
        if not problem.is_empty:
            classes.setdefault(speed_class(problem), plainly(problem))
    return list(classes.values())


@functools.cache
def _data(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("attnswitch.tune").joinpath(name).read_text(encoding="utf-8"))
