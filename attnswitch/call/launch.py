"""``Launch``: what calls with equal facts come to; and ``Request``, in which it is found, or built.

facts (arrays.Facts) -> Problem (describe) -> Choice (planning) -> Kernel (the backend) -> Launch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array, Facts
from attnswitch.call import finite, recording
from attnswitch.call.describe import describe, lengths_beside, swap_heads
from attnswitch.call.measuring import at_sight
from attnswitch.call.options import Options
from attnswitch.machine.backend import Backend, Backward, Forward, Gradients, Inputs, Kernel, Shows
from attnswitch.machine.device import Device
from attnswitch.machine.inputs import heads_last
from attnswitch.planning import planner
from attnswitch.planning.plan import Plan
from attnswitch.planning.policy import Policy
from attnswitch.problem import Problem

__all__ = ["DUAL", "Launch", "Request", "lie_of", "lies_alike", "straight"]

#: Stands for modes in which tensors may carry tangents: nothing is asked quickly there.
DUAL = -1
#: Launches that a request remembers; beyond, it forgets them all. And ways of lying by which it knows some of them
#: again; beyond, it forgets the oldest.
_MOST, _RECENT = 1024, 4


class Launch:
    """What calls with equal facts come to."""

    __slots__ = (
        "alike",
        "backend",
        "differentiate",
        "draws",
        "facts",
        "kernel",
        "lengths_lie",
        "look",
        "plain",
        "poisoned",
        "problem",
        "recorded",
        "run",
        "save",
        "settled",
        "shown",
    )

    def __init__(self, problem: Problem, facts: tuple[Facts | None, ...], backend: Backend, kernel: Kernel) -> None:
        self.problem, self.facts, self.backend, self.kernel = problem, facts, backend, kernel
        #: Output and lse of operands as the caller lays them out, and of lengths that lie as ``lengths_lie`` says.
        self.run: Forward | None = None
        self.lengths_lie: tuple[Any, ...] | None = None
        #: The same for ``differentiate``, which takes operands, results and upstream gradients.
        self.save: Forward | None = None
        self.differentiate: Callable[..., Gradients] | None = None
        #: Whether other operands lie like those before, asked of torch in less time than their facts take to read.
        self.alike: Callable[..., bool] | None = None
        #: Whether the operands are free of NaN and what overflows; None where nobody looks.
        self.look: finite.Look | None = None
        #: Whether output and lse show that there is need to look; None where the operands are looked at first.
        self.shown: Callable[[Any, Any], bool] | None = None
        #: The launch for such operands.
        self.poisoned: Launch | None = None
        self.settled = False
        #: Whether there is no more to its calls than operands.
        self.plain = True
        #: Whether all calls of this process are noted.
        self.recorded = recording.whole_process() is not None
        #: Whether each call is given a seed of its own.
        self.draws = problem.dropout > 0.0 and not problem.seeded and backend.wants_seed


class Request:
    """All that a call says beside its arrays, with what its context says: its launches, by the facts of the arrays."""

    __slots__ = (
        "_recent",
        "backend",
        "grads",
        "latest",
        "launches",
        "lengths",
        "options",
        "plan",
        "policy",
        "quick",
        "seeded",
    )

    def __init__(
        self,
        options: Options,
        seeded: bool,
        lengths: bool,
        backend: str | None,
        policy: Policy,
        plan: Plan | None = None,
        grads: str | None = None,
        quick: bool = False,
    ) -> None:
        self.options, self.seeded, self.lengths = options, seeded, lengths
        self.backend, self.policy, self.plan, self.grads = backend, policy, plan, grads
        self.launches: dict[tuple[Facts | None, ...], Launch] = {}
        #: Whether torch's guards may be asked, the launch that they knew last, and guards of it and some before.
        self.quick = quick
        self.latest: Launch | None = None
        self._recent: tuple[tuple[Callable[..., bool], Launch], ...] = ()

    def find(self, operands: Sequence[Array], key_lengths: Any = None) -> tuple[Launch, Sequence[Array]]:
        """The launch for ``operands``, and these as arrays of NumPy, CuPy or torch. Raises what ``build`` raises."""
        if (again := self.known(operands)) is not None:
            return again, operands
        taken, facts = arrays.take_all(operands)
        launch = self.launches.get(facts)
        if launch is None:
            launch = self.build(facts, key_lengths)
            self._arm(launch, taken, key_lengths)
        elif not launch.settled:
            self._settle(launch, taken)
        elif launch.alike is not None:
            self._guard(launch, taken)
        return launch, taken

    def known(self, operands: Sequence[Array]) -> Launch | None:
        """The launch whose operands lay like these, of some before the latest; now it is that.

        Programs of several kinds of layers call them in turn, and of one kind with one tensor in several places or not.
        """
        asked = None if self.latest is None else self.latest.alike
        for guards, launch in self._recent:
            if guards is not asked and lies_alike(guards, *operands):
                launch.alike, self.latest = guards, launch
                return launch
        return None

    def build(
        self,
        facts: tuple[Facts | None, ...],
        key_lengths: Any = None,
        *,
        nonfinite: bool = False,
        seeded: bool | None = None,
    ) -> Launch:
        """The launch for operands with ``facts``, where ``seeded`` if the call has a seed that the caller did not give.

        Raises ``InvalidProblem``, ``Unsupported``, ``BackendUnavailable`` and ``CompileError``; nothing has run.
        """
        whole = facts if len(facts) == 4 else (*facts, None)
        seeded = self.seeded if seeded is None else seeded
        problem = describe(whole, self.options, lengths=self.lengths, seeded=seeded, grads=self.grads)
        query = facts[0]
        assert query is not None
        if key_lengths is not None:  # wrong ones are told of before anything is compiled
            lengths_beside(key_lengths, query, problem.seq_k)
        nonfinite = nonfinite or (self.plan is not None and self.plan.problem.nonfinite)
        if nonfinite:
            problem = problem.replace(nonfinite=True)
        where = query.device
        device = Device.of(*where)
        lasting = True
        if self.plan is not None:
            self.plan.check(problem)
            backend, kernel = planner.compiled(self.plan)
        else:
            lasting = at_sight(problem, device, self.backend, self.policy)
            restarts = self.grads is not None
            backend, kernel = planner.build(problem, device, self.backend, self.policy, restarts=restarts)
        launch = Launch(problem, facts, backend, kernel)
        launch.plain = not (self.lengths or problem.seeded or launch.draws)
        if not nonfinite and finite.looked_for(finite.when(), where[0]):
            launch.look = finite.look_of(problem, where[0], query.library)
        if lasting and not nonfinite:
            if len(self.launches) >= _MOST:
                self.launches.clear()
                self.latest, self._recent = None, ()
            self.launches[facts] = launch
        return launch

    def poisoned(self, launch: Launch) -> Launch:
        """The launch in place of ``launch`` for operands in which NaN, inf, or what overflows was seen.

        Of those who keep such numbers where they belong none has a generator of its own: dropout is given a seed.
        """
        if launch.poisoned is None:
            free = self.backend is None and self.plan is None and not launch.draws
            launch.poisoned = self.build(launch.facts, nonfinite=True, seeded=True if free else None)
        return launch.poisoned

    def _arm(self, launch: Launch, operands: Sequence[Array], key_lengths: Any) -> None:
        """Have the kernel prepare itself for torch tensors that lie like these, where it takes them as they are."""
        if self.grads is not None or not _is_native(launch):
            return
        lengths = None
        if key_lengths is not None:
            lengths = lengths_beside(key_lengths, launch.facts[0], launch.problem.seq_k)  # type: ignore[arg-type]
            launch.lengths_lie = lie_of(lengths)
        seed = 0 if launch.problem.seeded or launch.draws else None
        launch.run = _prepared(launch, operands, lengths, seed, self.options.layout == "BLHD")
        shows = launch.kernel.shows
        if launch.look is not None and shows is not Shows.NOWHERE and not launch.problem.grads and launch.plain:
            launch.shown = finite.shown(launch.problem, shows)

    def _settle(self, launch: Launch, operands: Sequence[Array]) -> None:
        """What is worth its time for facts that come again."""
        launch.settled = True
        if launch.look is not None and launch.shown is None and self.plan is None:
            problem = launch.problem.replace(nonfinite=True)
            device = Device.of(*launch.facts[0].device)  # type: ignore[union-attr]
            restarts = self.grads is not None
            chosen = planner.choose(problem, device, self.backend, self.policy, restarts=restarts)
            if chosen.backend == launch.backend.name:
                launch.look = None  # the choice is the same, whatever a look would see
        if self.grads is not None and launch.plain and _is_native(launch):
            turned = self.options.layout == "BLHD"
            launch.save = _saving(launch, operands, turned)
            launch.differentiate = _differentiating(launch, operands, turned)
        ready = launch.run is not None or launch.save is not None
        if self.quick and ready and not any(fact is not None and fact.offset for fact in launch.facts):
            self._guard(launch, operands)

    def _guard(self, launch: Launch, operands: Sequence[Array]) -> None:
        """Have the launch known by how ``operands`` lie: the latest do, of those with its facts."""
        if launch.alike is None or not launch.alike(*operands):
            launch.alike = import_module("attnswitch.call.torch_modes").guards(operands)
        if launch.alike is not None:
            self.latest = launch
            if all(guards is not launch.alike for guards, _ in self._recent):
                self._recent = ((launch.alike, launch), *self._recent)[:_RECENT]


def lies_alike(alike: Callable[..., bool] | None, *operands: Any) -> bool:
    """Whether operands lie as those that ``alike`` guards, of a launch; their facts take longer to read."""
    try:
        # Asked first: without sizes guards would end the process, and without memory kernels would.
        bits = 0
        for operand in operands:
            address = operand.data_ptr()
            if not address or operand.is_nested:
                return False
            bits |= address
        return not bits & 15 and alike(*operands)  # type: ignore[misc]
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no tensor, or one without memory of its own
        return False


# -- building ----------------------------------------------------------------------------------------------------------


def _is_native(launch: Launch) -> bool:
    """Whether its calls are of torch tensors, which the kernel takes."""
    first = launch.facts[0]
    assert first is not None
    return first.library == "torch" and launch.backend.native("torch") == "torch"


def lie_of(lengths: Any) -> tuple[Any, ...]:
    """How lengths of torch lie, as far as a prepared launch may rest on it."""
    return lengths.dtype, lengths.shape, lengths.stride(), lengths.get_device(), lengths.data_ptr() & 15


def straight(operands: Sequence[Array], turned: bool) -> Inputs:
    """Operands in (B, H, L, D) order, ``turned`` if the caller's are (B, L, H, D), and the mask with four axes."""
    query, key, value, mask = operands if len(operands) > 3 else (*operands, None)
    if turned:
        query, key, value = (swap_heads(array) for array in (query, key, value))
    if mask is not None and (missing := 4 - len(mask.shape)):
        mask = mask[(None,) * missing]
    return Inputs(query, key, value, mask)


def _prepared(
    launch: Launch, operands: Sequence[Array], lengths: Array | None, seed: int | None, turned: bool
) -> Forward:
    """The way from torch tensors that lie like these to the results, in the caller's layout."""
    forward = launch.kernel.prepared(straight(operands, turned)._replace(key_lengths=lengths, seed=seed))
    if launch.problem.grads and not launch.backend.autograd:
        forward = import_module("attnswitch.call.autograd").prepared(launch.problem, launch.kernel, forward)
    return _laid_out(forward, operands, turned)


def _saving(launch: Launch, operands: Sequence[Array], turned: bool) -> Forward:
    """The same to output and lse as ``_differentiating`` takes them."""
    return _laid_out(launch.kernel.prepared_results(straight(operands, turned)), operands, turned)


def _differentiating(launch: Launch, operands: Sequence[Array], turned: bool) -> Callable[..., Gradients]:
    """Gradients of torch tensors that lie like ``operands``, in the caller's layout."""
    backward: Backward | None = None
    missing = 4 - operands[3].dim() if len(operands) > 3 else 0

    def run(operands: Sequence[Any], out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        nonlocal backward
        inputs = straight(operands, turned)
        if backward is None:
            backward = launch.kernel.prepared_backward(inputs)
        if turned:
            out, grad_out = swap_heads(out), swap_heads(grad_out)
        query, key, value, mask = backward(inputs, out, lse, grad_out, grad_lse)
        if turned:
            query, key, value = (None if x is None else swap_heads(x) for x in (query, key, value))
        return Gradients(query, key, value, mask[(0,) * missing] if missing and mask is not None else mask)

    return run


def _laid_out(forward: Forward, operands: Sequence[Array], turned: bool) -> Forward:
    """``forward`` of operands as the caller lays them out."""
    if not turned and (len(operands) == 3 or operands[3].dim() == 4):
        return forward

    def run(*given: Any) -> tuple[Any, Any]:
        inputs = straight(given[: 3 if len(given) == 3 or given[3] is None else 4], turned)
        out, lse = forward(*inputs[: min(len(given), 4)], *given[4:])
        return (heads_last(out, inputs.query) if turned else out), lse

    return run
