"""The process in which a candidate's kernels run. It answers questions, and is told neither cases nor right answers.

What a kernel does to this process can spoil its own answers alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import islice, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from attnswitch.arrays import Array
from attnswitch.errors import BackendUnavailable, CompileError, Unsupported, out_of_memory
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Gradients, Inputs, Kernel
from attnswitch.machine.device import Device
from attnswitch.machine.differentiated import gradients, leaves
from attnswitch.machine.registry import Missing
from attnswitch.problem import Problem
from attnswitch.verify.court import messages, traces
from attnswitch.verify.court.messages import About, Answer, Ask, OfProblem, Raised
from attnswitch.verify.court.wire import Layout, Results, View
from attnswitch.verify.launch.graph import replayed
from attnswitch.verify.launch.neighbours import Neighbours, overlap
from attnswitch.verify.launch.surroundings import surrounded

__all__ = ["serve"]

#: Seconds without a question after which what is going to be asked is looked at: the judge compares numbers meanwhile.
_IDLE = 1e-3
#: Kernels kept, and configs and reasons named at most.
_KEPT, _CONFIGS, _REASONS = 64, 256, 32
_OWN = (BackendUnavailable, CompileError, Unsupported)


class Candidate:
    """One backend, and the memory through which it is given arrays."""

    def __init__(self, name: str, folder: Path, forbidden: bool) -> None:
        if forbidden:  # what watches for it takes seconds to import, and moves functions of torch
            importlib.import_module("torch._dynamo")
        self._traces = traces.Traces()
        self._backend = registry.load(name)
        self._view, self._results = View(folder), Results(folder)
        self._forbidden = forbidden
        self._graph: _Graph | None = None
        #: Since the last look: whether anything of the backend's ran; whether a kernel did; whether one drew random
        #: numbers, as it was to.
        self._ran, self.launched, self._drew = True, False, False
        #: What looks saw that was not told yet.
        self._seen: list[str] = []
        self._kernel = functools.lru_cache(maxsize=_KEPT)(self._compiled)

    def answer(self, number: int, ask: Ask) -> Answer:
        """The answer, whatever the kernel raises; ``number`` is told back."""
        if ask.what in messages.LAUNCHES:
            self._results.clear()
            self.launched = True
        self._ran |= ask.what != "conduct"
        told: list[str] = []
        try:
            with traces.aten(self._forbidden) as seen:
                try:
                    said, made = self._do(ask, told)
                    layout = self._results.write(made)  # which runs code of the kernel's where a result is of its type
                finally:
                    told += seen()
            answer = Answer(said, layout)
        except BaseException as error:
            answer = Answer(raised=_raised(error))
        heard = tuple(text[: messages.SENTENCE] for text in told)
        return Answer(answer.said, answer.results, answer.raised, heard, number)

    def look(self) -> None:
        """At what the backend did to this process, unless nothing of it ran since the last look."""
        self.launched = False
        if self._ran:
            self._seen += self._traces.look(self._drew)
            self._drew = self._ran = False

    def _do(self, ask: Ask, told: list[str]) -> tuple[Any, Sequence[Array | None]]:
        """What is to be said, and arrays."""
        if ask.what == "conduct":
            self.look()
            told += self._seen
            self._seen = []
            return None, ()
        if ask.what == "about":
            return asdict(_about(self._backend)), ()
        assert isinstance(self._backend, Backend)
        if ask.what == "unavailable":
            return self._backend.unavailable(), ()
        device = ask.device
        assert device is not None
        if ask.what == "regimes":
            return [asdict(regime) for regime in self._backend.regimes(device)], ()
        if ask.what == "toolchain":
            return dict(self._backend.toolchain(device)), ()
        assert ask.problem is not None
        if ask.what == "problem":
            return asdict(_of_problem(self._backend, ask.problem, device)), ()
        if ask.what == "precision":
            return asdict(self._backend.precision(ask.problem, device)), ()
        if ask.what == "configs":
            return _configs(self._backend, ask.problem, device), ()
        kernel = self._kernel(ask.problem, device, ask.config)
        inputs = self._inputs(ask)
        self._drew |= ask.problem.dropout > 0.0
        upstream = [self._view.get(layout, ask.size) for layout in ask.upstream]
        if ask.what == "replay":
            return None, replayed(lambda: kernel.forward(inputs), messages.arrays_of(inputs), upstream, device.where)
        beside = self._surround(ask, inputs)
        with surrounded(ask.around, device.where):
            made = read = self._made(ask, kernel, inputs, upstream)
            if ask.around.side:  # they are there for who reads them on that stream
                read = [x if x is None else x.clone() for x in made]
        _wait(device.where)
        if ask.what == "forward" and _meet(made, inputs[:4]):
            told.append("its result lies in the memory of its inputs")
        if beside is not None and beside.look({str(n): x for n, x in enumerate(made) if x is not None}):
            told.append("it wrote to memory beside its results")
        return None, read

    def _made(
        self, ask: Ask, kernel: Kernel, inputs: Inputs, upstream: Sequence[Array | None]
    ) -> Sequence[Array | None]:
        """What the kernel makes."""
        assert isinstance(self._backend, Backend)
        assert ask.problem is not None
        if ask.what == "backward":
            return self._gradients(ask, kernel, inputs, upstream)
        if ask.what == "results":
            return kernel.results(inputs)
        if not self._backend.autograd:
            return kernel.forward(inputs)
        inputs = leaves(inputs, ask.problem.grads)
        made = kernel.forward(inputs)
        self._graph = _Graph(ask.problem, ask.inputs, inputs, made)
        return made

    def _compiled(self, problem: Problem, device: Device, number: int) -> Kernel:
        assert isinstance(self._backend, Backend)
        config = next(islice(self._backend.configs(problem, device), number, None))
        return self._backend.compile(problem, device, config)

    def _inputs(self, ask: Ask) -> Inputs:
        return messages.inputs_of([self._view.get(layout, ask.size) for layout in ask.inputs], ask.seed)

    def _surround(self, ask: Ask, inputs: Inputs) -> Neighbours | None:
        """Known bytes where the output is likely to be allocated; the output then starts out as NaN."""
        problem, device = ask.problem, ask.device
        assert problem is not None
        assert device is not None
        batch, heads, rows = inputs.query.shape[:3]
        shape = (batch, heads, rows, problem.dim_v)
        if ask.what == "backward" or int(np.prod(shape)) * problem.seq_k > _SURROUNDED:
            return None
        library = next(layout.library for layout in ask.inputs if layout is not None)
        return Neighbours({"out": (shape, problem.dtype)}, library, device.where)

    def _gradients(self, ask: Ask, kernel: Kernel, inputs: Inputs, upstream: Sequence[Array | None]) -> Gradients:
        out, lse, grad_out, grad_lse = upstream
        assert isinstance(self._backend, Backend)
        assert ask.problem is not None
        if self._backend.autograd:  # torch differentiates its output
            out = lse = None
            graph, self._graph = self._graph, None
            draws = ask.problem.dropout > 0.0 and not ask.problem.seeded
            if draws and graph is not None and (graph.problem, graph.layouts) == (ask.problem, ask.inputs):
                return _differentiated(graph, grad_out, grad_lse)  # of the same numbers that the forward drew
            if type(kernel).backward is Kernel.backward:
                inputs = leaves(inputs, ask.problem.grads)
                return _differentiated(_Graph(ask.problem, (), inputs, kernel.forward(inputs)), grad_out, grad_lse)
        return kernel.backward(inputs, out, lse, grad_out, grad_lse)


#: Scores times columns up to which memory beside the output is watched.
_SURROUNDED = 2**24


class _Graph(NamedTuple):
    """A forward that torch can differentiate, of inputs that lay so."""

    problem: Problem
    layouts: tuple[Layout | None, ...]
    inputs: Inputs
    made: tuple[Array, Array | None]


def _differentiated(graph: _Graph, grad_out: Array, grad_lse: Array | None) -> Gradients:
    """Gradients by torch's autograd."""
    pairs = zip(graph.made, (grad_out, grad_lse), strict=True)
    ends, upstream = zip(*((end, grad) for end, grad in pairs if grad is not None), strict=True)
    return gradients(graph.inputs, graph.problem.grads, ends, upstream)


def _meet(results: Sequence[Array | None], inputs: Sequence[Array | None]) -> bool:
    """Whether a result lies where an input does; of what is no array others tell."""
    with contextlib.suppress(AttributeError, TypeError):
        found, given = ([x for x in group if x is not None] for group in (tuple(results), inputs))
        return any(overlap(*pair) for pair in product(found, given))
    return False


def _about(backend: Backend | Missing) -> About:
    if isinstance(backend, Missing):
        return About(missing=str(backend))
    values = {f.name: getattr(backend, f.name) for f in fields(About) if f.name != "missing"}
    if backend.autograd:  # it is done here, and begins with the forward
        values["restarts"] = False
    return About(**(values | {"emulation": dict(backend.emulation), "lacks": tuple(sorted(backend.lacks))}))


def _of_problem(backend: Backend, problem: Problem, device: Device) -> OfProblem:
    reasons = list(islice(backend.reasons(problem, device), _REASONS))
    configs = precision = None
    if not reasons:
        with contextlib.suppress(Exception):
            configs = _configs(backend, problem, device)
        with contextlib.suppress(Exception):
            precision = backend.precision(problem, device)
    return OfProblem(reasons, configs, precision)


def _configs(backend: Backend, problem: Problem, device: Device) -> list[str]:
    return [str(config) for config in islice(backend.configs(problem, device), _CONFIGS)]


def _wait(device: str) -> None:
    """Until every stream of the GPU is done."""
    torch: Any = sys.modules.get("torch")
    if device != "cpu" and torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


def _raised(error: BaseException) -> Raised:
    where = traceback.extract_tb(error.__traceback__)[-1].name
    text = str(error)[: messages.SENTENCE - 200]
    if type(error) in _OWN:
        return Raised(type(error).__name__, text, where)
    if isinstance(error, Exception) and out_of_memory(error):
        return Raised("memory", text, where)
    return Raised("other", f"{type(error).__name__}: {text}", where)


def serve(asks: Connection, answers: Connection, folder: Path, kernels: bool) -> NoReturn:
    """Answer until the other end closes the connection, and end the process. ``kernels``: whether any are to run."""
    if kernels:
        import torch

        x = torch.zeros(2, requires_grad=True)
        torch.autograd.grad(x.sum(), x)  # what it sets up as it is first used is not the kernel's doing
    candidate = None
    while True:
        if candidate is not None and candidate.launched and not asks.poll(_IDLE):
            with contextlib.suppress(BaseException):  # it is told where it is asked for
                candidate.look()
        try:
            number: int
            ask: Ask
            number, ask = pickle.loads(asks.recv_bytes())
        except EOFError:
            os._exit(0)
        if candidate is None:
            candidate = Candidate(ask.backend, folder, ask.forbidden)
        answers.send_bytes(messages.encoded(candidate.answer(number, ask)))
