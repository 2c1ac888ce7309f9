"""What the operators do when a graph runs: the same as calls without one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnswitch.call import headwise, per_head
from attnswitch.call.attend import attend, request
from attnswitch.call.backward import are_of, gradients, results
from attnswitch.call.launch import Launch, lies_alike
from attnswitch.call.operators.memory import laid
from attnswitch.call.operators.schema import read_said
from attnswitch.call.options import Options
from attnswitch.call.per_head import PerHead
from attnswitch.call.seeds import drawn_seed
from attnswitch.machine import registry
from attnswitch.problem import GRAD_OPERANDS

__all__ = [
    "absent",
    "as_without_graph",
    "backward",
    "drawn",
    "forward",
    "kept",
    "latest",
    "plain",
    "seed_for",
    "signed",
    "unsigned",
]


def signed(seed: int | None) -> int | None:
    """A seed as the 64 bits with a sign that a schema has for integers."""
    return seed if seed is None or seed < 2**63 else seed - 2**64


def _sets() -> tuple[Any, Any]:
    """What a thread that has just begun includes in a call, and leaves out, of torch's dispatch keys."""
    sets: list[Any] = []
    include, exclude = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    thread = threading.Thread(target=lambda: sets.extend((include(), exclude())))
    thread.start()
    thread.join()
    return sets[0], sets[1]


_SETS = _sets()


def as_without_graph(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as a program without autograd calls it, wherever torch's dispatcher is: so launches know it again."""

    @functools.wraps(run)
    def runs(*operands: Any, **said: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return run(*operands, **said)
        with torch._C._ForceDispatchKeyGuard(*_SETS):
            if not torch.is_grad_enabled():
                return run(*operands, **said)
            with torch.no_grad():
                return run(*operands, **said)

    return runs


@as_without_graph
def plain(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    drawn: Any = None,
    *,
    seed: int | None = None,
    **said: Any,
) -> Any:
    """Output."""
    backend, policy, options = read_said(said)
    seed = seed_for(seed, drawn, options, query, backend)
    call = query, key, value, attn_mask, key_lengths, unsigned(seed), options, backend, policy
    if alibi_slopes is None:
        out, _ = attend(*call)
    else:
        out = headwise.attend_by(*call, PerHead(None, alibi_slopes))
    return laid(out, query, options.layout)


@as_without_graph
def forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    drawn: Any = None,
    *,
    grads: str = "",
    seed: int | None = None,
    **said: Any,
) -> tuple[Any, Any, Any]:
    """Output, lse, and the seed of a dropout mask that is made again."""
    backend, policy, options = read_said(said)
    seed = seed_for(seed, drawn, options, query, None if grads else backend)
    if not (grads or options.return_lse):  # an output of the operator, whether or not the call wants it
        options = replace(options, return_lse=True)
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    call = query, key, value, attn_mask, key_lengths, unsigned(seed), options, backend, policy
    lse: Any
    if alibi_slopes is not None:
        heads = PerHead(None, alibi_slopes)
        if grads:
            out, lse = headwise.results(operands, *call[4:], grads, heads)
        else:
            out, lse = headwise.attend_by(*call, heads)
    elif grads:
        out, lse = results(operands, *call[4:], grads)
    else:
        out, lse = attend(*call)
    state = kept(seed, query, keeps=bool(grads) and options.dropout_p > 0.0)
    return laid(out, query, options.layout), lse.contiguous(), state


@as_without_graph
def backward(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    out: Any,
    lse: Any,
    state: Any,
    *,
    grads: str,
    **said: Any,
) -> list[Any]:
    """Gradients of what ``grads`` names, in that order."""
    backend, policy, options = read_said(said)
    seed = unsigned(int(state[0])) if options.dropout_p > 0.0 else None
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    call = grad_out, operands, key_lengths, seed, options, backend, policy
    given = {"out": out, "lse": lse, "grad_lse": grad_lse}
    if alibi_slopes is None:
        found = gradients(*call, **given, wanted=grads)
    else:
        heads = PerHead(None, alibi_slopes)
        found = headwise.gradients(*call, **given, wanted=grads, heads=heads, sinks_grad=False)
    return [
        laid(grad, like, options.layout) if name != "m" else grad.contiguous()  # type: ignore[union-attr]
        for name, grad, like in zip(GRAD_OPERANDS, found, operands, strict=False)
        if name in grads
    ]


def seed_for(seed: int | None, drawn: Any, options: Options, beside: Any, named: str | None = None) -> int | None:
    """The seed of a call: of dropout that has none the one that was ``drawn``, or a new one.

    It has one with gradients and without: a checkpoint's two forwards have one mask, whatever backends they go to. A
    backend that is ``named`` and draws masks itself has none.
    """
    if seed is not None or not options.dropout_p > 0.0:
        return seed
    if named is not None and not getattr(registry.load(named), "wants_seed", True):
        return None
    return drawn_seed(beside) if drawn is None else int(drawn[0])


def kept(seed: int | None, beside: Any, *, keeps: bool) -> Any:
    """What is kept of a seed for the backward: (1,) on the CPU, or nothing."""
    return torch.tensor([signed(seed)], device="cpu") if keeps else beside.new_empty(0, dtype=torch.float32)


def drawn(fresh: Any) -> Any:
    """A seed (1,), on the CPU: the state of that generator is what a graph goes back to, to draw it again."""
    return torch.full_like(fresh, drawn_seed(fresh))


def absent(sinks: Any) -> Any:
    """Where there is none. Raises ``InvalidProblem`` for NaN and inf, on the CPU as a call without a graph does."""
    if sinks.device.type == "cpu":
        per_head.check_scores(sinks)
    return sinks == -torch.inf


@as_without_graph
def latest(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    beside: tuple[Any, ...],
    grads: str,
    **said: Any,
) -> Launch | None:
    """The launch of a call for gradients that was just made, if another with these tensors would be quickly told.

    ``beside`` are output, lse and the output's gradient where these were given.
    """
    backend, policy, options = read_said(said)
    masked = attn_mask is not None
    asked = request(query, options, backend, policy, seeded=False, masked=masked, lengths=False, grads=grads)
    launch = asked.latest
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if launch is None or not lies_alike(launch.alike, *operands):
        return None
    if beside and not are_of(asked, launch, query, beside[:2], (beside[2], None)):
        return None
    return launch


def unsigned(seed: int | None) -> int | None:
    """The seed that ``signed`` was given."""
    return None if seed is None else seed % 2**64
