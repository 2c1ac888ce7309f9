"""The suites of ``suites.toml``: what is measured, as rows that are checked when they are read."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, get_args

from attnswitch.bench.record import Direction, Kind
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.names import one_of
from attnswitch.problem import CONTIGUOUS, Problem

__all__ = ["Row", "Suite", "ad_hoc", "suites"]

#: Suite of problems that were named on the command line.
_AD_HOC = "problem"
#: Peers of such a problem: FlexAttention compiles for each shape, which is worth the wait only where it is asked for.
_PEERS = ("torch",)


@dataclass(frozen=True, slots=True)
class Row:
    """One problem to measure, and with what. ``lengths`` are key lengths, or those of a bool padding mask.

    ``configs``: beside its own choice, each backend is measured with those of its configs whose text has one of these.
    """

    suite: str
    name: str
    problem: Problem
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    directions: tuple[Direction, ...] = ("forward", "backward")
    kind: Kind = "speed"
    lengths: tuple[int, ...] | None = None
    configs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        what = f"suite {self.suite}, row {self.name!r}"
        if self.kind not in get_args(Kind):
            raise InvalidProblem(f"{what}: kind {self.kind!r}, {one_of(self.kind, get_args(Kind))}")
        if unknown := set(self.directions) - set(get_args(Direction)):
            raise InvalidProblem(f"{what}: directions {sorted(unknown)}, expected {', '.join(get_args(Direction))}")
        names = (*self.backends, *self.peers)
        if len(set(names)) < len(names):
            raise InvalidProblem(f"{what}: candidates {', '.join(names)}, expected each of them once")
        p = self.problem
        if p.nonfinite or any(memory != CONTIGUOUS for memory in (p.query, p.key, p.value, p.attn_mask)):
            raise InvalidProblem(f"{what}: {p}: operands are drawn contiguous and finite; leave that part out")
        padded = p.mask is not None and p.mask.is_bool and p.mask.axes in ("bk", "k", "bqk", "qk")
        if self.lengths is not None and not (p.key_lengths or p.varlen or padded):
            raise InvalidProblem(
                f"{what}: lengths, but {p} has neither `lengths` nor a padding mask `mask=bool:bk` or `bool:bqk`"
            )
        wanted = 1 if padded and p.mask is not None and "b" not in p.mask.axes else p.batch
        if self.lengths is not None and len(self.lengths) != wanted:
            raise InvalidProblem(f"{what}: {len(self.lengths)} lengths, expected {wanted}, one for each sequence")
        if self.lengths is not None and not all(0 <= length <= p.seq_k for length in self.lengths):
            raise InvalidProblem(f"{what}: lengths {list(self.lengths)}, expected 0 to Lk = {p.seq_k}")

    def replace(self, **changes: Any) -> Row:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows that are measured together."""

    name: str
    about: str
    rows: tuple[Row, ...]


@functools.cache
def suites() -> dict[str, Suite]:
    """Every suite by name. Raises ``InvalidProblem`` for a row that makes no sense."""
    text = resources.files("attnswitch.bench").joinpath("suites.toml").read_text(encoding="utf-8")
    return {name: Suite(name, table["about"], tuple(_rows(name, table))) for name, table in tomllib.loads(text).items()}


def _rows(suite: str, table: dict[str, Any]) -> Iterator[Row]:
    shared = {key: table[key] for key in ("kind", "directions", "backends", "peers")}
    for own in table["rows"]:
        fields: dict[str, Any] = shared | ({"name": own, "problem": own} if isinstance(own, str) else own)
        problem = Problem.parse(fields.pop("problem"))
        if isinstance(own, str) and problem.seq_q == 1:
            fields["directions"] = ["forward"]
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        yield Row(suite=suite, problem=problem, **fields)


def ad_hoc(text: str, direction: Direction | None = None) -> Row:
    """The row of a problem named by itself: every backend but those that wait, and torch's own choice beside them.

    It is measured in ``direction``, or forward and backward; one query a sequence forward alone, as decoding. Raises
    ``InvalidProblem``.
    """
    problem = Problem.parse(text)
    if problem.page and direction not in (None, "forward"):
        raise InvalidProblem(f"{problem}: a cache in pages has no gradient; it is measured forward alone")
    decodes = problem.seq_q == 1 and not problem.grads and direction in (None, "forward")
    kind: Kind = "decode" if decodes else "speed"
    directions: tuple[Direction, ...] = ("forward",) if decodes or problem.page else ("forward", "backward")
    directions = directions if direction is None else (direction,)
    backends = tuple(row.name for row in registry.table() if not row.waits)
    return Row(_AD_HOC, text, problem, backends, _PEERS, directions, kind)
