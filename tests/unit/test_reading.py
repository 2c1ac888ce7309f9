"""Reading what anybody may have written: the limits of JSON, and values held against types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from attnswitch import reading
from attnswitch.errors import InvalidProblem


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["round", "square"] = "round"


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    share: float | None = None
    pair: tuple[int | None, int | None] | None = None
    sizes: tuple[int, ...] = ()
    versions: dict[str, str] | None = None


WHOLE = {
    "name": "a",
    "inner": {"size": 3},
    "share": 1,
    "pair": [None, 2],
    "sizes": [1, 2, 3],
    "versions": {"torch": "2"},
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "it is not JSON: cut off, or written over"),
        (b"", "it is not JSON: cut off"),
        (b"\xff\xfe{\0}\0", "not text in UTF-8"),
        (33 * b"[" + 33 * b"]", "nested more than 32 deep"),
        (10**6 * b"[", "nested more than 32 deep"),
        ((reading.SIZE + 1) * b" ", "more than 67,108,864 bytes"),
        (5000 * b"1", "an integer of 5000 digits: expected at most 64 bits"),
        (b"18446744073709551616", "an integer of 20 digits"),
        (b"-9223372036854775809", "an integer of 20 digits"),
        (rb'{"\ud800": 1}', "half of a surrogate pair"),
    ],
    ids=lambda value: value[:8] if isinstance(value, bytes) else "",
)
def test_what_is_beyond_the_limits(text: bytes, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        reading.parse(text)


def test_what_is_within_the_limits() -> None:
    assert reading.parse(b"[18446744073709551615, -9223372036854775808]") == [2**64 - 1, -(2**63)]
    assert reading.parse(32 * b"[" + 32 * b"]") is not None
    assert reading.parse(b"[" + 99 * b"[1]," + b"2]") == [*[[1]] * 99, 2]
    assert reading.parse(rb'"\ud83d\ude00"') == "\U0001f600"
    assert math.isnan(reading.parse(b"NaN"))


def test_no_more_of_a_file_is_read_than_it_may_have() -> None:
    with pytest.raises(InvalidProblem, match="more than 1,000 bytes"):
        reading.load(Path("/dev/zero"), 1000)


def test_an_object_becomes_the_dataclass() -> None:
    made = reading.made(Outer, WHOLE)
    assert made == Outer("a", Inner(3), 1.0, (None, 2), (1, 2, 3), {"torch": "2"})
    assert reading.made(Outer, {**WHOLE, "later": 1}, others=True) == made
    assert reading.made(Outer, {"name": "a", "inner": {"size": 3}}) == Outer("a", Inner(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "thing.name is 1: expected text"),
        ({"share": "1"}, "thing.share is '1': expected a number"),
        ({"share": True}, "thing.share is True: expected a number"),
        ({"inner": {"size": True}}, "thing.inner.size is True: expected an integer"),
        ({"inner": {"size": 1.0}}, "thing.inner.size is 1.0: expected an integer"),
        ({"inner": {}}, "thing.inner has no field 'size'"),
        ({"inner": {"size": 1, "kind": ["round"]}}, r"thing.inner.kind is \['round'\]: expected one of round, square"),
        ({"inner": []}, r"thing.inner is \[\]: expected an object"),
        ({"pair": [1]}, r"thing.pair is \[1\]: expected a list of 2"),
        ({"sizes": "123"}, "thing.sizes is '123': expected a list"),
        ({"sizes": [1, None]}, r"thing.sizes\[1\] is None: expected an integer"),
        ({"versions": {"torch": 2}}, "thing.versions.torch is 2: expected text"),
        ({"colour": 1, "shape": 2}, "thing has unknown fields: 'colour', 'shape'"),
    ],
)
def test_what_is_of_another_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        reading.made(Outer, {**WHOLE, **change}, "thing")


def test_a_field_that_may_be_none_may_be_missing() -> None:
    assert reading.table({"a": 1, "c": 3}, {"a": int, "b": int | None}) == {"a": 1, "b": None}
    with pytest.raises(InvalidProblem, match="it has no field 'b'"):
        reading.table({"a": 1}, {"a": int, "b": int})
    with pytest.raises(InvalidProblem, match="it is 3: expected an object"):
        reading.table(3, {})


def test_a_message_is_short_whatever_it_is_about() -> None:
    with pytest.raises(InvalidProblem) as caught:
        reading.checked("x" * 10**6, int)
    assert len(str(caught.value)) < 300


def test_a_message_is_short_whatever_a_key_is() -> None:
    with pytest.raises(InvalidProblem, match=r"^it\.'9+\.\.\.9+' is \[\]: expected text$") as refused:
        reading.checked({"9" * 5000: []}, dict[str, str])
    assert len(str(refused.value)) < 300
    with pytest.raises(InvalidProblem, match=r"^it\.torch is \[\]: expected text$"):
        reading.checked({"torch": []}, dict[str, str])
