"""The rows of ``bench overhead``: which problems are called, and what is new in each call."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of
from attnswitch.problem import Problem

__all__ = ["SECTIONS", "Keys", "New", "Row", "Section", "ad_hoc", "rows"]

#: repeated: the same call again; lengths: one more key in each call; masks: bool and float ones; training: steps;
#: forms: pages, sequences one after another, sinks, slopes.
Section = Literal["repeated", "lengths", "masks", "training", "forms"]
SECTIONS: tuple[Section, ...] = get_args(Section)
#: What no call before had: nothing, the number of keys, the tensor of the mask, all tensors but caches and parameters.
New = Literal["nothing", "length", "mask", "tensors"]
#: Key and value are whole tensors, or the first rows of a larger cache.
Keys = Literal["whole", "slice"]
_OF_NEW: dict[New, Section] = {"nothing": "repeated", "length": "lengths", "mask": "masks", "tensors": "forms"}
_LENGTHS = 300, 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One problem and how it is called.

    A ``step`` is the forward and the gradients of the problem, timed until the device has done a batch of them; else a
    call is timed until it returns. Raises ``InvalidProblem`` for what nobody here times, and but for forms, whose
    tensors are new in each call, for what torch's own call cannot say.
    """

    section: Section
    problem: Problem
    keys: Keys = "whole"
    new: New = "nothing"
    step: bool = False

    def __post_init__(self) -> None:
        p = self.problem
        if self.section == "forms":
            if bool(p.grads) != self.step:
                raise InvalidProblem(f"{p}: with new tensors a call is timed without gradients, and a step with them")
            if self.keys != "whole" or (self.step and p.lse):
                raise InvalidProblem(f"{p}: new tensors have whole keys, and a step is timed of the output alone")
            return
        if p.varlen or p.page or p.sinks or p.alibi:
            raise InvalidProblem(
                f"{p}: sequences one after another, pages, sinks and slopes are timed with new tensors"
            )
        if p.irregular or p.softcap or p.lse or p.seeded:
            raise InvalidProblem(f"{p}: torch's own call has no lengths, window, bottom right, softcap, lse or seed")
        if p.mask is not None and p.causal:
            raise InvalidProblem(f"{p}: torch's own call takes a mask or is causal, not both")
        if self.step and not p.grads:
            raise InvalidProblem(f"{p}: a training step needs gradients, such as {p}.grad")
        if self.new != "nothing" and p.grads:
            raise InvalidProblem(f"{p}: what is new in each call is timed without gradients")
        if self.new == "mask" and p.mask is None:
            raise InvalidProblem(f"{p}: there is no mask that could be new in each call")


def rows(device: str, sections: Collection[str] = SECTIONS, *, quick: bool = False) -> list[Row]:
    """The rows of ``sections``, in float32 on the CPU and bfloat16 elsewhere; ``quick`` takes shorter ones.

    Raises ``InvalidProblem`` for a section that there is none of.
    """
    dtype = "fp32" if device == "cpu" else "bf16"
    made = {"repeated": _repeated, "lengths": _lengths, "masks": _masks, "training": _training, "forms": _forms}
    for section in sections:
        if section not in made:
            raise InvalidProblem(f"section {section!r} is not known; {one_of(section, made)}")
    return [row for section in dict.fromkeys(sections) for row in made[section](dtype, 128 if quick else 512)]


def ad_hoc(text: str, keys: Keys = "whole", new: New = "nothing", *, step: bool = False) -> Row:
    """The row of a problem that is named by its text."""
    section: Section = "training" if step and new != "tensors" else _OF_NEW[new]
    return Row(section, Problem.parse(text), keys, new, step)


def _repeated(dtype: str, _: int) -> Iterator[Row]:
    for size, grads in itertools.product(("b1.h1.s8.d64", "b2.h4.s32.d64"), ("", ".grad")):
        yield Row("repeated", Problem.parse(f"{size}.{dtype}{grads}"))
    for length, mask, keys in itertools.product(_LENGTHS, ("", ".mask=bool:k"), get_args(Keys)):
        yield Row("repeated", Problem.parse(f"b1.h8.s1x{length}.d64.{dtype}{mask}"), keys)


def _lengths(dtype: str, _: int) -> Iterator[Row]:
    for length, mask in itertools.product(_LENGTHS, ("", ".mask=bool:k")):
        yield Row("lengths", Problem.parse(f"b1.h8.s1x{length}.d64.{dtype}{mask}"), "slice", "length")


def _forms(dtype: str, most: int) -> Iterator[Row]:
    decode, cache = "causal-br.lengths.page=16", "causal-br.lengths.page=64"
    for text in (
        f"b4.h32/8.s1x{most}.d128.{dtype}.{decode}",
        f"b4.h16/1.s1x{most}.d576/512.{dtype}.{cache}",
        f"b4.h32/8.s4x{most}.d128.{dtype}.{decode}.varlen",
        f"b4.h8.s64.d128.{dtype}.causal.varlen",
        f"b2.h8.s64.d64.{dtype}.causal.sinks",
        f"b2.h8.s64.d64.{dtype}.causal.alibi",
    ):
        yield Row("forms", Problem.parse(text), new="tensors")
    for size, form in (("b4.h8.s64.d128", "varlen"), ("b2.h8.s64.d64", "sinks"), ("b2.h8.s64.d64", "alibi")):
        yield Row("forms", Problem.parse(f"{size}.{dtype}.causal.{form}.grad"), new="tensors", step=True)


def _masks(dtype: str, most: int) -> Iterator[Row]:
    news: tuple[New, ...] = ("nothing", "mask")
    for length, mask, new in itertools.product((77, most), ("bool", dtype), news):
        yield Row("masks", Problem.parse(f"b1.h8.s{length}.d64.{dtype}.mask={mask}"), new=new)


def _training(dtype: str, most: int) -> Iterator[Row]:
    for size in ("b1.h1.s8.d64", f"b1.h8.s{most}.d80"):
        for options in ("grad", "causal.grad", "mask=bool.grad", f"mask={dtype}.grad=qkvm"):
            yield Row("training", Problem.parse(f"{size}.{dtype}.{options}"), step=True)
