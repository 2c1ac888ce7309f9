"""``Exact``: what the results of a case should be and how far rounding may take them, wholly or in part.

The dense answer holds the scores, so it is for short cases. Of a long one, single rows are answered: a row needs only
its own query and every key. Gradients of keys and values need every row of their query heads: one key head is answered
in whole where its scores are few enough, and else they are left to the laws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnswitch.machine.backend import Precision
from attnswitch.problem.philox import keep_mask
from attnswitch.verify.drawing.case import DENSE_WORK, Case
from attnswitch.verify.drawing.generator import hashed
from attnswitch.verify.drawing.parts import ranges
from attnswitch.verify.truth import bounds, oracle, parts, rows
from attnswitch.verify.truth.oracle import Answer, Float

__all__ = ["HEAD_SCORES", "Exact"]

#: Scores of a key head, group * Lq * Lk, up to which it is answered in whole: a quarter of a second.
HEAD_SCORES = 2**19
_HEADS, _RANDOM_ROWS = 3, 6
_OF_ROWS = ("out", "lse", "query")


class Exact:
    """The exact results of a case.

    ``rows`` is None where every element is known, and otherwise the (batch, head, query) index arrays of the rows in
    ``values``: "out", "lse" and "query" then have one axis for the rows in place of the first three. "key", "value" and
    "attn_mask" are there if one key head is known, and have the axes after batch and head; of a mask that heads or
    batch entries share, nothing is.
    """

    def __init__(self, case: Case, data: dict[str, Any], keep: Any = None, trusted: bool = False) -> None:
        """Answer ``case``; ``keep`` is the dropout mask where no seed says it; ``trusted`` skips the cross-check.

        Raises ``VerificationError`` if the two references disagree.
        """
        self.case, self._data = case, data
        self._limits: dict[Precision, dict[str, Float]] = {}
        self._row_errors: dict[Precision, dict[str, Any]] = {}
        self.rows: tuple[Any, Any, Any] | None = None
        #: Where in a result the part that is known stands, by the result's name.
        self._where: dict[str, tuple[Any, ...]] = {}
        if case.work <= DENSE_WORK:
            dense = oracle.answer(case, data, _kept(case) if keep is None else keep)
            if not trusted:
                rows.cross_check(data, dense)
            self.answers = [dense]
            self.values, self.poisoned = dense.values, dense.poisoned
            return
        places = _places(case)
        self.answers = [_answer(case, data, keep, place) for place in places]
        if not trusted:
            for (b, heads, i), answer in zip(places[-2:], self.answers[-2:], strict=True):
                rows.check_row(case, data, answer, (b, heads.stop - 1, int(i[-1])), (heads.stop - heads.start - 1, -1))
        self.rows = _rows(places)
        self.values = _joined([answer.values for answer in self.answers])
        b, heads, _ = places[-1]
        for name in self.values.keys() - {*_OF_ROWS}:
            self._where[name] = (b, heads if name == "attn_mask" else heads.start // case.group)
        poisoned = [answer.poisoned for answer in self.answers]
        if any(poisoned):  # of several heads, some may have met none
            clean = ({name: np.zeros(value.shape, np.bool_) for name, value in a.values.items()} for a in self.answers)
            self.poisoned = _joined([found or none for found, none in zip(poisoned, clean, strict=True)])
        else:
            self.poisoned = {}

    def limits(self, precision: Precision) -> dict[str, Float]:
        """The error bound of each element of ``values``, for a backend of this precision."""
        if precision not in self._limits:
            found = [self._bounds(answer, precision) for answer in self.answers]
            self._limits[precision] = found[0] if self.rows is None else _joined(found)
        return self._limits[precision]

    def _bounds(self, answer: Answer, precision: Precision) -> dict[str, Float]:
        case = self.case
        if not case.parts:
            return bounds.bounds(answer, precision)
        keys, at = ranges(case), np.arange(case.seq_k)[None]
        of_parts = [(at >= part.start) & (at < part.stop) for part in keys]
        return parts.limits(answer, self._data, precision, of_parts, [np.ones((1, case.seq_q), np.bool_)])

    def row_errors(self, precision: Precision) -> dict[str, Any]:
        """``bounds.row_errors`` of every row (B, Hq, Lq); where rows are sampled, the largest of them for all.

        Rows that see no key tell nothing of those that do: inf where no other was sampled.
        """
        if precision not in self._row_errors:
            self._row_errors[precision] = self._errors_of_rows(precision)
        return self._row_errors[precision]

    def _errors_of_rows(self, precision: Precision) -> dict[str, Any]:
        found = [bounds.row_errors(answer, precision) for answer in self.answers]
        if self.rows is None:
            return found[0]
        if not any((answer.lse > -np.inf).any() for answer in self.answers):
            return dict.fromkeys(found[0], np.inf)
        return {name: max(float(part[name].max(initial=0.0)) for part in found) for name in found[0]}

    def part(self, result: Any, name: str = "out") -> Any:
        """The elements of a result (B, H, L, ...), one like ``values[name]``, that are known."""
        if self.rows is None:
            return result
        if name not in self._where:
            return result[self.rows]
        return result.reshape((1,) * (4 - result.ndim) + result.shape)[self._where[name]]  # a mask has its own rank

    def place(self, index: tuple[int, ...], name: str = "out") -> tuple[int, ...]:
        """Where an element of ``values[name]`` stands in the whole result."""
        if self.rows is None:
            return index
        if name not in self._where:
            return (*(int(axis[index[0]]) for axis in self.rows), *index[1:])
        b, head = self._where[name]
        return (b, head.start + index[0], *index[1:]) if isinstance(head, slice) else (b, head, *index)


#: A batch entry, some query heads of one key head, and rows of each.
_Place = tuple[int, slice, Any]


def _kept(case: Case) -> Any:
    """The dropout mask of a seeded case."""
    if not case.dropout:
        return None
    b, h, lq, lk = case.scores
    batch, head, row = np.ogrid[:b, :h, :lq]
    return keep_mask(case.dropout_seed or 0, case.dropout, batch, head, row, 0, lk)


def _places(case: Case) -> list[_Place]:
    """Sampled rows of some heads; then, if it is small enough, one key head."""
    found = _sampled(case)
    if case.group * case.seq_q * case.seq_k <= HEAD_SCORES:
        word = int(hashed(np, case.data_seed, 10, 1)[0]) & (2**62 - 1)
        first = (word >> 8) % case.heads_kv * case.group
        found.append((word % case.batch, slice(first, first + case.group), np.arange(case.seq_q)))
    return found


def _sampled(case: Case) -> list[_Place]:
    """Batch entries and heads to look at, first and last among them, with the rows of each: ends, tile edges, any."""
    words = hashed(np, case.data_seed, 9, _HEADS * (_RANDOM_ROWS + 2)) & (2**62 - 1)
    heads = [(0, 0), (case.batch - 1, case.heads_q - 1)]
    heads += [(int(words[-1 - n]) % case.batch, int(words[-1 - n] >> 8) % case.heads_q) for n in range(_HEADS - 2)]
    found = []
    for n, (b, h) in enumerate(dict.fromkeys(heads)):
        some = {0, case.seq_q - 1, *(int(w) % case.seq_q for w in words[n * _RANDOM_ROWS : (n + 1) * _RANDOM_ROWS])}
        edge = int(words[n]) % max(case.seq_q // 64, 1) * 64
        some |= {i for i in (edge - 1, edge, 63, 64, 127, 128) if 0 <= i < case.seq_q}
        found.append((b, slice(h, h + 1), np.array(sorted(some))))
    return found


def _rows(places: list[_Place]) -> tuple[Any, Any, Any]:
    """Index arrays of all rows, those of one head after those of another."""
    grids = [np.meshgrid(b, np.arange(heads.start, heads.stop), i, indexing="ij") for b, heads, i in places]
    b, h, i = (np.concatenate([grid[axis].ravel() for grid in grids]) for axis in range(3))
    return b, h, i


def _answer(case: Case, data: dict[str, Any], keep: Any, place: _Place) -> Answer:
    """The answer to some rows of some query heads; all rows of all that share a key head have its gradients."""
    b, heads, i = place
    g, count = heads.start // case.group, heads.stop - heads.start
    few = {role: data[role][b : b + 1, heads][:, :, i] for role in ("query", "grad_out", "grad_lse")}
    few |= {role: data[role][b : b + 1, g : g + 1] for role in ("key", "value")}
    if case.alibi:
        slopes = data["alibi_slopes"]
        few["alibi_slopes"] = slopes[b if len(slopes) > 1 else 0][None, heads]
    mask = data.get("attn_mask")
    every = range(heads.start, heads.stop)
    visible = np.concatenate([oracle.visible_positions(case, mask, (b, h, i)) for h in every], axis=1)
    if mask is not None:
        few["attn_mask"] = np.concatenate(
            [oracle.mask_rows(mask, b, h, i) for h in (every if mask.shape[1] > 1 else every[:1])], axis=1
        )
    if keep is not None:
        keep = keep[b : b + 1, heads][:, :, i]
    elif case.dropout:
        of_head = np.arange(heads.start, heads.stop)[None, :, None]
        keep = keep_mask(case.dropout_seed or 0, case.dropout, np.array(b), of_head, i[None, None, :], 0, case.seq_k)
    whole = len(i) == case.seq_q and count == case.group
    alone = mask is not None and mask.shape[:2] == (case.batch, case.heads_q)
    kind = case.mask if whole and alone else None
    part = case.replace(
        **{"batch": 1, "heads_kv": 1, "group": count, "seq_q": len(i), "mask": kind},
        **{"lengths": None, "query_lengths": None, "page": 0, "splits": 0, "tree": "", "latent": False},
    )
    scores = oracle.sink_scores(case, data)[b : b + 1, heads][:, :, i]
    found = oracle.answer(part, few, keep, visible, oracle.distances(case, (b, heads.start, i)), scores)
    for of_all in (found.values, found.poisoned):
        of_all.pop("sinks", None)  # a sum over all rows of all batch entries
    for name in ("attn_mask",) if whole else ("key", "value", "attn_mask"):  # sums over rows that are not here
        if not (whole and alone):
            found.values.pop(name, None)
            found.poisoned.pop(name, None)
    return found


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Arrays (1, heads, rows, ...) of several places as one with a single axis for the rows, and what one alone has."""
    names = [name for name in _OF_ROWS if name in parts[0]]
    flat = ([part[name].reshape(-1, *part[name].shape[3:]) for part in parts] for name in names)
    joined = {name: np.concatenate(each) for name, each in zip(names, flat, strict=True)}
    for name in parts[-1].keys() - {*names}:
        array = parts[-1][name][0]
        joined[name] = array if name == "attn_mask" else array[0]
    return joined
