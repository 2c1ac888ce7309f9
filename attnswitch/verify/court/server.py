"""``Server``: the process that candidates are forked from, as the judge has it, and the candidate that lives now."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import secrets
import select
import signal
import sys
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attnswitch.child import Child, ending
from attnswitch.errors import InvalidProblem
from attnswitch.verify.court import forks, messages, processes
from attnswitch.verify.court.messages import Answer, Ask
from attnswitch.verify.court.wire import Arena, Results

__all__ = ["PLACE", "Gone", "Server", "begin", "give_back", "kept", "taken"]

_MARK, _BYTES = "ATTNSWITCH_COURT", 16
#: Variables of a process in which servers ``begin``: there is room for their marks.
PLACE = MappingProxyType({_MARK: "0" * 2 * _BYTES})
#: Exit codes of a process that writes to memory it may only read.
_OF_MEMORY = frozenset((-signal.SIGSEGV, -signal.SIGBUS))
#: Seconds that a candidate's first answer may take beside the others, as its code is loaded; and that an end may take.
_START, _END = 120.0, 10.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Gone(Exception):
    """The candidate ended, or was ended since it did not answer; ``check`` says which: "crash" or "hang"."""

    def __init__(self, how: str, check: str = "crash") -> None:
        super().__init__(how)
        self.check = check


class Server:
    """Starts the process; its first answer waits for it. Its files are ``within`` a folder, if one is given.

    One that is for words has not loaded torch, which takes seconds, and no kernel is to run in it. One that is
    ``forked`` has what this process has loaded, which is to know nothing that a candidate may not, and was started with
    the variables of ``PLACE``.
    """

    def __init__(self, within: Path | None = None, words: bool = False, forked: bool = False) -> None:
        self.words = words
        token = {_MARK: secrets.token_hex(_BYTES)}
        #: In the environment of candidates and of all that they start.
        self.mark = "=".join(*token.items())
        arguments = () if words else ("kernels",)
        if forked:
            self._child = Child.forked(forks.serve, *arguments, variables=token, within=within)
        else:
            self._child = Child(forks.__name__, *arguments, variables=token, apart=True, within=within)
        self.arena, self.results = Arena(self._child.folder), Results(self._child.folder)
        self._events = select.poll()  # that of a connection makes one for each wait
        self._events.register(self._child.events, select.POLLIN)
        self._asked, self._timeout, self._until, self._candidate = 0, 0.0, 0.0, set[int]()
        #: Whether no candidate has answered yet since the last one ended.
        self.fresh = True
        self.ended = False
        _adoption.begin()
        _servers.add(self._child.number)

    def ask(self, ask: Ask, timeout: float) -> None:
        """Ask the candidate that lives; ``answer`` has what it says, and this process may do something meanwhile.

        It has ``timeout`` seconds.
        """
        self._asked += 1
        self._timeout = timeout
        self._until = time.monotonic() + timeout + (_START if self.fresh else 0.0)
        with contextlib.suppress(OSError):  # that nobody listens is found where the answer is waited for
            self._child.requests.send_bytes(pickle.dumps((self._asked, ask)))

    def answer(self) -> Answer:
        """The answer to what was asked; another candidate follows one that is ``Gone``."""
        try:
            answer = self._answer()
        except Gone:
            self.renew()
            raise
        except InvalidProblem as error:
            self.renew()
            raise Gone(f"its answer is none: {error}") from None
        except (EOFError, OSError):
            long, said = self._child.events.closed, self._child.said() if self.fresh else ""
            self.end()
            if long:
                raise Gone(f"its answer is none: it has more than {messages.MOST:,} bytes") from None
            raise Gone(f"it ended the process that it was forked from {said}".strip()) from None
        if answer.ended is not None:
            self.fresh = True
            self._kill(self.left())
            raise Gone(ending(answer.ended) + ", as one does that writes to its inputs" * (answer.ended in _OF_MEMORY))
        if self.fresh:
            self.fresh, self._candidate = False, processes.children(self._child.number)
        return answer

    def _answer(self) -> Answer:
        """The answer to the last question, or that the candidate ended."""
        heard = 0
        while self._events.poll(max(0.0, 1e3 * (self._until - time.monotonic()))):
            answer = messages.decoded(self._child.events.recv_bytes(messages.MOST))
            if answer.ended is not None and self._candidate & processes.children(self._child.number):
                raise InvalidProblem("it says that the process ended, which runs")
            if answer.ended is not None or answer.number == self._asked:
                return answer
            if not 0 < answer.number < self._asked:  # a smaller one is of a question before, left unread
                raise InvalidProblem("it is to another question")
            heard += 1
            if heard >= self._asked:
                raise InvalidProblem("it answers more often than it was asked")
        raise Gone(self._silent(), "hang")

    def _silent(self) -> str:
        """What to say of a candidate that does not answer."""
        there = processes.descendants(self._child.number)
        if not there:
            return "it ended, and not even its end was told"
        state = ", ".join(sorted({processes.state(number) for number in there} - {""})) or "running"
        return f"no answer after {self._timeout:g} s; the process was {state}, and was ended"

    def left(self) -> dict[int, str]:
        """Processes of candidates that are not the candidate nor a compiler's, by number, with their command lines."""
        there = processes.below(os.getpid())
        if there <= {self._child.number, *processes.children(self._child.number)}:
            return {}
        every = self._all()
        forked = processes.children(self._child.number)  # looked at last: a new candidate is forked at any time
        found = {n: self._named(line) for n, line in every.items() if n not in forked}
        return {n: line for n, line in found.items() if not processes.is_compilers(n)}

    def _named(self, line: str) -> str:
        """A command line, unless it is that of the process that candidates are forked from."""
        return "a fork of its own" if line == processes.command(self._child.number) else line

    def _adopted(self, below: Container[int]) -> dict[int, str]:
        """Processes whose parents, which were candidates' or theirs, ended: they are this process's.

        They are known by their mark. Where this process starts nothing but one server, and what compiles, all others
        are.
        """
        found = {}
        only = _alone and is_only()
        for number, line in processes.descendants(os.getpid()).items():
            if number == self._child.number or number in below:
                continue
            if self._is_marked(number) or (only and not processes.is_compilers(number)):
                found[number] = line
        return found

    def _is_marked(self, number: int) -> bool:
        try:
            return self.mark.encode() in Path(f"/proc/{number}/environ").read_bytes()
        except OSError:
            return False

    def end_left(self) -> dict[int, str]:
        """``left``, having ended them."""
        found = self.left()
        self._kill(found)
        return found

    def renew(self) -> None:
        """End the candidate and all that it started; the next question is for a new one."""
        if self.ended:
            return
        self.fresh = True
        self._kill(self._all())
        try:
            while self._child.events.poll(_END):
                content = self._child.events.recv_bytes(messages.MOST)
                with contextlib.suppress(InvalidProblem):
                    if messages.decoded(content).ended is not None:
                        return
        except (EOFError, OSError):
            pass
        self.end()

    def end(self) -> None:
        """End it with its candidates."""
        if not self.ended:
            self.ended = True
            found = self._all()
            self._kill(found)
            self._child.end()
            self.arena.close()
            self.results.close()
            late = self._adopted(())  # a candidate that was forked meanwhile
            self._kill(late)
            for number in {*found, *late, *self._candidate}:  # those whose parent it was are this process's now
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(number, 0)
            _adoption.end()
            _servers.discard(self._child.number)

    def _all(self) -> dict[int, str]:
        below = processes.descendants(self._child.number)
        return {**below, **self._adopted(below)}

    @staticmethod
    def _kill(numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)


class _Adoption:
    """While a server lives, processes whose parents end are this process's, where they are found; after, as before."""

    def __init__(self) -> None:
        self._servers, self._before = 0, 0

    def begin(self) -> None:
        """For one more server."""
        if not self._servers:
            self._before = self._get()
            self._set(1)
        self._servers += 1

    def end(self) -> None:
        """For one less."""
        self._servers -= 1
        if not self._servers:
            self._set(self._before)

    @staticmethod
    def _get() -> int:
        adopts = ctypes.c_int(0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts))
        return adopts.value

    @staticmethod
    def _set(adopts: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, adopts)


_adoption = _Adoption()
#: Numbers of their processes.
_servers = set[int]()
#: Those that nobody uses now; None where none are kept.
_spare: list[Server] | None = None
#: Whether nothing else stays that this process starts.
_alone = False


def is_only() -> bool:
    """Whether there is one server in this process."""
    return len(_servers) == 1


@contextlib.contextmanager
def kept(alone: bool = False) -> Iterator[None]:
    """Within the context, a server that is given back is there for who takes one next, as its start takes seconds.

    ``alone``: of what this process starts, servers stay, and what compiles, and nothing else.
    """
    global _alone, _spare
    outer, _alone, _spare = (_alone, _spare), alone, []
    try:
        yield
    finally:
        for server in _spare:
            server.end()
        _alone, _spare = outer


def begin(within: Path | None) -> None:
    """Begin a server that is kept, for who takes one next: a fork, where CUDA has not begun, which no fork can use."""
    assert _spare is not None
    torch: Any = sys.modules.get("torch")
    _spare.append(Server(within, forked=torch is None or not torch.cuda.is_initialized()))


def taken(within: Path | None, words: bool = False) -> Server:
    """A server, of which no candidate knows anything yet; one that is kept is for more than words."""
    return _spare.pop() if _spare else Server(within, words)


def give_back(server: Server) -> None:
    """End its candidate; and it, unless it is kept."""
    if _spare is None or _spare or server.words:
        server.end()
        return
    if not server.fresh:  # else its candidate knows nothing yet
        server.renew()
    if not server.ended:
        _spare.append(server)
