"""``Proxy``: a backend as the judge's process has it, whose kernels run in a ``candidate``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from attnswitch import reading
from attnswitch.arrays import Array
from attnswitch.errors import BackendUnavailable, CompileError, InvalidProblem, Unsupported, VerificationError
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel, Precision, Regime
from attnswitch.machine.device import Device
from attnswitch.names import in_a_line
from attnswitch.problem import Problem
from attnswitch.verify.court import limits, server
from attnswitch.verify.court.messages import LAUNCHES, About, Answer, Ask, OfProblem, Raised, What, arrays_of
from attnswitch.verify.court.server import Gone, Server
from attnswitch.verify.launch.surroundings import surroundings

__all__ = ["Captured", "Proxy", "Raising"]

_KINDS = {kind.__name__: kind for kind in (BackendUnavailable, CompileError, Unsupported)}
#: Bytes that results may have beside: small gradients, and an lse of heads of one column.
_ROOM = 2**16


_Said = TypeVar("_Said")


class Raising(RuntimeError):
    """What a kernel raised in its own process, in ``where``."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where


@dataclass(frozen=True, slots=True)
class Numbered(Config):
    """A config of the candidate, by its number and its text."""

    number: int = 0
    text: str = ""

    def __str__(self) -> str:
        return self.text


class Proxy(Backend):
    """The backend called ``name``, of which nothing is imported here.

    A question is given ``timeout`` seconds. ``forbidden`` has torch's own attention and products told. Files
    are ``within`` a folder, if one is given.
    """

    def __init__(self, name: str, timeout: float, forbidden: bool = False, within: Path | None = None) -> None:
        self.name = name  # type: ignore[misc]
        self._timeout, self._forbidden, self._within = timeout, forbidden, within
        self._server: Server | None = None
        self._told: dict[str, None] = {}
        self._limits = limits.held()
        #: What to do while the next kernel runs.
        self.meanwhile: Callable[[], None] | None = None
        #: Calls that are captured in graphs.
        self.captured: Captured | None = None
        try:
            about = self._about()
        except BaseException:  # of the user, who did not wait for it to load
            self.end()
            raise
        #: Why it could not be loaded, if it could not.
        self.missing = about.missing
        for attribute in About.__slots__:
            if attribute not in ("missing", "autograd"):
                setattr(self, attribute, getattr(about, attribute))
        self.lacks = frozenset(about.lacks)  # type: ignore[misc]
        if name not in registry.names():  # the name of a file in a package, which would be imported
            self.divergences = ""  # type: ignore[misc]

    def _about(self) -> About:
        try:
            return _said(self._ask(Ask("about")), About)
        except (Gone, Raising) as error:
            return About(missing=f"it could not be loaded: {error}")

    # -- as a backend --------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        """As the candidate says."""
        said = self._ask(Ask("unavailable"))
        return None if said.said is None else _said(said, str)

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """As the candidate says."""
        yield from self._of_problem(problem, device).reasons

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _of_problem(self, problem: Problem, device: Device) -> OfProblem:
        return _said(self._ask(Ask("problem", problem, device)), OfProblem)

    def regimes(self, device: Device) -> tuple[Regime, ...]:
        """As the candidate says."""
        return tuple(_said(self._ask(Ask("regimes", None, device)), list[Regime]))

    def toolchain(self, device: Device) -> Mapping[str, str]:
        """As the candidate says."""
        return _said(self._ask(Ask("toolchain", None, device)), dict[str, str])

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        """As the candidate says."""
        texts = self._of_problem(problem, device).configs
        if texts is None:
            texts = _said(self._ask(Ask("configs", problem, device)), list[str])
        yield from itertools.starmap(Numbered, enumerate(texts))

    def precision(self, problem: Problem, device: Device) -> Precision:
        """As the candidate says."""
        precision = self._of_problem(problem, device).precision
        return precision or _said(self._ask(Ask("precision", problem, device)), Precision)

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        """A kernel whose calls are the candidate's, which compiles it for the first of them."""
        return _Kernel(self, problem, device, config.number if isinstance(config, Numbered) else 0)

    # -- questions -----------------------------------------------------------------------------------------------------

    def call(
        self,
        what: What,
        problem: Problem,
        device: Device,
        config: int,
        inputs: Inputs,
        upstream: tuple[Array | None, ...],
    ) -> list[Array | None]:
        """The arrays that a kernel makes of these."""
        memory = self._seated(what)
        given = arrays_of(inputs)
        captured = None if self.captured is None or what != "forward" else self.captured.of(inputs)
        if captured is not None:
            what, given, upstream = "replay", arrays_of(captured), given
        layout = memory.arena.put((*given, *upstream))
        count, size, around = len(given), memory.arena.size, surroundings(device.where)
        ask = Ask(what, problem, device, config, layout[:count], inputs.seed, layout[count:], size, around=around)
        answer = self._ask(ask)
        if memory.arena.changed():
            self._told["it wrote to its inputs"] = None
        most = _most(problem, inputs)
        like = layout[0]
        assert like is not None
        with _words():
            return [memory.results.read(result, most, like) for result in answer.results]

    def conduct(self) -> str:
        """What was seen of its conduct since this was last asked; what it left running is ended."""
        if self._server is not None and not self._server.fresh and not self._server.words:
            try:
                self._ask(Ask("conduct"))
            except (Gone, Raising) as error:
                self._told[f"it could not be looked at: {error}"] = None
            if left := self._server.end_left():
                line = max(left.values(), key=bool)[:200]  # one of those that could be read
                many = f"{len(left)} processes" if len(left) > 1 else "a process"
                self._told[f"it left {many} running: {line}"] = None
        told, self._told = self._told, {}
        return in_a_line("; ".join(told))

    def end(self) -> None:
        """End the candidate, and all that it started."""
        if self._server is not None:
            server.give_back(self._server)
            self._server = None

    def _seated(self, what: What) -> Server:
        """The server, a new one where the last was ended, or was one for words and a kernel is to run."""
        words = what not in LAUNCHES and ":" not in self.name  # a target most likely loads torch itself
        if self._server is not None and self._server.words and not words:
            self._server.end()
        if self._server is None or self._server.ended:
            self._server = server.taken(self._within, words)
        return self._server

    def _ask(self, ask: Ask) -> Answer:
        seated = self._seated(ask.what)
        seated.ask(replace(ask, backend=self.name, forbidden=self._forbidden), self._timeout)
        if self.meanwhile is not None and ask.what in LAUNCHES:
            work, self.meanwhile = self.meanwhile, None
            work()
        try:
            answer = seated.answer()
        finally:
            self._hold_limits()
        self._told |= dict.fromkeys(answer.told)
        if answer.raised is not None:
            raise _raising(answer.raised, ask.what in LAUNCHES)
        return answer

    def _hold_limits(self) -> None:
        """Have this process as it was, whatever kernels made of it; who did it is known where one backend sits here."""
        if limits.held() == self._limits:
            return
        if server.is_only():
            self._told["it changed the limits of resources of the process that judges it"] = None
        if not limits.restored(self._limits):
            raise VerificationError(f"while {self.name} ran, the limits of resources of this process were lowered")


class Captured:
    """Inputs of calls, and then whose graph each later call is the replay of."""

    def __init__(self) -> None:
        self._inputs: list[Inputs] = []
        self._in_turn: Iterator[Inputs] | None = None

    def replay(self) -> None:
        """From now on calls are replays."""
        self._in_turn = iter(self._inputs)

    def of(self, inputs: Inputs) -> Inputs | None:
        """The inputs with which the call was captured that one with ``inputs`` replays, if it replays any."""
        if self._in_turn is None:
            self._inputs.append(inputs)
            return None
        return next(self._in_turn)


def _most(problem: Problem, inputs: Inputs) -> int:
    """Bytes that no right result has more of: an output, or the gradient of an operand, in float64."""
    rows: int = math.prod(inputs.query.shape[:3])
    operands: list[int] = [math.prod(array.shape) for array in inputs[:4] if array is not None]
    return 8 * max(rows * problem.dim_v, *operands) + _ROOM


def _said(answer: Answer, kind: type[_Said]) -> _Said:
    """What was said, as the type ``kind``."""
    with _words():
        return reading.checked(answer.said, kind)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _words() -> Iterator[None]:
    """Within the context, what cannot be read is the candidate's fault."""
    try:
        yield
    except InvalidProblem as error:
        raise Gone(f"its answer is none: {error}") from None


def _raising(raised: Raised, launch: bool) -> Exception:
    """The error. Those with a meaning of their own have it where a kernel is compiled or runs."""
    if launch and raised.kind == "memory":
        return MemoryError(raised.text)
    if launch and raised.kind in _KINDS:
        return _KINDS[raised.kind](raised.text)
    return Raising(raised.text, raised.where)


class _Kernel(Kernel):
    """A kernel of the candidate."""

    def __init__(self, proxy: Proxy, problem: Problem, device: Device, config: int) -> None:
        self._proxy, self._of = proxy, (problem, device, config)

    def forward(self, inputs: Inputs) -> tuple[Array, Array | None]:
        """See ``Kernel``."""
        return self._pair("forward", inputs)

    def results(self, inputs: Inputs) -> tuple[Array, Array]:
        """See ``Kernel``."""
        out, lse = self._pair("results", inputs)
        return out, lse

    def _pair(self, what: What, inputs: Inputs) -> tuple[Array, Array | None]:
        made = self._proxy.call(what, *self._of, inputs, ())
        if len(made) != 2 or made[0] is None:
            raise Gone("it answered without an output", "crash")
        return made[0], made[1]

    def backward(
        self, inputs: Inputs, out: Array | None, lse: Array | None, grad_out: Array, grad_lse: Array | None
    ) -> Gradients:
        """See ``Kernel``."""
        made = self._proxy.call("backward", *self._of, inputs, (out, lse, grad_out, grad_lse))
        if len(made) != 4:
            raise Gone("it answered without gradients", "crash")
        return Gradients(*made)
