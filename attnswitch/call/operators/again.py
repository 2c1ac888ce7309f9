"""Calls that are like the one before go to its launch, past torch's dispatcher.

A compiled graph makes the same few calls in every step. Torch parses each by its schema and takes it through the
dispatcher to a Python function, which makes out options, request and launch: together as long as the launch takes. So
the function that torch's operator is called by first asks whether all that decides is as it was. Where anything looks
at calls (a mode, a transform, a profiler, autograd), or a tensor lies otherwise, the call is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from attnswitch.call import finite, recording
from attnswitch.call.launch import Launch
from attnswitch.call.operators import run
from attnswitch.call.operators.direct import plainly
from attnswitch.call.operators.memory import laid
from attnswitch.call.torch_modes import guards
from attnswitch.planning import policy
from attnswitch.problem import GRAD_OPERANDS
from attnswitch.wisdom import view

__all__ = ["backward", "forward"]

#: Ways that an operator remembers; beyond, it forgets them all.
_MOST = 256
_policy_of_context, _look_of_context, _recording = policy.of_context, finite.of_context, recording.of_context
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled

_Run = TypeVar("_Run", bound=Callable[..., Any])


class _Way(Generic[_Run]):
    """What calls come to whose tensors lie as those did that it was found with, in an equal context."""

    __slots__ = ("alike", "context", "launch", "run")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.context: Hashable = None
        #: None until another call comes to the same launch: what comes once is not worth it.
        self.alike: Callable[..., bool] | None = None
        self.run: _Run

    def holds(self, operands: Sequence[Any], tensors: Sequence[Any]) -> bool:
        """Whether a call with ``operands``, and with all these ``tensors``, is to be run by it."""
        if self.alike is None or self.context != _context() or _profiled():
            return False
        try:
            together = 0
            for tensor in tensors:
                if type(tensor) is not torch.Tensor or tensor.is_nested:  # without sizes guards would end the process
                    return False
                at = tensor.data_ptr()
                if not at:
                    return False
                together |= at
            if together & 15 or not self.alike(*tensors):
                return False
        except (AttributeError, RuntimeError, TypeError, ValueError):  # of a tensor without memory of its own
            return False
        look = self.launch.look
        return look is None or look(*operands[:3])


def _context() -> tuple[Any, ...]:
    return _policy_of_context(), _look_of_context(), _recording(), view.generation()


class _Ways(Generic[_Run]):
    """The ways of an operator, by what its calls say."""

    def __init__(self, bind: Callable[[Launch, dict[str, Any]], _Run]) -> None:
        self._bind = bind
        self._known: dict[Hashable, _Way[_Run]] = {}

    def find(self, said: dict[str, Any], *also: Hashable) -> tuple[Hashable, _Way[_Run] | None]:
        """What a call is known by, None if it cannot be known, and its way, None if it is new."""
        key = (*also, *said, *said.values())
        try:
            return key, self._known.get(key)
        except TypeError:  # a window in a list, or sizes that are symbols
            key = (*also, *said, *[tuple(each) if type(each) is list else each for each in said.values()])
        try:
            return key, self._known.get(key)
        except TypeError:
            return None, None

    def learn(self, key: Hashable, operands: Sequence[Any], tensors: Sequence[Any], said: dict[str, Any]) -> None:
        """Know the way of a call that torch has just made with ``tensors``, the second time that it is met."""
        if key is None or _recording() is not None or not plainly(tensors):
            return
        launch = run.latest(*operands, **said)
        if launch is None or launch.recorded or launch.save is None or launch.differentiate is None:
            return
        way = self._known.get(key)
        if way is None or way.launch is not launch:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _Way(launch)
            return
        way.context, way.run, way.alike = _context(), self._bind(launch, said), guards(tensors)


def forward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_forward`` as it is called, where ``dispatch`` is how torch calls it."""
    ways: _Ways[Callable[..., Any]] = _Ways(_results)

    def call(*given: Any, **said: Any) -> Any:
        if len(given) != 5 or given[4] is not None or not said.get("grads") or said.get("dropout_p"):
            return dispatch(*given, **said)
        operands = given[:3] if given[3] is None else given[:4]
        key, way = ways.find(said, given[3] is None, operands[0].shape, operands[1].shape)
        if way is not None and way.holds(operands, operands):
            return way.run(*operands)
        results = dispatch(*given, **said)
        ways.learn(key, operands, operands, said)
        return results

    return call


def _results(launch: Launch, said: dict[str, Any]) -> Callable[..., Any]:
    save: Any = launch.save
    layout = said.get("layout", "BHLD")

    def results(*operands: Any) -> tuple[Any, Any, Any]:
        query = operands[0]
        out, lse = save(*operands)
        return laid(out, query, layout), lse.contiguous(), query.new_empty(0, dtype=torch.float32)

    return results


def backward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_backward`` likewise, where lse has no gradient."""
    ways: _Ways[Callable[..., Any]] = _Ways(_gradients)

    def call(*given: Any, **said: Any) -> Any:
        if len(given) != 10 or given[1] is not None or given[6] is not None or said.get("dropout_p"):
            return dispatch(*given, **said)
        grad_out, _, query, key, value, mask, _, out, lse, _ = given
        operands = (query, key, value) if mask is None else (query, key, value, mask)
        tensors = (grad_out, out, lse, *operands)
        known_by, way = ways.find(said, mask is None, query.shape, key.shape)
        if way is not None and way.holds(operands, tensors):
            return way.run(operands, out, lse, grad_out)
        found = dispatch(*given, **said)
        ways.learn(known_by, operands, tensors, said)
        return found

    return call


def _gradients(launch: Launch, said: dict[str, Any]) -> Callable[..., Any]:
    differentiate: Any = launch.differentiate
    layout = said.get("layout", "BHLD")
    wanted = [at for at, name in enumerate(GRAD_OPERANDS) if name in said["grads"]]

    def gradients(operands: Sequence[Any], out: Any, lse: Any, grad_out: Any) -> list[Any]:
        found = differentiate(operands, out, lse, grad_out, None)
        return [laid(found[at], operands[at], layout) if at < 3 else found[at].contiguous() for at in wanted]

    return gradients
