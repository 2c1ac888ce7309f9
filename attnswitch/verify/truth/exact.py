"""``Exact``: what the results of a case should be and how far rounding may take them, wholly or on sampled rows.

The dense answer holds the scores, so it is for short cases. Of a long one, single rows are answered: a row needs only
its own query and every key. Gradients of keys and values, which need every row, are left to the laws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.machine.backend import Precision
from attnswitch.problem.philox import keep_mask
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.data import hashed
from attnswitch.verify.truth import bounds, oracle, rows
from attnswitch.verify.truth.oracle import Answer, Float

__all__ = ["DENSE_WORK", "Exact"]

#: Cases of more work than this are answered on sampled rows.
DENSE_WORK = 2**23
_HEADS, _RANDOM_ROWS = 3, 6


class Exact:
    """The exact results of a case.

    ``rows`` is None where every element is known, and otherwise the (batch, head, query) index arrays of the rows in
    ``values``: "out", "lse" and "query" then have one axis for the rows in place of the first three.
    """

    def __init__(self, case: Case, data: dict[str, Any], keep: Any = None, trusted: bool = False) -> None:
        """Answer ``case``; ``keep`` is the dropout mask where no seed says it; ``trusted`` skips the cross-check.

        Raises ``VerificationError`` if the two references disagree.
        """
        self.case = case
        self._limits: dict[Precision, dict[str, Float]] = {}
        self.rows: tuple[Any, Any, Any] | None = None
        if case.work <= DENSE_WORK:
            dense = oracle.answer(case, data, _kept(case) if keep is None else keep)
            if not trusted:
                rows.cross_check(data, dense)
            self.answers = [dense]
            self.values, self.poisoned = dense.values, dense.poisoned
            return
        places = _places(case)
        self.answers = [_some_rows(case, data, keep, b, h, i) for b, h, i in places]
        if not trusted:
            b, h, i = places[-1]
            rows.check_row(case, data, self.answers[-1], (b, h, int(i[-1])), len(i) - 1)
        self.rows = tuple(np.concatenate([np.broadcast_to(p[n], p[2].shape) for p in places]) for n in range(3))  # type: ignore[assignment]
        self.values = _joined([answer.values for answer in self.answers])
        poisoned = [answer.poisoned for answer in self.answers]
        if any(poisoned):  # of several heads, some may have met none
            clean = ({name: np.zeros(value.shape, np.bool_) for name, value in a.values.items()} for a in self.answers)
            self.poisoned = _joined([found or none for found, none in zip(poisoned, clean, strict=True)])
        else:
            self.poisoned = {}

    def limits(self, precision: Precision) -> dict[str, Float]:
        """The error bound of each element of ``values``, for a backend of this precision."""
        if precision not in self._limits:
            found = [bounds.bounds(answer, precision) for answer in self.answers]
            self._limits[precision] = found[0] if self.rows is None else _joined(found)
        return self._limits[precision]

    def row_errors(self, precision: Precision) -> dict[str, Any]:
        """``bounds.row_errors`` of every row (B, Hq, Lq); where rows are sampled, the largest of them for all."""
        found = [bounds.row_errors(answer, precision) for answer in self.answers]
        if self.rows is None:
            return found[0]
        return {name: max(float(part[name].max(initial=0.0)) for part in found) for name in found[0]}

    def part(self, result: Any) -> Any:
        """The elements of a result (B, H, L, ...) that ``values`` speaks of."""
        return result if self.rows is None else result[self.rows]

    def place(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of ``values`` stands in the whole result."""
        if self.rows is None:
            return index
        return (*(int(axis[index[0]]) for axis in self.rows), *index[1:])


def _kept(case: Case) -> Any:
    """The dropout mask of a seeded case."""
    if not case.dropout:
        return None
    b, h, lq, lk = case.scores
    batch, head, row = np.ogrid[:b, :h, :lq]
    return keep_mask(case.dropout_seed or 0, case.dropout, batch, head, row, 0, lk)


def _places(case: Case) -> list[tuple[int, int, Any]]:
    """Batch entries and heads to look at, first and last among them, with the rows of each: ends, tile edges, any."""
    words = hashed(np, case.data_seed, 9, _HEADS * (_RANDOM_ROWS + 2)) & (2**62 - 1)
    heads = [(0, 0), (case.batch - 1, case.heads_q - 1)]
    heads += [(int(words[-1 - n]) % case.batch, int(words[-1 - n] >> 8) % case.heads_q) for n in range(_HEADS - 2)]
    found = []
    for n, (b, h) in enumerate(dict.fromkeys(heads)):
        some = {0, case.seq_q - 1, *(int(w) % case.seq_q for w in words[n * _RANDOM_ROWS : (n + 1) * _RANDOM_ROWS])}
        edge = int(words[n]) % max(case.seq_q // 64, 1) * 64
        some |= {i for i in (edge - 1, edge, 63, 64, 127, 128) if 0 <= i < case.seq_q}
        found.append((b, h, np.array(sorted(some))))
    return found


def _some_rows(case: Case, data: dict[str, Any], keep: Any, b: int, h: int, i: Any) -> Answer:
    """The answer to rows ``i`` of one batch entry and head."""
    g = h // case.group
    few = {role: data[role][b : b + 1, h : h + 1, i] for role in ("query", "grad_out", "grad_lse")}
    few |= {role: data[role][b : b + 1, g : g + 1] for role in ("key", "value")}
    mask = data.get("attn_mask")
    visible = oracle.visible_positions(case, mask, (b, h, i))
    if mask is not None:
        few["attn_mask"] = oracle.mask_rows(mask, b, h, i)
    if keep is not None:
        keep = keep[b : b + 1, h : h + 1, i]
    elif case.dropout:
        row = i[None, None, :]
        keep = keep_mask(case.dropout_seed or 0, case.dropout, np.array(b), np.array(h), row, 0, case.seq_k)
    part = case.replace(batch=1, heads_kv=1, group=1, seq_q=len(i), lengths=None, mask=None)
    found = oracle.answer(part, few, keep, visible)
    for name in ("key", "value", "attn_mask"):  # sums over rows that are not here
        found.values.pop(name, None)
        found.poisoned.pop(name, None)
    return found


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Arrays (1, 1, rows, ...) of several places as one with a single axis for the rows."""
    names = [name for name in ("out", "lse", "query") if name in parts[0]]
    return {name: np.concatenate([part[name][0, 0] for part in parts]) for name in names}
