"""Calls and steps of other forms as a program makes them again: pages, sequences one after another, sinks, slopes.

The caches of a program stay where they are, as do its parameters; all else is new in each call, and lies as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from attnswitch.bench import workload
from attnswitch.bench.candidates import Attend, Refused, fitting
from attnswitch.bench.overhead.rows import Row
from attnswitch.bench.overhead.ways import AUTO, TORCH, Way
from attnswitch.bench.peers import PEERS
from attnswitch.bench.steps import step
from attnswitch.bench.workload import Workload
from attnswitch.call import alike

__all__ = ["FIRST", "FormFeed", "form_ways", "torch_call"]

#: What follows the name of a way whose calls are each the first of their kind: the way of any call.
FIRST = ", first"


class FormFeed:
    """Tensors for batches of calls, new ones for each call."""

    def __init__(self, row: Row, device: str) -> None:
        self.first = workload.of(row.problem, device)

    def take(self, calls: int, way: int = 0, ways: int = 1) -> list[Workload]:
        """Those of so many calls, whoever makes them."""
        return [_again(self.first) for _ in range(calls)]


def _again(work: Workload) -> Workload:
    made: dict[str, Any] = {"query": _clone(work.query), "key_lengths": _clone(work.key_lengths)}
    made["block_table"], made["tree_mask"] = _clone(work.block_table), _clone(work.tree_mask)
    made["attn_mask"] = _clone(work.attn_mask)
    if work.offsets is not None:
        begin, begin_k = (offsets.clone() for offsets in work.offsets)
        made["offsets"] = (begin, begin if work.offsets[0] is work.offsets[1] else begin_k)
    if work.block_table is None:
        within = work.value.data_ptr() == work.key.data_ptr()  # latent heads
        made["key"] = _clone(work.key)
        made["value"] = made["key"][..., : work.problem.dim_v] if within else _clone(work.value)
    return replace(work, **made)


def _clone(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)


def torch_call(work: Workload) -> tuple[Attend | None, str]:
    """The same by torch's own call, or why there is none."""
    if work.device == "cpu" and work.problem.varlen and not work.problem.page:
        return None, "torch's own call for sequences one after another runs on GPUs"
    try:
        return PEERS[TORCH](work), ""
    except Refused as refusal:
        return None, str(refusal)


def form_ways(feed: FormFeed, backends: Sequence[str] = ()) -> dict[str, Way]:
    """The ways to call by name: torch's own if there is one, every backend that takes it, or those of ``backends``.

    Beside each, and beside the choice, a way whose calls are each the first of their kind (``FIRST``), where others are
    not: on a GPU.
    """
    made = {}
    if torch_call(feed.first)[0] is not None:
        made[TORCH] = Way(lambda work: step(PEERS[TORCH](work), work))
    beside = TORCH if TORCH in made else None
    for name in (*(backends or fitting(feed.first)), AUTO):
        of = functools.partial(_call, None if name == AUTO else name)
        made[name] = Way(of, beside=beside)
        if alike.knows_again(feed.first.query):
            made[name + FIRST] = Way(functools.partial(_first, of), alike.kept, beside=name)
    return made


def _call(backend: str | None, work: Workload) -> Callable[[], Any]:
    operands = work.query, work.key, work.value
    return step(functools.partial(work.function, *operands, backend=backend, **work.keywords()), work)


def _first(of: Callable[[Workload], Callable[[], Any]], work: Workload) -> Callable[[], Any]:
    call = of(work)

    def first() -> Any:
        alike.forget()
        return call()

    return first
