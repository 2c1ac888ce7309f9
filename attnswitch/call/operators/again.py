"""Calls that are like the one before go to its launch, past torch's dispatcher.

A compiled graph makes the same few calls in every step. Torch parses each by its schema and takes it through the
dispatcher to a Python function, which makes out options, request and launch: together as long as the launch takes. So
the function that torch's operator is called by first asks whether all that decides is as it was. Where anything looks
at calls (a mode, a transform, a profiler, autograd), or a tensor lies otherwise, the call is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from attnswitch.call import finite, recording
from attnswitch.call.attend import lies_alike
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

#: Query, key, value, and a mask if there is one; and output, lse and the output's gradient, if the operator has them.
_Tensors = tuple[tuple[Any, ...], tuple[Any, ...]]


class _Way:
    """What calls come to whose tensors lie as those did that it was found with, in an equal context."""

    __slots__ = ("alike", "beside", "context", "launch", "run")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        #: None until another call comes to the same launch: what comes once is not worth it.
        self.alike: Callable[..., bool] | None = None

    def bind(self, run: Callable[..., Any], operands: tuple[Any, ...], beside: tuple[Any, ...]) -> None:
        """Know what to run for tensors that lie like these, from now on."""
        self.run, self.context = run, _context()
        self.beside = guards(beside) if beside else None
        self.alike = guards(operands)

    def holds(self, operands: tuple[Any, ...], beside: tuple[Any, ...]) -> bool:
        """Whether a call with these tensors is to be run by it."""
        if self.alike is None or self.context != _context() or _profiled():
            return False
        if not lies_alike(self.alike, *operands) or (beside and not lies_alike(self.beside, *beside)):
            return False
        look = self.launch.look
        return look is None or look(*operands[:3])


def _context() -> tuple[Any, ...]:
    return _policy_of_context(), _look_of_context(), _recording(), view.generation()


class _Again:
    """An operator as it is called, where ``dispatch`` is how torch calls it.

    ``read`` finds the tensors of a call, or None where that is torch's; ``bind`` makes of a launch what runs them.
    """

    def __init__(
        self,
        dispatch: Callable[..., Any],
        read: Callable[[tuple[Any, ...], dict[str, Any]], _Tensors | None],
        bind: Callable[[Launch, dict[str, Any]], Callable[..., Any]],
    ) -> None:
        self._dispatch, self._read, self._bind = dispatch, read, bind
        #: By what calls say, and the sizes of query and key.
        self._ways: dict[Hashable, _Way] = {}

    def __call__(self, *given: Any, **said: Any) -> Any:
        tensors = self._read(given, said)
        if tensors is None:
            return self._dispatch(*given, **said)
        operands, beside = tensors
        key, way = self._find(said, len(operands), operands[0].shape, operands[1].shape)
        if way is not None and way.holds(operands, beside):
            return way.run(operands, *beside)
        results = self._dispatch(*given, **said)
        if key is not None:
            self._learn(key, operands, beside, said)
        return results

    def _find(self, said: dict[str, Any], *also: Hashable) -> tuple[Hashable, _Way | None]:
        """What a call is known by, None if it cannot be known, and its way, None if it is new."""
        key = (*also, *said, *said.values())
        try:
            return key, self._ways.get(key)
        except TypeError:  # a window in a list, or sizes that are symbols
            key = (*also, *said, *[tuple(each) if type(each) is list else each for each in said.values()])
        try:
            return key, self._ways.get(key)
        except TypeError:
            return None, None

    def _learn(self, key: Hashable, operands: tuple[Any, ...], beside: tuple[Any, ...], said: dict[str, Any]) -> None:
        """Know the way of a call that torch has just made, the second time that it is met."""
        if _recording() is not None or not plainly((*operands, *beside)):
            return
        launch = run.latest(*operands, beside=beside, **said)
        if launch is None or launch.recorded or launch.save is None or launch.differentiate is None:
            return
        way = self._ways.get(key)
        if way is not None and way.launch is launch:
            way.bind(self._bind(launch, said), operands, beside)
            return
        if len(self._ways) >= _MOST:
            self._ways.clear()
        self._ways[key] = _Way(launch)


# -- the operators -----------------------------------------------------------------------------------------------------


def forward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_forward``, for gradients."""
    return _Again(dispatch, _of_forward, _results)


def backward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_backward``, where lse has no gradient."""
    return _Again(dispatch, _of_backward, _gradients)


def _of_forward(given: tuple[Any, ...], said: dict[str, Any]) -> _Tensors | None:
    if len(given) != 5 or type(given[0]) is not torch.Tensor or given[4] is not None:
        return None
    return None if said.get("dropout_p") or not said.get("grads") else (_operands(*given[:4]), ())


def _of_backward(given: tuple[Any, ...], said: dict[str, Any]) -> _Tensors | None:
    if len(given) != 10 or type(given[0]) is not torch.Tensor or given[1] is not None or given[6] is not None:
        return None
    return None if said.get("dropout_p") else (_operands(*given[2:6]), (given[7], given[8], given[0]))


def _operands(query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, ...]:
    return (query, key, value) if mask is None else (query, key, value, mask)


def _results(launch: Launch, said: dict[str, Any]) -> Callable[..., Any]:
    save: Any = launch.save
    layout = said.get("layout", "BHLD")

    def results(operands: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        query = operands[0]
        out, lse = save(*operands)
        return laid(out, query, layout), lse.contiguous(), query.new_empty(0, dtype=torch.float32)

    return results


def _gradients(launch: Launch, said: dict[str, Any]) -> Callable[..., Any]:
    differentiate: Any = launch.differentiate
    layout = said.get("layout", "BHLD")
    wanted = [at for at, name in enumerate(GRAD_OPERANDS) if name in said["grads"]]

    def gradients(operands: tuple[Any, ...], out: Any, lse: Any, grad_out: Any) -> list[Any]:
        found = differentiate(operands, out, lse, grad_out, None)
        return [laid(found[at], operands[at], layout) if at < 3 else found[at].contiguous() for at in wanted]

    return gradients
