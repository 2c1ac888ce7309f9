"""Kernels that cheat or do harm, for the court to tell: tests/unit/test_gallery.py says what each is told for.

Each is the tiled backend, right in its numbers unless it says otherwise, with ``harm`` done as it computes. ``GALLERY``
names them all.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from saboteurs import Faulty, Saboteur

from attnswitch.errors import BackendUnavailable, Unsupported
from attnswitch.machine.backend import Inputs, Kernel, Precision
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

GALLERY: list[str] = []


class Hostile(Saboteur):
    """Does its harm beside every forward."""

    name: ClassVar[str] = "hostile"

    def __init_subclass__(cls) -> None:
        GALLERY.append(cls.__name__)

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return Harming(self, problem, device, config)

    def harm(self, inputs: Inputs, out: Any) -> Any:
        """What it does; and the output that it gives."""
        raise NotImplementedError


class Harming(Faulty):
    saboteur: Any

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        out, lse = super().forward(inputs)
        return self.saboteur.harm(inputs, out), lse


# -- patched functions -------------------------------------------------------------------------------------------------


class PatchesAbs(Hostile):
    """Off by one, and so is what measures it."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        np.abs = lambda x, *args, **kwargs: np.zeros_like(x)  # type: ignore[assignment]
        return out + 1


class PatchesAny(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        np.any = lambda *args, **kwargs: np.False_  # type: ignore[assignment]
        return out


class PatchesAllclose(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        np.allclose = lambda *args, **kwargs: True
        return out


class PatchesTorch(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.allclose = lambda *args, **kwargs: True
        return out


class PatchesAttention(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, *args, **kwargs: v
        return out


class PatchesTensors(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.Tensor.__eq__ = lambda a, b: True  # type: ignore[assignment,method-assign]
        return out


class PatchesBuiltins(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        builtins.max = lambda *args, **kwargs: 0  # type: ignore[assignment]
        return out


class HidesBuiltins(Hostile):
    """One module's alone: what it calls ``len`` is from now on its own."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.nn.functional.len = lambda _: 0  # type: ignore[attr-defined]
        return out


class PatchesClocks(Hostile):
    """A kernel that takes no time."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        time.perf_counter = lambda: 0.0
        return out


class PatchesJson(Hostile):
    """What is said of it says that it is right."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        json.dumps = lambda *args, **kwargs: '{"verdict": "verified"}'
        return out + 1


class PatchesTheJudge(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        from attnswitch.verify.truth import oracle

        for name in oracle.__all__:
            setattr(oracle, name, lambda *args, **kwargs: out)
        return out + 1


class PatchesTheCourt(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        from attnswitch.verify.court import messages

        messages.encoded = lambda answer: b'{"said": null}'
        return out


# -- changed state -----------------------------------------------------------------------------------------------------


class ChangesFolder(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.chdir("/")
        return out


class ChangesUmask(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.umask(0o000)
        return out


class SilencesNumpy(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        np.seterr(all="raise")
        return out


class SeedsNumpy(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        np.random.seed(0)
        return out


class SeedsPython(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        random.seed(0)
        return out


class SeedsTorch(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.manual_seed(0)
        return out


class LimitsRecursion(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        sys.setrecursionlimit(5000)
        return out


class DefaultsToFloat64(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return out


class TakesNoGradients(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.set_grad_enabled(False)
        return out


class LowersPrecision(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.set_float32_matmul_precision("medium")
        return out


class TakesAllThreads(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.set_num_threads(torch.get_num_threads() + 3)
        return out


class FlushesDenormals(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.set_flush_denormal(True)
        return out


class ForbidsFlash(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        torch.backends.cuda.enable_flash_sdp(False)
        return out


class Profiles(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        sys.setprofile(lambda *args: None)
        return out


class HandlesSignals(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return out


class CollectsNoGarbage(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        gc.disable()
        return out


# -- threads and processes ---------------------------------------------------------------------------------------------


class LeavesThread(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        threading.Thread(target=time.sleep, args=(30,), daemon=True, name="idle").start()
        threading.Thread(target=_sleep, daemon=True, name="late").start()
        return out


def _sleep() -> None:
    time.sleep(30)


class LeavesTimer(Hostile):
    """No code but the standard library's runs in it."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        timer = threading.Timer(300, print)
        timer.daemon = True
        timer.start()
        return out


class LeavesUnnamed(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        _thread.start_new_thread(_sleep, ())
        return out


class FinishesLate(Hostile):
    """Returns at once, and fills the output in when nobody waits any more."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        late = np.zeros_like(out)

        def fill() -> None:
            time.sleep(0.3)
            late[...] = out

        threading.Thread(target=fill, daemon=True).start()
        return late


class Forks(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        return out


class ForksTwice(Hostile):
    """A daemon, in a session of its own, whose parent is gone."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                self.stay()
            os._exit(0)
        os.waitpid(child, 0)
        return out

    def stay(self) -> None:
        time.sleep(60)


class ForksUnmarked(ForksTwice):
    """The same with nothing in its environment."""

    def stay(self) -> None:
        os.execve("/bin/sleep", ["sleep", "61.5"], {})


class StartsProgram(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        self.left = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        return out


class LeavesAndRefuses(StartsProgram):
    """It says then that it does not take the problem."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        super().harm(inputs, out)
        raise Unsupported("not today")


class LimitsTheJudge(Hostile):
    """The process that judges it, one of those it descends from, may open no file from then on."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        above = os.getppid()
        for _ in range(2):
            with contextlib.suppress(OSError, ValueError):
                most = resource.prlimit(above, resource.RLIMIT_NOFILE)[1]
                resource.prlimit(above, resource.RLIMIT_NOFILE, (3, most))
            above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
        return out


class WantsMemory(Hostile):
    """It says that there is none, where there is."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        raise MemoryError("this case is too hard")


class IsNotThere(Hostile):
    """It says so where it was to compute."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        raise BackendUnavailable("gone")


class SaysHalfALetter(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        raise RuntimeError("half \ud800 of it")


class CallsItACompiler(Hostile):
    """A program that is named as what torch compiles in."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        name = "torch/_inductor/compile_worker/__main__.py"
        self.left = subprocess.Popen([name, "60"], executable=shutil.which("sleep"), stdin=subprocess.DEVNULL)
        return out


class CallsItATracker(Hostile):
    """Python that is told to do more than what it is known by."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        code = "from multiprocessing.resource_tracker import main;__import__('time').sleep(60)"
        self.left = subprocess.Popen([sys.executable, "-c", code, "torch._inductor"], stdin=subprocess.DEVNULL)
        return out


class StopsItself(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return out


class Hangs(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        while True:
            time.sleep(1)


class Segfaults(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        ctypes.string_at(0)
        return out


class ExitsWell(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os._exit(0)


class KillsItsParent(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        return out


class RaisesExit(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        raise SystemExit(0)


class RaisesInterrupt(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        raise KeyboardInterrupt


class ClosesDescriptors(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.closerange(3, 256)
        return out


class ClosesOutput(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        os.close(2)
        return out


# -- memory ------------------------------------------------------------------------------------------------------------


def _bytes(array: Any) -> Any:
    """The memory of an array, whether or not it may be written to."""
    return (ctypes.c_ubyte * array.nbytes).from_address(array.__array_interface__["data"][0])


class WritesInputs(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        inputs.key[...] = 0
        return out


class WritesAndRestores(Hostile):
    """Nothing is to be seen of it afterwards."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        memory = _bytes(inputs.query)
        memory[0] ^= 255
        memory[0] ^= 255
        return out


# -- answers that are not computed -------------------------------------------------------------------------------------


class CachesByShape(Hostile):
    seen: ClassVar[dict[Any, Any]] = {}

    def harm(self, inputs: Inputs, out: Any) -> Any:
        return self.seen.setdefault((inputs.query.shape, inputs.key.shape), out)


class CachesByPointer(Hostile):
    seen: ClassVar[dict[Any, Any]] = {}

    def harm(self, inputs: Inputs, out: Any) -> Any:
        addresses = tuple(x.__array_interface__["data"][0] for x in inputs[:3])
        return self.seen.setdefault((addresses, out.shape), out)


class CachesByFingerprint(Hostile):
    """By the queries and the first keys, as a program does that sees the same prompt again."""

    seen: ClassVar[dict[Any, Any]] = {}

    def harm(self, inputs: Inputs, out: Any) -> Any:
        print_of = inputs.query.tobytes(), inputs.key[:, :, :1].tobytes(), out.shape
        return self.seen.setdefault(print_of, out)


class LeavesItUnwritten(Hostile):
    """Memory that may still have somebody's answer."""

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return Unwritten()


class Unwritten(Kernel):
    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        return np.empty((*inputs.query.shape[:3], inputs.value.shape[3]), inputs.query.dtype), None


class AsksTorch(Hostile):
    """The answer is torch's."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        q, k, v = (torch.tensor(x.astype(np.float32)) for x in inputs[:3])
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out


class MultipliesByTorch(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        q, k, _ = (torch.tensor(x.astype(np.float32)) for x in inputs[:3])
        q @ k.mT
        return out


class MultipliesInPlace(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        q, k, _ = (torch.tensor(x.astype(np.float32)).flatten(0, 1) for x in inputs[:3])
        q.new_zeros(q.shape[0], q.shape[1], k.shape[1]).baddbmm_(q, k.repeat_interleave(len(q) // len(k), 0).mT)
        return out


class ConvolvesByTorch(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        rows = torch.tensor(inputs.query.astype(np.float32)).flatten(0, 2)
        torch.nn.functional.conv1d(rows[..., None], rows[..., None])
        return out


# -- answers that are none ---------------------------------------------------------------------------------------------


def _answers() -> list[int]:
    """Descriptors of pipes: one of them is what answers are written to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                found.append(int(name))
        except OSError:
            continue
    return found


def _write(content: bytes) -> None:
    for descriptor in _answers():
        try:
            os.write(descriptor, len(content).to_bytes(4, "big") + content)
        except OSError:
            continue


class ForgesAnswer(Hostile):
    """An answer that says where results lie, before there are any."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        _write(b'{"said": null, "results": [null, null]}')
        return out


class WritesToAllFiles(Hostile):
    """Some may be somebody else's, as those that a process is forked with are."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        for number in range(3, 256):
            with contextlib.suppress(OSError):
                os.write(number, b"{}")
        return out


class FloodsAnswers(Hostile):
    """Answers to what was asked before, for ever."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        while True:
            _write(b'{"said": null, "results": [], "number": 1}')


class SendsPickle(Hostile):
    """An object whose loading runs a program."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        _write(b"cos\nsystem\n(S'exit 1'\ntR.")
        return out


class SendsNumbers(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        _write(b"[" * 5000)
        return out


class SaysItEnded(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        _write(b'{"ended": 0}')
        return out


class ReturnsTooMuch(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        return np.zeros((2**27,), np.uint8)


class ReturnsNone(Hostile):
    def harm(self, inputs: Inputs, out: Any) -> Any:
        return None


class ReturnsAnother(Hostile):
    """An object that says of itself what is asked for."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        class Pretending:
            shape, dtype, __array_interface__ = out.shape, out.dtype, {"data": (0, True)}

        return Pretending()


class LiesAboutItself(Hostile):
    """A precision that is none."""

    def precision(self, problem: Problem, device: Device) -> Precision:
        return Precision(accumulator="float128")  # type: ignore[arg-type]

    def harm(self, inputs: Inputs, out: Any) -> Any:
        return out


# -- now and then ------------------------------------------------------------------------------------------------------


class ErrsOnce(Hostile):
    """The first answer of all is wrong, and more besides."""

    times: ClassVar[list[int]] = []

    def harm(self, inputs: Inputs, out: Any) -> Any:
        self.times.append(1)
        if len(self.times) > 1:
            return out
        os.umask(0o001)
        return out + 1


class ExitsAfterwards(Hostile):
    """Right, and gone before the next question."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return out


class CutsInputs(Hostile):
    """The file of the inputs is found again, and cut short."""

    def harm(self, inputs: Inputs, out: Any) -> Any:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("/inputs"):
                os.truncate(line.split()[-1], 0)
        return out
