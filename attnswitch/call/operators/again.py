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
from attnswitch.call.launch import Launch, lies_alike
from attnswitch.call.operators import run
from attnswitch.call.operators.direct import plainly
from attnswitch.call.operators.memory import laid, steps
from attnswitch.call.torch_modes import guards
from attnswitch.planning import policy
from attnswitch.problem import GRAD_OPERANDS
from attnswitch.wisdom import view

__all__ = ["backward", "forward"]

#: Ways that an operator remembers; beyond, it forgets them all.
_MOST = 256
_policy_of_context, _look_of_context, _recording = policy.of_context, finite.of_context, recording.of_context
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Way:
    """What calls come to whose tensors lie as those did that it was found with, in an equal context."""

    __slots__ = ("alike", "context", "launch", "run")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        #: None until another call comes to the same launch: what comes once is not worth it.
        self.alike: Callable[..., bool] | None = None

    def bind(self, run: Callable[..., Any], tensors: tuple[Any, ...]) -> None:
        """Know what to run for tensors that lie like these, from now on."""
        self.run, self.context = run, _context()
        self.alike = guards(tensors)

    def holds(self, tensors: tuple[Any, ...]) -> bool:
        """Whether a call with these tensors is to be run by it."""
        if self.alike is None or self.context != _context() or _profiled() or not lies_alike(self.alike, *tensors):
            return False
        look = self.launch.look
        return look is None or look(*tensors[:3])


def _context() -> tuple[Any, ...]:
    return _policy_of_context(), _look_of_context(), _recording(), view.generation


class _Again:
    """An operator as it is called, where ``dispatch`` is how torch calls it.

    ``read`` finds the tensors of a call, or None where that is torch's: query, key, value, and a mask if there is one,
    before output, lse and the output's gradient, if the operator has them: ``saved`` is how many of these there are.
    ``bind`` makes of a launch what runs them.
    """

    def __init__(
        self,
        dispatch: Callable[..., Any],
        read: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None],
        bind: Callable[[Launch, tuple[Any, ...], dict[str, Any]], Callable[..., Any]],
        saved: int,
    ) -> None:
        self._dispatch, self._read, self._bind, self._saved = dispatch, read, bind, saved
        #: By what calls say, the sizes of query and key, and whether gradients are enabled.
        self._ways: dict[Hashable, _Way] = {}

    def __call__(self, *given: Any, **said: Any) -> Any:
        tensors = self._read(given, said)
        if tensors is None:
            return self._dispatch(*given, **said)
        key, way = self._find(said, tensors)
        if way is not None and way.holds(tensors):
            return way.run(tensors)
        results = self._dispatch(*given, **said)
        if key is not None:
            self._learn(key, tensors, said)
        return results

    def _find(self, said: dict[str, Any], tensors: tuple[Any, ...]) -> tuple[Hashable, _Way | None]:
        """What a call is known by, None if it cannot be known, and its way, None if it is new."""
        try:
            also = torch.is_grad_enabled(), len(tensors), tensors[0].shape, tensors[1].shape
            key = (*also, *said, *said.values())
            try:
                return key, self._ways.get(key)
            except TypeError:  # a window in a list
                key = (*also, *said, *[tuple(each) if type(each) is list else each for each in said.values()])
                return key, self._ways.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensors, nested ones, sizes that are symbols
            return None, None

    def _learn(self, key: Hashable, tensors: tuple[Any, ...], said: dict[str, Any]) -> None:
        """Know the way of a call that torch has just made, the second time that it is met."""
        if _recording() is not None or not plainly(tensors):
            return
        count = len(tensors) - self._saved
        launch = run.latest(*tensors[:count], beside=tensors[count:], **said)
        if launch is None or launch.recorded or launch.save is None or launch.differentiate is None:
            return
        way = self._ways.get(key)
        if way is not None and way.launch is launch:
            way.bind(self._bind(launch, tensors[:count], said), tensors)
            return
        if len(self._ways) >= _MOST:
            self._ways.clear()
        self._ways[key] = _Way(launch)


# -- the operators -----------------------------------------------------------------------------------------------------


def forward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_forward``, for gradients."""
    return _Again(dispatch, _of_forward, _results, saved=0)


def backward(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``attention_backward``, where lse has no gradient."""
    return _Again(dispatch, _of_backward, _gradients, saved=3)


def _of_forward(given: tuple[Any, ...], said: dict[str, Any]) -> tuple[Any, ...] | None:
    if len(given) != 6 or type(given[0]) is not torch.Tensor or not given[4] is given[5] is None:
        return None
    return None if said.get("dropout_p") or not said.get("grads") else _operands(given[:4])


def _of_backward(given: tuple[Any, ...], said: dict[str, Any]) -> tuple[Any, ...] | None:
    if len(given) != 11 or type(given[0]) is not torch.Tensor or not given[1] is given[6] is given[7] is None:
        return None
    return None if said.get("dropout_p") else (*_operands(given[2:6]), given[8], given[9], given[0])


def _operands(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return given[:3] if given[3] is None else given


def _results(launch: Launch, operands: tuple[Any, ...], said: dict[str, Any]) -> Callable[..., Any]:
    save: Any = launch.save
    query, layout = operands[0], said.get("layout", "BHLD")
    to_out = steps(query, launch.problem.dim_v, layout)
    #: The state of a random generator that was not asked: of no memory, and so the same tensor every time.
    nothing = query.new_empty(0, dtype=torch.float32)

    def results(operands: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        out, lse = save(*operands)
        if out.stride() != to_out:
            out = laid(out, operands[0], layout)
        return out, lse.contiguous(), nothing

    return results


def _gradients(launch: Launch, operands: tuple[Any, ...], said: dict[str, Any]) -> Callable[..., Any]:
    differentiate: Any = launch.differentiate
    layout, count = said.get("layout", "BHLD"), len(operands)
    wanted = [
        (at, steps(operands[at], operands[at].shape[3], layout) if at < 3 else None)
        for at, name in enumerate(GRAD_OPERANDS)
        if name in said["grads"]
    ]

    def gradients(tensors: tuple[Any, ...]) -> list[Any]:
        operands, (out, lse, grad_out) = tensors[:count], tensors[count:]
        found = differentiate(operands, out, lse, grad_out, None)
        return [
            found[at] if found[at].stride() == to else _as_promised(found[at], operands[at], layout, to)
            for at, to in wanted
        ]

    return gradients


def _as_promised(gradient: Any, operand: Any, layout: str, to: tuple[int, ...] | None) -> Any:
    return gradient.contiguous() if to is None else laid(gradient, operand, layout)
