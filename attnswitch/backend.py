"""The contract between the dispatcher and a backend: one class in one file, and one row in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from attnswitch.arrays import Array
from attnswitch.device import Device
from attnswitch.problem import Problem

__all__ = [
    "Backend",
    "Config",
    "Gradients",
    "Inputs",
    "Kernel",
    "Precision",
    "Prepared",
    "native",
    "prepared",
    "unprepared",
]

#: Output and lse of query, key, value and, where the problem has one, attn_mask.
Prepared = Callable[..., tuple[Array, Array | None]]


class Inputs(NamedTuple):
    """The arrays of one call, of the backend's library.

    Shapes: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), attn_mask broadcastable with four axes,
    key_lengths (B,). Kernels never write to any of them. ``seed`` is the caller's, or drawn for a backend with
    ``wants_seed``.
    """

    query: Array
    key: Array
    value: Array
    attn_mask: Array | None = None
    key_lengths: Array | None = None
    seed: int | None = None

    def map(self, change: Callable[[Array], Array]) -> Inputs:
        """The same inputs with ``change`` applied to every array."""
        query, key, value, mask, lengths = (None if array is None else change(array) for array in self[:5])
        return Inputs(query, key, value, mask, lengths, self.seed)


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their operands; None where ``Problem.grads`` does not ask for one."""

    query: Array | None
    key: Array | None
    value: Array | None
    attn_mask: Array | None


class Kernel(Protocol):
    """What a backend compiles for one problem.

    One with ``prepared(inputs) -> Prepared`` is asked there for a forward of torch tensors that have the shapes,
    strides and devices of these, and addresses that are multiples of 16 where these are, while torch is in the modes
    that it is in now (autograd, autocast): what it need not look at again in every call.

    One with ``lse_shows = True`` promises of that forward on the CPU, where it returns an lse: it is dense, in float32
    or float64 where that is the problem's, and a row that NaN or inf in query or key make NaN has an lse of 0, NaN or
    inf, whatever its output. So lse can be looked at in place of query and key.
    """

    def forward(self, inputs: Inputs) -> tuple[Array, Array | None]:
        """Output (B, Hq, Lq, Dv) and lse (B, Hq, Lq).

        lse may be None unless the problem asks for it, or for gradients that this kernel's ``backward`` computes.
        """

    def backward(
        self, inputs: Inputs, out: Array, lse: Array | None, grad_out: Array, grad_lse: Array | None
    ) -> Gradients:
        """Gradients from the saved output and lse and the upstream gradients (``grad_lse`` None means zero)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and the like; backends subclass it. This one says: nothing to choose.

    Its ``str`` names it among the configs of a backend: in wisdom, and in ``attnswitch bench --config``.
    """


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


@runtime_checkable
class Backend(Protocol):
    """One way to compute attention.

    ``library`` names the arrays its kernels take ("numpy", "torch" or "cupy"); one whose kernels take those of several
    as they are names them all in ``libraries: tuple[str, ...]``. ``autograd`` says that its output is
    differentiable by torch itself, so that nothing needs to be saved for it. A class may also have ``divergences``, the
    file of what it is known to get wrong (``attnswitch.divergences``), and ``builds_per_shape = True`` if it compiles
    a kernel or builds a plan for each shape: the verifier then tries many data recipes on each. One with
    ``wants_seed = True`` is given a seed drawn for the call, where there is dropout and the caller gave none.

    ``goes_first(problem, device) -> bool``, where a class has it, says that on such a device it was measured to be the
    fastest of most problems like this one: it then stands before the others where nothing was measured on this machine.

    ``remarks(problem, device, config) -> tuple[str, ...]``, where a class has it, says what a user may want to know of
    how it would compute a problem that it takes, such as which of its kernels would; ``config`` is the text of one of
    its configs, or "" for the first.

    A backend that the CPU can run by an interpreter only may have ``emulation: dict[str, str]``, the environment
    variables that call for it. Where it is asked for by name, the verifier checks it on the CPU in processes that have
    them. ``unavailable`` and ``supports`` refuse the CPU where they are not set. A library reads them as it is
    imported, and they begin with its name; the module that holds the class does not import it.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    autograd: ClassVar[bool]

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, with the remedy; None if it can. Never raises."""

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Why it does not take ``problem`` on ``device``, one sentence a reason; empty if it does. Pure."""

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        """The heuristic's choice first, then the rest of the search space."""

    def precision(self, problem: Problem, device: Device) -> Precision:
        """What its rounding is for ``problem``."""

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        """The kernel for ``problem``. Raises ``CompileError`` if it cannot be built."""


def native(backend: Backend, library: str) -> str:
    """The library whose arrays ``backend`` is given for a caller's of ``library``: the same, if it takes them."""
    return library if library in getattr(backend, "libraries", ()) else backend.library


def prepared(kernel: Kernel, inputs: Inputs) -> Prepared:
    """The forward of ``kernel`` for inputs that lie as these do."""
    prepare = getattr(kernel, "prepared", None)
    made: Prepared = unprepared(kernel.forward) if prepare is None else prepare(inputs)
    return made


def unprepared(forward: Callable[[Inputs], tuple[Array, Array | None]]) -> Prepared:
    """``forward`` itself, for inputs that are given one by one."""

    def found(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> tuple[Array, Array | None]:
        return forward(Inputs(query, key, value, attn_mask))

    return found
