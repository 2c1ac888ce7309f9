"""One problem's kernels: what is launched, in which order, for arrays that lie in one way or another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnswitch.machine import backend
from attnswitch.machine.backend import Gradients, Inputs, Kernel, Order
from attnswitch.machine.builds import Build, side_by_side
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ..own.order import Backward
from . import ahead, form, launch, run
from .added import PrepareAdded
from .config import TritonConfig, small
from .operands import copied, in_words, mask_even, mask_in_steps, uneven
from .run import Launch
from .tiles import Make

__all__ = ["TritonKernel"]

_HERE = contextlib.nullcontext()
#: Where a problem's fields begin that are not batch, heads and lengths; and the longest side of a tile.
_DIMS, _TILE = Problem._fields.index("dim_qk"), 128
#: Where inputs of its forms begin.
_SINKS = Inputs._fields.index("sinks")
#: Training steps whose kernels were compiled, or are known not to compile.
_met: set[tuple[Any, ...]] = set()
#: Ways to lie that one kernel remembers; beyond, it forgets them all.
_MOST = 256


class TritonKernel(Kernel):
    """Forward in one launch, or two where the keys are split; backward in three, and one for a mask's gradient.

    What a launch passes, and is compiled for, is worked out at the first call with arrays that lie so, and for the
    backward no sooner than at the first backward. ``make`` makes the launches.
    """

    def __init__(self, problem: Problem, device: Device, config: TritonConfig, make: Make = Launch) -> None:
        self.problem, self._device, self._config, self._make = problem, device, config, make
        self._sees_nothing = problem.is_empty or problem.seq_k == 0
        self._uneven = uneven(problem)
        #: Whether it has inputs beside those of ``prepared``.
        self._beside = problem.varlen or problem.sinks or problem.alibi or problem.page > 0
        self._copies_mask = problem.mask is not None and not small(problem, device)
        self._forwards: dict[Any, launch.Forward] = {}
        self._backwards: dict[Any, Backward] = {}

    def builds(self) -> Sequence[Build]:
        """Of each launch, for arrays that lie as the problem says."""
        return run.builds(self._launches(ahead.inputs_of(self.problem)))

    def _launches(self, inputs: Inputs) -> list[ahead.Launched]:
        p, device, config = self.problem, self._device, self._config
        return ahead.launches(lambda make: TritonKernel(p, device, config, make), inputs)

    def _build(self, inputs: Inputs) -> None:
        """Have the kernels of a training step compiled at once, before the first of them is needed."""
        p = self.problem
        if not (p.grads and self._make is Launch and inputs.query.is_cuda):
            return
        # Lengths count by whether tiles are whole.
        met = (*p[_DIMS:], self._config, p.seq_q % _TILE == 0, p.seq_k % _TILE == 0)
        if met not in _met:
            _met.add(met)
            side_by_side(run.builds(self._launches(ahead.inputs_like(inputs))))

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse. The output lies in memory in the order of query, heads inside L or L inside."""
        with on(inputs.query):
            inputs = self._read(inputs)
            launched = self._forward_of(inputs)
            if self._sees_nothing:
                out, lse = launched.results(inputs.query)
                return out.zero_(), _of_nothing(lse, inputs)
            return launched(*inputs)

    def prepared(self, inputs: Inputs) -> backend.Forward:
        """``forward`` of tensors that lie like these, if they are read where they lie."""
        general = super().prepared(inputs)
        if not self._in_place(inputs):
            return general
        launched, here = self._forward_of(inputs), _here(inputs.query)

        def forward(query: Any, key: Any, value: Any, *beside: Any) -> tuple[Any, Any]:
            return (launched if here() else general)(query, key, value, *beside)

        return forward

    def prepared_form(self, inputs: Inputs, order: Order) -> backend.Forward:
        """``forward`` of a problem of any form for tensors that lie like these, if they are read where they lie."""
        read = self._read(inputs)
        launched = self._forward_of(read)
        if self._sees_nothing or not launched.ran or any(a is not b for a, b in zip(read, inputs, strict=True)):
            return super().prepared_form(inputs, order)
        ready, here = form.form(launched, inputs.query, self.problem.dim_v, order), _here(inputs.query)

        def forward(*given: Any) -> tuple[Any, Any]:
            if here():
                return ready(*given)
            with on(given[0]):
                return ready(*given)

        return forward

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients of what the problem asks for."""
        if self._sees_nothing:
            zeros = (
                torch.zeros_like(x) if letter in self.problem.grads and x is not None else None
                for letter, x in zip("qkvm", inputs[:4], strict=True)
            )
            return Gradients(*zeros)
        with on(inputs.query):
            inputs = self._read(inputs)
            results = out, lse.contiguous(), grad_out, None if grad_lse is None else grad_lse.contiguous()
            lie = _lie(inputs.query, *inputs[:5], *results), self._forms(inputs)
            launched = self._backwards.get(lie) or _keep(self._backwards, lie, self._new_backward())
            return launched(inputs, *results)

    def prepared_backward(self, inputs: Inputs) -> backend.Backward:
        """``backward`` of tensors that lie like these, if they are read where they lie."""
        if not self._in_place(inputs):
            return self.backward
        here = _here(inputs.query)
        known: dict[Any, Backward] = {}

        def backward(inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
            launched = None
            if here():
                lie = _lie(out, out, lse, grad_out, grad_lse, inputs.key_lengths)
                launched = known.get(lie)
                if launched is None and lse.is_contiguous() and (grad_lse is None or grad_lse.is_contiguous()):
                    launched = _keep(known, lie, self._new_backward())
            return (launched or self.backward)(inputs, out, lse, grad_out, grad_lse)

        return backward

    def _forward_of(self, inputs: Inputs) -> launch.Forward:
        lie = _lie(inputs.query, *inputs[:5]), self._forms(inputs)
        found = self._forwards.get(lie)
        if found is None:
            self._build(inputs)
            made = launch.Forward(self._make, self.problem, self._device, self._config)
            found = _keep(self._forwards, lie, made)
        return found

    def _forms(self, inputs: Inputs) -> Any:
        """What the problem does not say of its forms: rows of all sequences, pages, and how their arrays lie."""
        if not self._beside:
            return None
        of_forms = *(inputs.offsets or ()), *inputs[_SINKS:]
        shapes = inputs.query.shape, inputs.key.shape, *[x.shape for x in of_forms if x is not None]
        return shapes, _lie(inputs.query, *of_forms)

    def _new_backward(self) -> Backward:
        make, p, device, config = self._make, self.problem, self._device, self._config
        return Backward(
            PrepareAdded(make, p, config) if p.adds_mask else launch.Prepare(make, p, config),
            launch.QueryGradient(make, p, device, config) if "q" in p.grads else None,
            launch.KeyGradients(make, p, device, config) if "k" in p.grads or "v" in p.grads else None,
            launch.MaskGradient(make, p, config) if "m" in p.grads else None,
        )

    def _in_place(self, inputs: Inputs) -> bool:
        """Whether inputs like these are read where they lie, which their strides alone tell."""
        mask = inputs.attn_mask
        return not (
            self._sees_nothing
            or self._uneven
            or self._beside
            or (inputs.key_lengths is not None and not in_words(inputs.key_lengths))
            or any(x is not None and x.data_ptr() % 16 for x in inputs[:4])
            or (self._copies_mask and mask is not None and not mask_even(mask))
        )

    def _read(self, inputs: Inputs) -> Inputs:
        """Inputs as the kernels read them."""
        if self._uneven:
            inputs = inputs._replace(**{role: copied(getattr(inputs, role)) for role in self._uneven})
        if self._copies_mask and inputs.attn_mask is not None:
            inputs = inputs._replace(attn_mask=mask_in_steps(inputs.attn_mask))
        if inputs.sinks is not None:
            inputs = inputs._replace(sinks=inputs.sinks.contiguous())
        if inputs.block_table is not None and inputs.block_table.stride(1) != 1:
            inputs = inputs._replace(block_table=inputs.block_table.contiguous())
        if inputs.key_lengths is None or in_words(inputs.key_lengths):
            return inputs
        return inputs._replace(key_lengths=inputs.key_lengths.long().contiguous())


def on(tensor: Any) -> Any:
    """The device of ``tensor`` as the current one, which is where Triton launches."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


def _of_nothing(lse: Any, inputs: Inputs) -> Any:
    """``lse`` (B, Hq, Lq) of rows that see no key: that of the sink, if there is one and the row is a sequence's."""
    lse.fill_(-torch.inf)
    if inputs.sinks is not None:
        lse.copy_(inputs.sinks[:, None])
        if inputs.offsets is not None:
            past = torch.arange(lse.shape[2], device=lse.device) >= inputs.offsets.query[-1]
            lse.masked_fill_(past, -torch.inf)
    return lse


def _here(tensor: Any) -> Callable[[], bool]:
    """Whether the device of ``tensor`` is the current one."""
    if not tensor.is_cuda:
        return lambda: True
    index, current = tensor.get_device(), torch._C._cuda_getDevice
    return lambda: current() == index


def _lie(first: Any, *arrays: Any) -> tuple[Any, ...]:
    """Where ``first`` is, and how arrays lie there: whatever a launch of them follows from beside the problem."""
    return (
        first.get_device(),
        *[None if x is None else (x.dtype, x.stride(), x.data_ptr() & 15) for x in arrays],
    )


def _keep(known: dict[Any, Any], lie: Any, made: Any) -> Any:
    """``made``, kept for arrays that lie so."""
    if len(known) >= _MOST:
        known.clear()
    known[lie] = made
    return made
