"""What is hidden has no effect: positions no query may see, other batch entries, heads. And hiding has one meaning.

A hidden position takes part with a weight of exactly 0, so that whatever stands there, the bits stay the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import identical
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case, MaskRecipe
from attnswitch.verify.drawing.data import LARGEST
from attnswitch.verify.drawing.generator import hashed, normal, rounded
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial, plainly_placed

__all__ = ["CHECKS"]

_WRITTEN_OUT = 2**25


def _hides(case: Case) -> bool:
    return case.hides and not case.poison and not case.unseeded and 0 < math.prod(case.scores) <= _WRITTEN_OUT


@dataclass(frozen=True)
class _Change:
    """Which keys or queries become other numbers, and what stands nevertheless.

    ``keys`` (B, Hkv, Lk) and ``queries`` (B, Hq, Lq) change; ``rows`` (B, Hq, Lq) see none of it, and the gradients of
    ``columns`` (B, Hkv, Lk) stand.
    """

    keys: Any
    queries: Any
    rows: Any
    columns: Any


def _row(subject: Subject) -> int:
    word = int(hashed(np, subject.case.data_seed, 16, 1)[0]) & (2**62 - 1)
    return word % subject.case.seq_q


def _of_keys(subject: Subject, nonfinite: bool) -> _Change:
    """Keys hidden from one row of each head change."""
    case = subject.case
    visible = subject.visible
    grouped = visible.reshape(case.batch, case.heads_kv, case.group, case.seq_q, case.seq_k)
    hidden = ~grouped[:, :, :, _row(subject)].any(2)
    if not hidden.any():
        raise NotApplicable("no key is hidden from the row")
    sees = (visible & np.repeat(hidden, case.group, axis=1)[:, :, None]).any(-1)
    # a row that sees NaN has weights of NaN for every key, whatever its upstream gradient
    columns = ~_seen_by_some(subject, sees) if nonfinite else np.ones(hidden.shape, np.bool_)
    return _Change(hidden, np.zeros(sees.shape, np.bool_), ~sees, columns)


def _of_queries(subject: Subject) -> _Change:
    """One row of each head changes."""
    case = subject.case
    rows = np.ones((case.batch, case.heads_q, case.seq_q), np.bool_)
    rows[:, :, _row(subject)] = False
    keys = np.zeros((case.batch, case.heads_kv, case.seq_k), np.bool_)
    return _Change(keys, ~rows, rows, ~_seen_by_some(subject, ~rows))


def _quiet(subject: Subject, change: _Change) -> tuple[Case, dict[str, Any]]:
    """No upstream gradient for the rows that see what will change."""
    changes = {
        "grad_out": np.where(change.rows[..., None], subject.data["grad_out"], 0.0),
        "grad_lse": np.where(change.rows, subject.data["grad_lse"], 0.0),
    }
    case, data = subject.with_data(**changes)
    return plainly_placed(case, {"query", "key", "value"}), data


def _changed(quiet: Subject, change: _Change, nonfinite: bool) -> tuple[Case, dict[str, Any]]:
    """Other numbers, large ones, where they change; or NaN, inf and the largest there are."""
    case = quiet.case
    changes: dict[str, Any] = {}
    for role, stream, where in (("key", 17, change.keys), ("value", 18, change.keys), ("query", 19, change.queries)):
        if not where.any():
            continue
        old = quiet.data[role]
        new = rounded(16.0 * normal(np, case.data_seed, stream, old.shape), case.dtype)
        if nonfinite:
            most = np.copysign(LARGEST[case.dtype], new)
            new = np.where(abs(new) < 8.0, most, np.where(new > 0, np.nan, np.inf if role == "value" else np.nan))
        changes[role] = np.where(where[..., None], new, old)
    return case.replace(poison=nonfinite), {**quiet.data, **changes}


def _stands(trial: Trial, check: str, change: _Change, side: str, nonfinite: bool) -> Failure | None:
    subject = trial.subject
    quiet = subject.derive(f"{side} quiet", lambda: _quiet(subject, change))
    changed = subject.derive(f"{check} {side} changed", lambda: _changed(quiet, change, nonfinite))
    bitwise = not nonfinite and trial.repeats
    got, base = (trial.run(trial.repeatable(one) if bitwise else one) for one in (changed, quiet))
    what = "NaN, inf and the largest numbers" if nonfinite else "other numbers"
    message = f"{what} in {side} that it may not see change it"
    found = []
    for name, result in got.items():
        if name in ("grad attn_mask", "grad sinks"):
            continue  # its sums run over rows that see the change
        keep = change.rows if name in ("out", "lse", "grad query") else change.columns
        mine, other = (np.where(keep if name == "lse" else keep[..., None], x, 0.0) for x in (result, base[name]))
        if bitwise or (not nonfinite and name in ("out", "lse")):  # a kernel may go another way to keep NaN out
            found.append(identical(check, name, mine, other, message))
        else:
            found.append(within(trial, check, {name: mine}, {name: other}, message))
    unseen = ~_seen_by_some(subject)[..., None]
    for name in ("grad key", "grad value"):
        if name in got:
            gone = np.where(unseen, got[name], 0.0)
            found.append(
                identical(check, name, gone, np.zeros_like(gone), "it is not 0 at a position that none may see")
            )
    return first_of(*found)


def _seen_by_some(subject: Subject, rows: Any = True) -> Any:
    """Which keys are seen by any of ``rows`` (B, Hq, Lq), all by default: (B, Hkv, Lk)."""
    case = subject.case
    visible = subject.visible
    if rows is not True:
        visible = visible & rows[..., None]
    return visible.reshape(case.batch, case.heads_kv, -1, case.seq_k).any(2)


def _causality(trial: Trial) -> Failure | None:
    return _stands(trial, "causality", _of_keys(trial.subject, nonfinite=False), "keys", nonfinite=False)


def _leak(trial: Trial) -> Failure | None:
    keys = _stands(trial, "leak", _of_keys(trial.subject, nonfinite=True), "keys", nonfinite=True)
    return keys or _stands(trial, "leak", _of_queries(trial.subject), "queries", nonfinite=True)


# -- batch entries and heads -------------------------------------------------------------------------------------------


def _several(case: Case) -> bool:
    return case.batch * case.heads_kv > 1 and case.work > 0 and not case.poison and not case.unseeded


def _perturbed(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """One batch entry and key head with other, larger numbers."""
    b, g = _victim(subject.case)
    changes = {}
    for role in ("query", "key", "value"):
        changes[role] = subject.data[role].copy()
        heads = slice(g * subject.case.group, (g + 1) * subject.case.group) if role == "query" else slice(g, g + 1)
        changes[role][b, heads] = rounded(-2.0 * changes[role][b, heads][..., ::-1] + 1.0, subject.case.dtype)
    return subject.with_data(**changes)


def _victim(case: Case) -> tuple[int, int]:
    return case.data_seed % case.batch, case.data_seed // 7 % case.heads_kv


def _independence(trial: Trial) -> Failure | None:
    perturbed = trial.subject.derive("perturbed", lambda: _perturbed(trial.subject))
    got, results = trial.run(trial.repeatable(perturbed)), trial.repeatable_results
    if perturbed.case != trial.case:  # it lies otherwise in memory, which may change bits
        plainly = trial.subject.derive("plainly", lambda: (perturbed.case, trial.data))
        results = trial.run(trial.repeatable(plainly))
    b, g = _victim(trial.case)
    bitwise = trial.repeats
    found = []
    for name, base in results.items():
        if name in ("grad attn_mask", "grad sinks"):
            continue  # a mask may be shared by the heads, and sinks are by the batch
        if not bitwise and name not in ("out", "lse"):
            continue
        group = trial.case.group if name in ("out", "lse", "grad query") else 1
        mine, other = got[name].copy(), base.copy()
        mine[b, g * group : (g + 1) * group] = other[b, g * group : (g + 1) * group] = 0.0
        message = "it changes with another batch entry or head"
        found.append(identical("independence", name, mine, other, message))
    return first_of(*found)


# -- one meaning in many forms -----------------------------------------------------------------------------------------


def _written(case: Case) -> bool:
    smooth = case.mask is not None and case.mask.dtype != "bool"
    plain = not smooth and not case.poison and not case.unseeded
    return case.hides and plain and not case.alibi and 0 < math.prod(case.scores) <= 2**22


def _as_mask(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """Causal, window, lengths and mask as one mask: bool, or float with 0 and -inf."""
    case = subject.case
    visible = subject.visible
    as_float = case.data_seed % 2 == 1
    recipe = MaskRecipe(case.dtype if as_float else "bool", "bhqk", 4, "random")
    mask = np.where(visible, 0.0, -np.inf) if as_float else np.array(visible)
    plain = case.replace(causal=False, window=None, alignment="top_left", lengths=None, mask=recipe)
    return plain.replace(grads=case.grads.replace("m", "")), {**subject.data, "attn_mask": mask}


def _mask_forms(trial: Trial) -> Failure | None:
    got = trial.run(trial.subject.derive("as mask", lambda: _as_mask(trial.subject)))
    return within(trial, "mask-forms", got, trial.results, "the same positions hidden by an explicit mask give another")


CHECKS = (
    Check(
        "causality",
        "numbers at positions that a row may not see have no effect on it, to the bit, gradients included",
        "Bitwise: a hidden key that reaches a row by less than its error bound passes every comparison with an answer.",
        _hides,
        _causality,
    ),
    Check("leak", "NaN and inf at positions that a row may not see do not reach it", "", _hides, _leak),
    Check(
        "independence",
        "a batch entry and head depends on no other, to the bit",
        "Bitwise: statistics shared by several rows cancel in exact arithmetic, and no bound can see them.",
        _several,
        _independence,
    ),
    Check(
        "mask-forms",
        "causal, window, key_lengths and a mask mean the same as one explicit mask",
        "It needs no reference: the two ways through a kernel are held against each other.",
        _written,
        _mask_forms,
    ),
)
