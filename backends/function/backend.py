"""A function in a file as a ``Backend``, with the call that its signature asks for."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attnswitch.errors import Unsupported
from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel, Precision, Standing
from attnswitch.machine.device import Device
from attnswitch.machine.differentiated import gradients, leaf, leaves
from attnswitch.problem import Problem

from . import operands, takes
from .interpreted import VARIABLE, interprets, untimed
from .likes import manner
from .signature import Reading, read
from .target import Target, found

__all__ = ["FunctionBackend", "backend"]


def backend(name: str) -> Backend:
    """The function that ``name`` says, as a backend: a class of its own, whose attributes follow from the signature.

    Raises ``InvalidProblem`` if there is no such function, or its signature does not tell how it is called.
    """
    target = Target.parse(name)
    reading = read(found(target), target.function, manner(target.like))
    if target.in_triton and interprets():
        untimed(target.modules)
    deduced = " (deduced from its parameters; --like says otherwise)" if reading.deduced else ""
    words = ", ".join(reading.says.values())
    attributes = {
        "name": name,
        "library": reading.library,
        "autograd": reading.library == "torch",
        "varlen": reading.like.layout in ("THD", "pages"),  # also where it takes neither: `takes` says so
        "paged": reading.like.layout == "pages",
        "sinks": reading.takes("sinks"),
        "alibi": reading.takes("slopes"),
        "splits": reading.takes("splits"),
        "trees": reading.takes("tree"),
        "builds_per_shape": target.in_triton,
        "emulation": {VARIABLE: "1"} if target.in_triton else {},
        "lacks": takes.lacks(reading),
        "notice": f"{reading.call} is called like {reading.like.name}{deduced}, with {reading.library}: {words}",
    }
    kind: type[FunctionBackend] = type("FunctionBackend", (FunctionBackend,), attributes)
    return kind(target, reading)


class FunctionBackend(Backend):
    """What calls one function. It never is chosen, but where it is named."""

    restarts: ClassVar[bool] = False

    def __init__(self, target: Target, reading: Reading) -> None:
        self.target, self.reading = target, reading

    def standing(self, device: Device) -> Standing:
        """It is in no table, so that only who names it has it tried."""
        return Standing.ASKED

    def toolchain(self, device: Device) -> Mapping[str, str]:
        """What was found holds for the file as it is."""
        return {self.target.file.name: self.target.source}

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """What its signature does not say; and Triton on the CPU, unless it is interpreted there."""
        if self.emulation and device.kind == "cpu" and not interprets():
            file = self.target.file.name
            yield f"{file} imports Triton, and the arrays are on the CPU; {VARIABLE}=1 interprets it there, slowly"
        elif self.emulation and device.kind == "cpu" and problem.dtype == "bfloat16":
            yield "dtype bfloat16: Triton's interpreter multiplies its bits as integers, which is no fault of a kernel"
        yield from takes.reasons(self.reading, problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        """Sums in float32, or float64 for that; weights may be rounded to the storage type, as most kernels do."""
        accumulator: Any = "float64" if problem.dtype == "float64" else "float32"
        return Precision(accumulator, weights="storage", group_sum="storage", statistics="lse")

    def compile(self, problem: Problem, device: Device, config: Config) -> Kernel:
        """The call for ``problem``."""
        return FunctionKernel(self.reading, problem)


class FunctionKernel(Kernel):
    """One call of the function; torch differentiates it."""

    def __init__(self, reading: Reading, problem: Problem) -> None:
        self.reading, self.problem = reading, problem

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output, and lse where the problem asks for it.

        Raises ``Unsupported`` where the function raises ``NotImplementedError``, fails an assertion though these are
        promised to say what it takes, or gives no graph to differentiate.
        """
        return self._run(inputs, self.problem.lse)

    def results(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse. Raises ``Unsupported`` where the function returns no lse."""
        if not self.reading.takes("lse"):
            raise Unsupported(f"lse: {self.reading.call} takes no return_lse")
        return self._run(inputs, True, graph=False)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients by torch, which runs the forward again."""
        import torch

        if lse is not None:
            raise Unsupported(f"out and lse are given: {self.reading.call} starts its backward from its own")
        kind = inputs.query.device.type
        with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(kind, enabled=False):
            again = leaves(inputs, self.problem.grads)
            ends, upstream = list(self._run(again, grad_lse is not None)), [grad_out, grad_lse]
            pairs = [(end, grad) for end, grad in zip(ends, upstream, strict=True) if grad is not None]
            given = [leaf(grad).to(end.dtype) for end, grad in pairs]
            return gradients(again, self.problem.grads, [end for end, _ in pairs], given)

    def _run(self, inputs: Inputs, stated: bool, graph: bool = True) -> tuple[Any, Any]:
        if self.reading.library != "torch":
            return self._call(inputs, stated)
        import torch

        from ..own import autocast

        graph = graph and torch.is_grad_enabled()
        kind = autocast.available(inputs.query.device.type)
        with torch.set_grad_enabled(graph):
            # Of a region of autocast the operands are cast already, and the results are to have their type.
            if kind is not None and torch.is_autocast_enabled(kind):
                return autocast.shielded(kind, lambda inputs: self._called(inputs, stated, graph), inputs)
            return self._called(inputs, stated, graph)

    def _called(self, inputs: Inputs, stated: bool, graph: bool) -> tuple[Any, Any]:
        """Of tensors; with a ``graph`` what is to be differentiated has one."""
        import torch

        out, lse = self._call(operands.kept(inputs) if self.problem.grads else inputs, stated)
        if self.problem.grads and graph:
            for what, array in (("output", out), ("lse", lse)):
                if isinstance(array, torch.Tensor) and not array.requires_grad:
                    raise Unsupported(
                        f"gradients (grad={self.problem.grads}): {self.reading.call} returns an {what} without a graph"
                    )
        return out, lse

    def _call(self, inputs: Inputs, stated: bool) -> tuple[Any, Any]:
        said = operands.arguments(self.reading, self.problem, inputs, stated)
        try:
            returned = self.reading(said)
        except NotImplementedError as refusal:  # how a kernel says what it does not do
            raise Unsupported(f"{self.reading.call} raises NotImplementedError: {refusal}") from refusal
        except AssertionError as failed:
            claim = _asserted(failed)
            if "asserts" in self.reading.promises:
                raise Unsupported(f"{self.reading.call} asserts: {claim}") from failed
            failed.args = (f"{claim}; if what it asserts is what it takes, say so with +asserts",)
            raise
        return operands.results(self.reading, inputs, returned, stated)


def _asserted(failed: AssertionError) -> str:
    """What an assertion says, or else what it asserts."""
    if said := str(failed):
        return said
    frame = traceback.extract_tb(failed.__traceback__)[-1]
    at, line = frame.lineno or 0, (frame.line or "what has no text").strip().removeprefix("assert ")
    try:
        tree = ast.parse(Path(frame.filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return line
    spanning = [x for x in ast.walk(tree) if isinstance(x, ast.Assert) and x.lineno <= at <= (x.end_lineno or at)]
    return ast.unparse(spanning[-1].test) if spanning else line
