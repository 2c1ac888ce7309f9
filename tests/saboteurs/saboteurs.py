"""Backends that are wrong on purpose, for tests of what happens then.

Each is the tiled backend with one small fault. Whether ``attnswitch verify`` sees every kind of fault is tried by the
mutants (``attnswitch verify --mutants``). These are the faults that no edit of the tiled backend makes (a crash, a
hang, a race, another process) and a few plain ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from typing import Any, ClassVar

import numpy as np
import torch

from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Gradients, Inputs, Kernel, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

#: Caught in any process by the default run: tests/unit/test_verifier_catches.py. The others end or stop the process
#: that runs them, show in the lattice or in an autocast region only, or take an emulation.
FAULTS = ("ScaledOutput", "HeadsInterleaved", "Raises", "ReadsPastTile", "Races")


def _tiled() -> Any:
    backend = registry.loaded("tiled")
    return backend


class Saboteur(Backend):
    """The tiled backend, seen through a subclass's fault."""

    name: ClassVar[str] = "saboteur"
    library: ClassVar[str] = "numpy"
    autograd: ClassVar[bool] = False

    def unavailable(self) -> str | None:
        return None

    def reasons(self, problem: Problem, device: Device) -> Any:
        return tuple(_tiled().reasons(problem, device))

    def configs(self, problem: Problem, device: Device) -> Any:
        return _tiled().configs(problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        precision: Precision = _tiled().precision(problem, device)
        return precision

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return Faulty(self, problem, device, config)

    # what a subclass changes
    def problem(self, problem: Problem) -> Problem:
        return problem

    def inputs(self, inputs: Inputs) -> Inputs:
        return inputs

    def out(self, out: Any, lse: Any) -> tuple[Any, Any]:
        return out, lse

    def grads(self, grads: Gradients) -> Gradients:
        return grads


class Faulty(Kernel):
    def __init__(self, saboteur: Saboteur, problem: Problem, device: Device, config: Any) -> None:
        self.saboteur = saboteur
        self.kernel = _tiled().compile(saboteur.problem(problem), device, config)
        self.true = _tiled().compile(problem, device, config)

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        return self.saboteur.out(*self.kernel.forward(self.saboteur.inputs(inputs)))

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        return self.saboteur.grads(self.true.backward(inputs, out, lse, grad_out, grad_lse))


class ScaledOutput(Saboteur):
    """One unit too many in the third decimal."""

    def out(self, out: Any, lse: Any) -> tuple[Any, Any]:
        return (out * np.float64(1.004)).astype(out.dtype), lse


class Overstates(ScaledOutput):
    """The same, which it excuses by the roughest precision that can be declared."""

    def precision(self, problem: Problem, device: Device) -> Precision:
        return Precision("float32", "storage", "tf32", "storage", "lse", exp=0.5)


class Hasty(Saboteur):
    """Faster than all others: it computes nothing."""

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return Zeros()


class Zeros(Kernel):
    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        batch, heads, rows, _ = inputs.query.shape
        return np.zeros((batch, heads, rows, inputs.value.shape[3]), inputs.query.dtype), None


class HeadsInterleaved(Saboteur):
    """Grouped heads are matched modulo instead of in blocks."""

    def inputs(self, inputs: Inputs) -> Inputs:
        heads, shared = inputs.query.shape[1], inputs.key.shape[1]
        order = np.arange(heads).reshape(shared, -1) % shared if heads != shared else None
        if order is None:
            return inputs
        return inputs._replace(key=inputs.key[:, order[:, 0]], value=inputs.value[:, order[:, 0]])


class Raises(Saboteur):
    """It says it takes a length that it cannot."""

    def inputs(self, inputs: Inputs) -> Inputs:
        if inputs.key.shape[2] % 64 == 63:
            raise RuntimeError("unspecified launch failure")
        return inputs


class Evades(Saboteur):
    """It is right, as it refuses whatever is hard: a mask, gradients, and more than one tile of causal keys."""

    def reasons(self, problem: Problem, device: Device) -> Any:
        if problem.mask is not None:
            yield f"mask of {problem.mask.dtype}: it takes none"
        if problem.causal and problem.seq_k > 64:
            yield f"causal with {problem.seq_k} keys: it takes up to 64"
        if problem.grads:
            yield f"grads={problem.grads}: it has no backward"
        yield from super().reasons(problem, device)


# -- what takes another process, great lengths or patience to notice: tests/unit/test_isolation.py ---------------------


class Segfaults(Saboteur):
    """It reads address 0 where there is a window."""

    def problem(self, problem: Problem) -> Problem:
        self.windowed = problem.window is not None
        return problem

    def inputs(self, inputs: Inputs) -> Inputs:
        if self.windowed:
            ctypes.string_at(0)
        return inputs


class DiffersAtAPage(Saboteur):
    """It has other values where a key begins with a page of memory."""

    def inputs(self, inputs: Inputs) -> Inputs:
        at = inputs.key.__array_interface__["data"][0]
        return inputs._replace(value=inputs.value + 1) if at % mmap.PAGESIZE == 0 else inputs


class ReadsOn(Saboteur):
    """It reads the 16 bytes behind a key that lies plainly, and makes nothing of them."""

    def inputs(self, inputs: Inputs) -> Inputs:
        key = inputs.key
        if key.flags.c_contiguous:
            end = key.__array_interface__["data"][0] + key.nbytes
            ctypes.string_at(-(-end // 16) * 16, 16)
        return inputs


class Hangs(Saboteur):
    """It waits for ever where the last tile of keys has one key or two."""

    def inputs(self, inputs: Inputs) -> Inputs:
        if inputs.key.shape[2] % 16 in (1, 2):
            threading.Event().wait()
        return inputs


class HangsDeaf(Saboteur):
    """It never answers, nor heeds what asks a process to end."""

    def inputs(self, inputs: Inputs) -> Inputs:
        for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(asked, signal.SIG_IGN)
        threading.Event().wait()
        return inputs


class Aborts(Saboteur):
    """It ends the process, whatever it is asked for."""

    def inputs(self, inputs: Inputs) -> Inputs:
        os.abort()


class Exits(Saboteur):
    """It raises what ends a process, where the last tile of keys has one key or two."""

    ends: ClassVar[type[BaseException]] = SystemExit

    def inputs(self, inputs: Inputs) -> Inputs:
        if inputs.key.shape[2] % 16 in (1, 2):
            raise self.ends("its licence has run out")
        return inputs


class Interrupts(Exits):
    """It raises what Ctrl-C does."""

    ends: ClassVar[type[BaseException]] = KeyboardInterrupt


class ReadsPastTile(Saboteur):
    """It loads one element past the last row of the keys, and lets it take part with a weight of 0."""

    def inputs(self, inputs: Inputs) -> Inputs:
        key = inputs.key
        if not key.size or any(stride < 0 for stride in key.strides):
            return inputs
        past = np.lib.stride_tricks.as_strided(key[-1, -1, -1, -1:], (2,), (key.strides[3] or key.itemsize,))
        key = np.array(key)
        key[-1, -1, -1, -1] += past[1] * key.dtype.type(0)
        return inputs._replace(key=key)


class OneKeyOf8193(Saboteur):
    """With that many keys, it leaves one of them out."""

    def inputs(self, inputs: Inputs) -> Inputs:
        if inputs.key.shape[2] != 8193:
            return inputs
        keep = np.arange(8193) != 5000
        keep[5000] = False
        value = np.where(keep[:, None], inputs.value, 0)
        return inputs._replace(value=value.astype(inputs.value.dtype))


class CastInAutocast(Saboteur):
    """A last product by 1 is left to torch, which computes it in bfloat16 where an autocast region says so."""

    def out(self, out: Any, lse: Any) -> tuple[Any, Any]:
        wide = torch.from_numpy(out.astype(np.float64 if out.dtype == np.float64 else np.float32))
        product = wide.reshape(-1, 1) @ torch.ones(1, 1, dtype=wide.dtype)
        return product.to(wide.dtype).reshape(wide.shape).numpy().astype(out.dtype), lse


class Emulated(Saboteur):
    """It needs a GPU, or a variable that its library would read as it is imported; nothing is wrong with it."""

    emulation: ClassVar[dict[str, str]] = {"SLOWGPU_EMULATE": "1"}

    def reasons(self, problem: Problem, device: Device) -> Any:
        if device.kind == "cpu" and os.environ.get("SLOWGPU_EMULATE") != "1":
            return ("it runs on GPUs only",)
        return super().reasons(problem, device)


class EmulatedWrong(Emulated):
    """The second tile of 64 keys is left out."""

    def inputs(self, inputs: Inputs) -> Inputs:
        value = np.array(inputs.value)
        value[:, :, 64:] = 0
        return inputs._replace(value=value)


class Races(Saboteur):
    """Now and then a tile is read before it was written: one call in seven gives another output."""

    calls = 0

    def out(self, out: Any, lse: Any) -> tuple[Any, Any]:
        Races.calls += 1
        if Races.calls % 7 or out.shape[2] < 17:
            return out, lse
        out = out.copy()
        out[:, :, 16:] = out[:, :, 15:16]
        return out, lse


class OrderedIfAsked(Saboteur):
    """A bit of its query gradient varies from call to call, but for ``deterministic=True``; nothing is wrong there."""

    calls = 0

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return (
            super().compile(problem, device, config)
            if problem.deterministic
            else Unordered(self, problem, device, config)
        )


class Unordered(Faulty):
    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        grads = super().backward(inputs, out, lse, grad_out, grad_lse)
        OrderedIfAsked.calls += 1
        if OrderedIfAsked.calls % 2 and grads.query is not None:
            grads.query.flat[0] = np.nextafter(grads.query.flat[0], np.inf, dtype=grads.query.dtype)
        return grads
