"""The contract between the dispatcher and a backend: one class in one file, and one row in the registry."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from attnswitch.arrays import Array
from attnswitch.machine.builds import Build
from attnswitch.machine.device import Device
from attnswitch.machine.inputs import Gradients, GradientsWithSinks, Inputs, Offsets, Order
from attnswitch.problem import Problem, cost

__all__ = [
    "Backend",
    "Backward",
    "Config",
    "Forward",
    "Gradients",
    "GradientsWithSinks",
    "Inputs",
    "Kernel",
    "Offsets",
    "Order",
    "Packed",
    "Precision",
    "Progress",
    "Regime",
    "Shows",
    "Standing",
    "Tile",
]

#: Output and lse of query, key, value and, where the problem has them, attn_mask, key_lengths and a seed.
Forward = Callable[..., tuple[Array, Array | None]]
#: What ``Kernel.backward`` takes and gives.
Backward = Callable[..., "Gradients"]
#: Told how many of how many are done, and of which.
Progress = Callable[[int, int, str], None]


class Shows(enum.Enum):
    """Which result of a forward shows NaN and inf of the operands, so that it can be looked at in their place.

    On the CPU, for a problem without gradients. A kernel promises it of every row whose output is not what arithmetic
    makes of the operands, whether NaN was lost or leaked from what is hidden.
    """

    #: Neither: the operands have to be looked at.
    NOWHERE = enum.auto()
    #: The lse of such a row is 0, NaN or inf. It is dense, in float32, or float64 where that is the problem's dtype.
    LSE = enum.auto()
    #: The output of such a row has NaN.
    OUTPUT = enum.auto()
    #: One or the other.
    EITHER = enum.auto()


class Standing(enum.Enum):
    """When a backend may be chosen for a call that does not name it."""

    #: As the times that were measured, the forecast and the declared order have it.
    FREE = enum.auto()
    #: Where this machine has found it right and timed it, on problems of the same class. What tunes tries it.
    TIMED = enum.auto()
    #: The same, and only who names it (``attnswitch tune --backend``) has it tried: it compiles for long.
    ASKED = enum.auto()
    #: Never.
    NAMED = enum.auto()

    @property
    def unasked(self) -> bool:
        """Whether what tunes or verifies tries it though nobody names it."""
        return self in (Standing.FREE, Standing.TIMED)

    def allows(self, timed: bool) -> bool:
        """Whether it may be chosen, given whether it was timed here on problems of the class."""
        return self is Standing.FREE or (timed and self is not Standing.NAMED)


class Kernel:
    """What a backend compiles for one problem: ``forward``, and ``backward`` unless torch differentiates the forward.

    One object serves every call with the same problem, from any thread.
    """

    #: See ``Shows``.
    shows: Shows = Shows.NOWHERE

    def forward(self, inputs: Inputs) -> tuple[Array, Array | None]:
        """Output (B, Hq, Lq, Dv) and lse (B, Hq, Lq).

        lse may be None unless the problem asks for it, or for gradients that this kernel's ``backward`` computes.
        """
        raise NotImplementedError

    def builds(self) -> Sequence[Build]:
        """What compiles the kernels of its calls, forward and backward: those that it does not know to be compiled.

        A call compiles what it needs and does not find.
        """
        return ()

    def results(self, inputs: Inputs) -> tuple[Array, Array]:
        """Output and lse for ``backward``, whatever the problem asks for; torch's autograd takes no note of them."""
        return self.forward(inputs)

    def backward(
        self, inputs: Inputs, out: Array | None, lse: Array | None, grad_out: Array, grad_lse: Array | None
    ) -> Gradients:
        """Gradients from output and lse as they are given, and the upstream gradients (``grad_lse`` None means zero).

        ``out`` and ``lse`` may be those of more keys than ``inputs`` has: then these are a part's gradients. A kernel
        whose output torch differentiates is given None for both where the caller has neither.
        """
        raise NotImplementedError

    def prepared(self, inputs: Inputs) -> Forward:
        """``forward`` of torch tensors that lie like ``inputs``: of (query, key, value, attn_mask, key_lengths, seed).

        They have the same shapes, strides, dtypes and devices, and addresses that are multiples of 16 where these are;
        what ``inputs`` has none of is left out; torch is in the modes that it is in now (autograd, autocast). What
        follows from that need not be looked at again.
        """

        def forward(
            query: Array,
            key: Array,
            value: Array,
            attn_mask: Array = None,
            key_lengths: Array = None,
            seed: int | None = None,
        ) -> tuple[Array, Array | None]:
            return self.forward(Inputs(query, key, value, attn_mask, key_lengths, seed))

        return forward

    def prepared_form(self, inputs: Inputs, order: Order) -> Forward:
        """The same of a problem of any form, of what ``inputs.flat()`` has: results in ``order``.

        The axes of tensors may be in any order: they lie like those of ``inputs``, and begin where these would. The
        offsets of keys may be left out where they are those of queries.
        """
        again = inputs.again()

        def forward(*given: Any) -> tuple[Array, Array | None]:
            inputs = again(*given)
            out, lse = self.forward(inputs)
            return order.like(out, inputs.query), None if lse is None else order.of(lse)

        return forward

    def prepared_results(self, inputs: Inputs) -> Forward:
        """``results`` of torch tensors that lie like these, as ``prepared`` is of the output."""
        return self.prepared(inputs)

    def prepared_backward(self, inputs: Inputs) -> Backward:
        """``backward`` of torch tensors that lie like ``inputs``, the first; upstream gradients lie in any way."""
        return self.backward

    def prepared_form_backward(self, inputs: Inputs, order: Order) -> Backward:
        """The same of a problem of any form: operands and gradients have their axes as ``prepared_form`` is given them.

        But a mask has four. Results and upstream gradients are in ``order``.
        """
        again = inputs.again()

        def backward(given: Inputs, *results: Array) -> Gradients:
            grads = self.backward(again(*given.flat()), *(None if x is None else order.back(x) for x in results))
            query, key, value = (None if grad is None else order.of(grad) for grad in grads[:3])
            return Gradients(query, key, value, grads.attn_mask)

        return backward


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and the like; backends subclass it. This one says: nothing to choose.

    Its ``str`` names it among the configs of a backend: in wisdom, and in ``attnswitch bench --config``.
    """


class Tile(NamedTuple):
    """What one kernel of a config keeps on the chip: rows of queries and keys, loads in flight, bytes of a block.

    ``role`` names the kernel where a config has several: "forward", "query_gradient".
    """

    role: str
    queries: int
    keys: int
    stages: int
    shared: int


@dataclass(frozen=True, slots=True)
class Precision:
    """What a backend promises about rounding; the verifier's error bound follows from it.

    ``accumulator`` holds scores, softmax and sums. ``weights`` is the type that the softmax weights P (and dS) are
    rounded to before a matrix product. ``score_inputs`` other than "storage" says that query and key are rounded first
    (TF32). ``group_sum`` is the type to which gradients of a shared key head, or of a broadcast mask, are rounded
    before they are summed. ``statistics`` "lse" says that the backward computes P from the stored lse, whose rounding
    grows with its size; "exact" that it keeps or renews the sums. ``exp`` is the relative error of a fast exponential.
    """

    accumulator: Literal["float32", "float64"] = "float32"
    weights: Literal["accumulator", "storage"] = "accumulator"
    score_inputs: Literal["storage", "tf32"] = "storage"
    group_sum: Literal["accumulator", "storage"] = "accumulator"
    statistics: Literal["lse", "exact"] = "exact"
    exp: float = 0.0


@dataclass(frozen=True, slots=True)
class Regime:
    """Problems for which a backend has kernels that smaller or odder ones do not reach. The verifier draws some there.

    ``dims`` pairs head dimensions, of query and key and of value. ``tiles`` are lengths of tiles, around whose
    multiples lengths are drawn. ``queries`` is the fewest queries, ``products`` the least
    B * Hq * Lq * Lk * (D + Dv). ``aligned``: operands and a float mask have rows of unit stride from multiples of 16
    bytes, and the mask their type. It is drawn ``often`` times as often as a regime of 1.
    """

    dtypes: tuple[str, ...]
    dims: tuple[tuple[int, int], ...]
    tiles: tuple[int, ...]
    queries: int = 1
    products: int = 0
    aligned: bool = False
    often: int = 1


class Packed(NamedTuple):
    """A pack of kernels compiled ahead for one architecture; ``bytes`` is their size before compression."""

    path: Path
    arch: str
    kernels: int
    bytes: int
    compiler: str


class Backend:
    """One way to compute attention. A subclass says its name, its library, ``reasons`` and ``compile``."""

    name: ClassVar[str]
    #: Whose arrays its kernels take: "numpy", "torch" or "cupy"; and all of them, where there are several.
    library: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()
    #: Whether torch differentiates its output by itself, so that nothing needs to be saved for it.
    autograd: ClassVar[bool] = False
    #: Whether its backward starts from output and lse as they are given. Another is not chosen for whoever asks for
    #: gradients without autograd, and may have those of more keys.
    restarts: ClassVar[bool] = True
    #: Whether its dropout mask is a function of a seed: where the caller gives none, one is drawn for the call.
    wants_seed: ClassVar[bool] = False
    #: Whether it is given sequences that lie one after another (``Problem.varlen``) at once; others get each alone, on
    #: the CPU (``attnswitch.machine.one_by_one``).
    varlen: ClassVar[bool] = False
    #: Whether it takes problems with ``sinks``, with ``alibi``, and with a ``page``; others never see one. Those that
    #: take no pages get each sequence alone, on the CPU, its keys gathered.
    sinks: ClassVar[bool] = False
    alibi: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    #: Of the types of 8 bits that pages may be stored in (``attnswitch.problem.CACHES``), those its kernels read.
    caches: ClassVar[tuple[str, ...]] = ()
    #: Whether its kernels, if they take pages, read the bits of a tree. Others get a mask, with the gathered keys.
    trees: ClassVar[bool] = False
    #: Whether it divides the keys of a sequence as ``Problem.splits`` says: then the bits of a sequence are the same
    #: alone and in any batch. Where keys are never divided they are that anyway.
    splits: ClassVar[bool] = False
    #: Whether it compiles a kernel or builds a plan for each shape: the verifier then tries many data recipes on each.
    builds_per_shape: ClassVar[bool] = False
    #: Whether its results are off by more than rounding: it then runs where it is named alone, and no verdict is given.
    approximate: ClassVar[bool] = False
    #: The file of what it is known to get wrong, ``"package:file.toml"`` (``attnswitch.machine.divergences``).
    divergences: ClassVar[str] = ""
    #: The environment variables that have an interpreter run it on the CPU, where nothing else can. ``unavailable`` and
    #: ``reasons`` refuse the CPU where they are not set. Libraries read them as they are imported, and they begin with
    #: the library's name; the module of the class does not import it.
    emulation: ClassVar[Mapping[str, str]] = {}
    #: Features of a problem, dtypes and libraries of callers that it never takes: where that holds of all backends of a
    #: run, the verifier draws none (``attnswitch.verify.drawing.plain``). ``reasons`` refuses them all the same.
    lacks: ClassVar[frozenset[str]] = frozenset()
    #: How it was understood, a line for whoever names it.
    notice: ClassVar[str] = ""

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, with the remedy; None if it can. Never raises."""
        return None

    def standing(self, device: Device) -> Standing:
        """When it may be chosen on ``device`` without being named. An approximate one never is."""
        return Standing.NAMED if self.approximate else Standing.FREE

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """Why it does not take ``problem`` on ``device``, a sentence a reason that names the offending value. Pure.

        The cheapest to find out come first: a call asks for no more than the first.
        """
        raise NotImplementedError

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Every one of ``reasons``; empty if it takes the problem."""
        return tuple(self.reasons(problem, device))

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        """The heuristic's choice first, then the rest of the search space."""
        yield Config()

    def regimes(self, device: Device) -> tuple[Regime, ...]:
        """Where on ``device`` it runs other kernels than on most problems of a few hundred queries and keys."""
        return ()

    def precision(self, problem: Problem, device: Device) -> Precision:
        """What its rounding is for ``problem``."""
        return Precision()

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        """The kernel for ``problem``. Raises ``CompileError`` if it cannot be built."""
        raise NotImplementedError

    def repeats(self, problem: Problem, device: Device) -> float:
        """How many times as long it is expected to take as what was measured of problems that are near."""
        return 1.0

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """Bytes beside operands and results that a call holds at its peak."""
        return cost.extra_tiled(problem)

    def tiles(self, problem: Problem, device: Device, config: Any) -> tuple[Tile, ...]:
        """What its kernels for ``problem`` keep on the chip, if it says."""
        return ()

    def remarks(self, problem: Problem, device: Device, config: str) -> tuple[str, ...]:
        """What a user may want to know of how it would compute ``problem``, such as which of its kernels would.

        ``config`` is the text of one of its configs, or "" for the first.
        """
        return ()

    def pack(self, devices: Sequence[Device], folder: Path | None, progress: Progress) -> Iterator[Packed]:
        """Compile the kernels of usual problems on ``devices`` ahead into ``folder``, None being where it looks.

        Nothing where a backend has no such kernels. Raises ``CompileError``.
        """
        return iter(())

    def toolchain(self, device: Device) -> Mapping[str, str]:
        """Names and versions of what compiled the kernels that run on ``device``, beside installed packages.

        What was measured, or found right, holds for no other. Asked once a process.
        """
        return {}

    def native(self, library: str) -> str:
        """The library whose arrays its kernels are given for a caller's of ``library``: the same, if they take them."""
        return library if library in self.libraries else self.library
