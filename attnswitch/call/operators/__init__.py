"""Calls as operators of torch's, for whatever looks at a program before or while it runs.

torch.compile, torch.export, FakeTensorMode, make_fx, torch.func and tensor subclasses that dispatch see
``torch.ops.attnswitch``: ``attention``, and with lse or gradients ``attention_forward`` and ``attention_backward``; the
same of ``attention_varlen``; and ``attention_paged``, with lse ``attention_paged_forward``. A graph holds the call, not
the choice: a backend is chosen when the graph runs, by the facts of its tensors there, as it is without a graph. Beside
them ``absent_sinks`` looks at sinks, and ``drawn_seed`` draws a seed for dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnswitch.call.operators import again, autograd, direct, fake, flops, paged, run, schema, uncompiled, varlen
from attnswitch.call.operators.calls import (
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
    told,
)

__all__ = [
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "told",
]

_NAMESPACE = "attnswitch"


_library = direct.Library(_NAMESPACE, "DEF")
_ops = torch.ops.attnswitch


def _define(form: str, run: Callable[..., Any], fake: Callable[..., Any], draws: bool = False) -> str:
    """Define an operator; one that ``draws`` random numbers is made again as it was, and no two of it are one."""
    drawing = (torch.Tag.nondeterministic_seeded,) * draws
    name = _library.define(form, tags=(torch.Tag.pt2_compliant_tag, *drawing))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return str(name)


def _define_all(forms: Sequence[str], runs: Sequence[Callable[..., Any]], fakes: Sequence[Callable[..., Any]]) -> None:
    """Define the three operators of a call, the second differentiated by the third."""
    draws = True, True, False
    _, forward, backward = [_define(*each) for each in zip(forms, runs, fakes, draws, strict=True)]
    derivative = autograd.differentiated_by(getattr(_ops, backward))
    torch.library.register_autograd(f"{_NAMESPACE}::{forward}", derivative, setup_context=autograd.save, lib=_library)
    torch.library.register_autograd(f"{_NAMESPACE}::{backward}", autograd.only_once, lib=_library)


_define_all(schema.ATTENTION, (run.plain, run.forward, run.backward), (fake.plain, fake.forward, fake.backward))
_define_all(
    schema.VARLEN,
    (varlen.plain, varlen.forward, varlen.backward),
    (varlen.fake_plain, varlen.fake_forward, varlen.fake_backward),
)
for _form, _run, _fake in zip(
    schema.PAGED, (paged.plain, paged.forward), (paged.fake_plain, paged.fake_forward), strict=True
):
    torch.library.register_autograd(f"{_NAMESPACE}::{_define(_form, _run, _fake)}", paged.no_gradient, lib=_library)
_define(schema.ABSENT, run.absent, fake.absent)
_define(schema.SEED, run.drawn, fake.drawn, draws=True)
uncompiled.keep_out()
for _operator, _again in (
    (_ops.attention_forward.default, again.forward),
    (_ops.attention_backward.default, again.backward),
):
    _operator._op = _again(_operator._op)
flops.register(_ops)
