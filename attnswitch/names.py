"""What a message says of a name that is not known, which may have been meant, and text of others that it repeats."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

__all__ = ["meant", "one_of", "printable", "shown"]

#: How alike two names are, from 0 to 1, where one may be a misspelling of the other.
_ALIKE = 0.65
#: Letters of a name that are looked at, in a time that grows with their square.
_LONGEST = 100
_CUT = reprlib.Repr()
_CUT.maxstring = _CUT.maxother = 200


def one_of(name: object, known: Iterable[str], more: str = "") -> str:
    """``expected one of a, b``, then ``more``, then ``meant``: the end of a sentence about ``name``."""
    known = tuple(known)
    return f"expected one of {', '.join(known)}{more}{meant(name, known)}"


def meant(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'a'?``, if exactly one of ``known`` is the most like ``name``, and alike enough; else nothing.

    By the share of letters that two names have in common, in order, whatever their case (Ratcliff and Obershelp, 1988).
    """
    from difflib import SequenceMatcher  # only ever needed for an error

    asked = str(name)[:_LONGEST].lower()
    likeness = {word: SequenceMatcher(None, asked, word.lower()).ratio() for word in known}
    most = max([0.0, *likeness.values()])  # of a list: torch.compile traces it
    nearest = [word for word, alike in likeness.items() if alike == most]
    return f"; did you mean '{nearest[0]}'?" if most >= _ALIKE and len(nearest) == 1 else ""


def shown(value: object) -> str:
    """``value`` as a message shows it: its repr, cut in the middle where it is long."""
    return _CUT.repr(value)


def in_a_line(text: str) -> str:
    """``text`` without ends of lines, and with one space for several."""
    return " ".join(text.split())


def printable(text: str) -> str:
    """``text`` that a terminal, a page or a file shows and does not act on.

    Control characters (but the ends of lines, and tabs), invisible ones and halves of surrogate pairs become escapes.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)
