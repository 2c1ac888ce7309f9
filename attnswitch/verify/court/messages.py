"""What judge and candidate say: questions with a problem and arrays, and answers of JSON within limits."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnswitch import reading
from attnswitch.arrays import Array
from attnswitch.errors import InvalidProblem
from attnswitch.machine.backend import Inputs, Offsets, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.verify.court.wire import Layout
from attnswitch.verify.launch.surroundings import PLAIN, Surroundings

__all__ = [
    "LAUNCHES",
    "MOST",
    "SENTENCE",
    "About",
    "Answer",
    "Ask",
    "OfProblem",
    "Raised",
    "What",
    "arrays_of",
    "decoded",
    "encoded",
    "inputs_of",
]

#: Bytes of an answer, and letters of a sentence in it.
MOST, SENTENCE = 2**20, 4000

_OfDevice = Literal["regimes", "toolchain"]
_OfProblem = Literal["problem", "precision", "configs"]
_OfCall = Literal["forward", "results", "backward", "replay"]
LAUNCHES = get_args(_OfCall)
#: Of a backend, of a device, of a problem, of a call; and what was seen since it was last asked.
What = Literal["about", "unavailable"] | _OfDevice | _OfProblem | _OfCall | Literal["conduct"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A question. The inputs are those of ``Inputs``, laid out in the memory that both see, ``size`` bytes of it."""

    what: What
    problem: Problem | None = None
    device: Device | None = None
    #: The number of a config among those of the problem.
    config: int = 0
    inputs: tuple[Layout | None, ...] = ()
    seed: int | None = None
    #: Output and lse as they were, and the upstream gradients; of a replay, other numbers for the inputs.
    upstream: tuple[Layout | None, ...] = ()
    size: int = 0
    #: Whose kernels are to run; and whether to tell of torch's own attention and products.
    backend: str = ""
    forbidden: bool = False
    around: Surroundings = PLAIN

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, name) for name in Ask.__slots__[3:])
        return _asked, (self.what, _packed(self.problem), _packed((self.device, self.where)), *values)

    @property
    def where(self) -> str:
        """Where the device is, as text: cpu, or cuda:0."""
        return "" if self.device is None else self.device.where


@functools.lru_cache(maxsize=64)
def _packed(value: Any) -> bytes:
    """What one question after another is about: it is packed once, and unpacked once."""
    return pickle.dumps(value)


@functools.lru_cache(maxsize=64)
def _unpacked(content: bytes) -> Any:
    return pickle.loads(content)


def _asked(what: What, problem: bytes, device: bytes, *values: Any) -> Ask:
    return Ask(what, _unpacked(problem), _unpacked(device)[0], *values)


def arrays_of(inputs: Inputs) -> tuple[Array | None, ...]:
    """All of a call's, and None where there is none."""
    return (*inputs[:5], *(inputs.offsets or (None, None)), *inputs[7:])


def inputs_of(arrays: Sequence[Any], seed: int | None) -> Inputs:
    """The inputs that have ``arrays``."""
    query, key, value, mask, lengths, of_query, of_key, *rest = arrays
    offsets = None if of_query is None else Offsets(of_query, of_key)
    return Inputs(query, key, value, mask, lengths, seed, offsets, *rest)


@dataclass(frozen=True, slots=True)
class About:
    """The class attributes of a backend, and why it could not be loaded, if it could not."""

    missing: str = ""
    library: str = "numpy"
    libraries: tuple[str, ...] = ()
    #: Whether torch differentiates its output, so that the candidate has it done.
    autograd: bool = False
    restarts: bool = True
    wants_seed: bool = False
    varlen: bool = False
    sinks: bool = False
    alibi: bool = False
    paged: bool = False
    caches: tuple[str, ...] = ()
    trees: bool = False
    splits: bool = False
    builds_per_shape: bool = False
    approximate: bool = False
    notice: str = ""
    divergences: str = ""
    lacks: tuple[str, ...] = ()
    emulation: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfProblem:
    """What a backend says of a problem, in one answer: every question takes longer than what it asks for.

    ``configs`` and ``precision`` are None where there are ``reasons``, or where they raise an error, which comes when
    they are asked for alone.
    """

    reasons: list[str]
    configs: list[str] | None = None
    precision: Precision | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """What a kernel raised: one of attnswitch's own errors by its name, "memory", or another; and where."""

    kind: str
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``said`` is what was asked for in words, ``results`` where the arrays lie in the file of results.

    ``told`` is what was seen of the kernel's conduct.
    """

    said: Any = None
    results: tuple[Layout | None, ...] = ()
    raised: Raised | None = None
    told: tuple[str, ...] = ()
    number: int = 0
    #: The exit code of a candidate, whose answer this is not.
    ended: int | None = None


def encoded(answer: Answer) -> bytes:
    """The bytes of an answer, without what it does not say."""
    said = {name: value for name in Answer.__slots__ if (value := getattr(answer, name)) is not None and value != ()}
    return json.dumps(said, default=_plain, ensure_ascii=False).encode(errors="replace")  # half a letter is none


def _plain(value: Any) -> Any:
    """A dataclass of an answer as a dictionary, anything else as text."""
    if isinstance(value, Layout | Raised):
        return {name: getattr(value, name) for name in type(value).__slots__}
    return str(value)


def decoded(content: bytes) -> Answer:
    """An answer from bytes that anybody may have sent. Raises ``InvalidProblem`` for what is none."""
    answer = reading.made(Answer, reading.parse(content, MOST))
    texts = [*answer.told, *((answer.raised.kind, answer.raised.text, answer.raised.where) if answer.raised else ())]
    if any(len(text) > SENTENCE for text in texts):
        raise InvalidProblem(f"it has a sentence of more than {SENTENCE:,} letters")
    return answer
