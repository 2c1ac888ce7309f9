"""``Plan``: what a run of the verifier is to do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnswitch import files
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.backend import Regime
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.verify import emulation
from attnswitch.verify.checks import DRAWN
from attnswitch.verify.demands import steering
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.outcome import AUTO
from attnswitch.verify.session.shard import WHOLE, Shard
from attnswitch.verify.terms import Terms

__all__ = ["EMULATED", "EXAMPLES", "RECIPES", "Plan", "Target", "targets"]

#: Cases drawn for each device by default: about a minute on two cores.
EXAMPLES = 1600
#: And where they are emulated, at a second or more each.
EMULATED = 200
#: Cases of each word of a requirement there.
_EACH_EMULATED = 2
#: Data recipes for each problem where a backend builds something for each shape.
RECIPES = 12
#: Work of a case within a regime of a backend; and where kernels are emulated.
_LARGE = {False: 2**27, True: 2**20}


@dataclass(frozen=True, slots=True)
class Target:
    """One device with the backends to try there and the cases to draw for it."""

    device: str
    backends: tuple[str, ...]
    space: Space
    #: Data recipes tried on each problem drawn; more than one where a backend builds something for each shape.
    recipes: int = 1
    #: Environment variables under which its kernels are emulated; none where they run as they are.
    emulation: Mapping[str, str] = field(default_factory=dict)
    #: Cases to draw for it, where that is another number than the plan's.
    examples: int | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the device is an accelerator."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    ``examples`` counts cases, each recipe of a problem being one; None means until ``seconds`` have passed, and
    ``seconds`` None no limit; ``max_failures`` ends the run
    at that many distinct ones. ``isolate`` runs the kernels in ``workers`` other processes for each device, so that a
    crash or a call that takes ``timeout`` seconds is a finding and not the end.
    """

    targets: tuple[Target, ...]
    examples: int | None
    seed: int
    seconds: float | None = None
    max_failures: int = 10
    corpus: Path | None = None
    #: Pass over files of the corpus that are no saved cases, and report them; else the first ends the run.
    pass_over: bool = False
    #: Cases that may be tried to shrink one failure; a count, so that the same seed ends at the same case.
    shrink_tries: int = 500
    isolate: bool = False
    workers: int | None = None
    timeout: float = 120.0
    #: Whether to run the fixed cases at the edges of tiles and at great lengths, and the search for the worst case.
    lattice: bool = False
    targeted: bool = False
    #: Save each backend's worst case, where it is worse than the one that is saved.
    keep_worst: bool = False
    #: Remember in this machine's wisdom what is found wrong, and what is right again.
    remember: bool = False
    #: On which the backends are judged.
    terms: Terms = Terms()  # noqa: RUF009
    #: Options with which ``attnswitch replay`` judges on the same terms.
    replayed_with: tuple[str, ...] = ()
    #: The command that tries saved cases first, where ``attnswitch replay`` cannot.
    replayed_by: tuple[str, ...] = ()
    #: The seed is told at the end, and nowhere before.
    secret: bool = False
    #: Which part of it this is.
    shard: Shard = WHOLE
    #: What has to be taken, and by which backends; by all where none is named.
    requirements: tuple[Requirement, ...] = ()
    held: tuple[str, ...] = ()
    #: Cases of each word of a requirement, at least; None for a few.
    each: int | None = None

    def held_on(self, target: Target) -> tuple[str, ...]:
        """The backends of ``target`` that are held to the requirements."""
        return tuple(name for name in target.backends if not self.held or name in self.held)

    def wanted(self, target: Target) -> int:
        """Cases of each word of a requirement, at least."""
        return self.each or (_EACH_EMULATED if target.emulation else steering.EACH)

    def drawn(self, target: Target) -> int | None:
        """How many cases to draw for ``target``; None if there is no limit."""
        return self.examples if target.examples is None else target.examples

    def problems(self, target: Target) -> int | None:
        """How many problems these cases are of."""
        cases = self.drawn(target)
        return None if cases is None else -(-cases // target.recipes)


def targets(
    devices: Sequence[str],
    backends: Sequence[str],
    longest: int | None = None,
    recipes: int | None = None,
    emulate: bool = True,
) -> tuple[Target, ...]:
    """The usual targets: every backend on each device, small cases on the CPU and larger ones on a GPU.

    ``longest`` bounds the sequences that are drawn, and the work with them; ``recipes`` is for each problem. If one of
    the backends has an emulation, the CPU runs all of them under it, on smaller cases, unless ``emulate`` is False.
    """
    made = []
    for device in devices:
        emulated: dict[str, str] = {}
        if device == "cpu":
            space = Space(checks=tuple(check.name for check in DRAWN if not check.gpu))
            emulated = emulation.variables(backends, device) if emulate else {}
            if emulated:  # tile after tile, so that heads cost more than lengths; two tiles of 64 fit either way
                space = replace(space, work=2**19, longest=140, heads=4)
        else:
            every = tuple(check.name for check in DRAWN)
            libraries = ("torch", "cupy") if _has_cupy() else ("torch",)
            space = Space(libraries=libraries, work=2**22, longest=2100, checks=every)
        if device != "cpu" or emulated:
            named = [name for name in backends if name != AUTO]
            names = registry.names() if len(named) < len(backends) and not emulated else named
            space = replace(space, regimes=_regimes(names, device), large=_LARGE[bool(emulated)])
        space = _taken(space, backends)
        if longest is not None:  # which is asked for where cases are to be small
            space = replace(space, longest=longest, work=min(space.work, max(longest, 16) ** 2 * 8), regimes=())
        usual = RECIPES if device != "cpu" and _builds(backends) else 1
        made.append(Target(device, tuple(backends), space, recipes or usual, emulated))
    return tuple(made)


def _regimes(names: Sequence[str], device: str) -> tuple[Regime, ...]:
    """Those of all the backends on ``device``; of a device that is not here, none, nor of a broken plug-in."""
    try:
        where = Device.parse(device)
    except InvalidProblem:
        return ()
    found: dict[Regime, None] = {}
    for name in names:
        backend = registry.load(name)
        if not isinstance(backend, Missing):
            with contextlib.suppress(Exception):
                found |= dict.fromkeys(backend.regimes(where))
    return tuple(found)


def _taken(space: Space, backends: Sequence[str]) -> Space:
    """``space`` without what none of the backends takes. The dispatcher's choice takes all."""
    loaded = [registry.load(name) for name in backends if name != AUTO]
    each = [set() if isinstance(backend, Missing) else set(backend.lacks) for backend in loaded]
    lacks = set.intersection(*each) if each and len(each) == len(backends) else set()
    dtypes = tuple(dtype for dtype in space.dtypes if dtype not in lacks)
    libraries = tuple(library for library in space.libraries if library not in lacks)
    return replace(space, dtypes=dtypes, libraries=libraries or space.libraries, lacks=tuple(sorted(lacks)))


def _builds(backends: Sequence[str]) -> bool:
    """Whether any of the backends builds a plan or compiles a kernel for each shape that it meets."""
    return any(_builds_per_shape(name) for name in backends if name != AUTO)


def _builds_per_shape(name: str) -> bool:
    backend = registry.load(name)
    return not isinstance(backend, Missing) and backend.builds_per_shape


def _has_cupy() -> bool:
    """Whether CuPy is here and sees a GPU."""
    try:
        files.house_cupy()
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # not installed, or no driver: either way there are no CuPy arrays to test with
        return False
