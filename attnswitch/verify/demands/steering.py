"""Cases drawn within a requirement, so that each of its classes is met as often as is wanted: free draws miss some.

They are drawn one after another, as they are needed, and the same whoever asks: what a case is follows from the seed,
the requirement and its number. The word that it is drawn for comes in turn, and it counts for every word that says
something of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from attnswitch.errors import InvalidProblem
from attnswitch.verify.checks import named
from attnswitch.verify.demands.draws import Draw
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.choices import Seeded
from attnswitch.verify.drawing.strategies import Space, recipe

__all__ = ["EACH", "cases", "require", "shared"]

#: Cases of each word, at least; and so many are drawn for it, whatever others bring.
EACH = 8
#: Draws for one case, of which most are thrown away where words exclude each other.
_TRIES = 400


def cases(requirement: Requirement, space: Space, seed: int, each: int = EACH, recipes: int = 1) -> Iterator[Case]:
    """Cases until every word of ``requirement`` has ``each``; ``shared`` says how many follow that share a problem.

    Raises ``InvalidProblem`` at once if the words leave no case of one of them.
    """
    require(requirement, space, seed)
    return _cases(requirement, space, seed, each, recipes)


def _cases(requirement: Requirement, space: Space, seed: int, each: int, recipes: int) -> Iterator[Case]:
    words, found = requirement.words, Counter[str]()
    for number in itertools.count():
        word = words[number % len(words)]
        if number >= len(words) * min(each, EACH):
            if all(found[wanted] >= each for wanted in words):
                return
            if found[word] >= each:
                continue
        case = _drawn(requirement, space, seed, number)
        if case is None:  # by bad luck: there is one
            continue
        suiting = _checks(case, space)
        for n in range(1 if case.unseeded else shared(each, recipes)):
            found.update(requirement.classes(case))
            yield recipe(case, n, suiting)


def shared(each: int, recipes: int) -> int:
    """How many cases share a problem, of up to ``recipes``: a few words are to have several problems first."""
    return max(1, min(recipes, each // EACH))


def require(requirement: Requirement, space: Space, seed: int) -> None:
    """Raise ``InvalidProblem`` if the words leave no case of one of them."""
    for number, word in enumerate(requirement.words):
        if _drawn(requirement, space, seed, number) is None:
            what = "name what goes with it, or require it apart"
            if word == "turned" and "numpy" not in space.libraries:
                what = "NumPy's arrays alone run backwards, and none are drawn here"
            raise InvalidProblem(f"require {requirement}: no problem within it is {word}: {what}")


def _drawn(requirement: Requirement, space: Space, seed: int, number: int) -> Case | None:
    """Case ``number``, with a check that applies to it in three of four; None if no draw came to anything."""
    choices, word = Seeded(f"{seed} {requirement} {number}"), requirement.words[number % len(requirement.words)]
    drawn = (Draw(requirement, space, choices, word).case() for _ in range(_TRIES))
    case = next((case for case in drawn if case is not None and word in requirement.classes(case)), None)
    if case is None:
        return None
    checks = _checks(case, space)
    return case if not checks or choices.often(4) else case.replace(check=choices.of(checks))


def _checks(case: Case, space: Space) -> tuple[str, ...]:
    """Those of the space that apply; they are of its device already."""
    return tuple(name for name in space.checks if named(name).suits(case, "cuda"))
