"""What is hidden has no effect: positions no query may see, other batch entries, heads. And hiding has one meaning.

A hidden position takes part with a weight of exactly 0, so that whatever stands there, the bits stay the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import identical
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case, MaskRecipe
from attnswitch.verify.drawing.data import LARGEST, hashed, normal, rounded
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial, plainly_placed

__all__ = ["CHECKS"]

_WRITTEN_OUT = 2**25


def _hides(case: Case) -> bool:
    return case.hides and not case.poison and not case.unseeded and 0 < math.prod(case.scores) <= _WRITTEN_OUT


def _hidden_from_one(subject: Subject) -> tuple[Any, Any]:
    """Keys hidden from one row of each head (B, Hkv, Lk), and the rows that see none of them (B, Hq, Lq)."""
    case = subject.case
    visible = subject.visible
    word = int(hashed(np, case.data_seed, 16, 1)[0]) & (2**62 - 1)
    row = word % case.seq_q
    grouped = visible.reshape(case.batch, case.heads_kv, case.group, case.seq_q, case.seq_k)
    hidden = ~grouped[:, :, :, row].any(2)
    sees = (visible & np.repeat(hidden, case.group, axis=1)[:, :, None]).any(-1)
    if not hidden.any():
        raise NotApplicable("no key is hidden from the row")
    return hidden, ~sees


def _quiet(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """No upstream gradient for the rows that see a key that will change."""
    _, rows = _hidden_from_one(subject)
    changes = {
        "grad_out": np.where(rows[..., None], subject.data["grad_out"], 0.0),
        "grad_lse": np.where(rows, subject.data["grad_lse"], 0.0),
    }
    case, data = subject.with_data(**changes)
    return plainly_placed(case, {"query", "key", "value"}), data


def _changed(subject: Subject, nonfinite: bool) -> tuple[Case, dict[str, Any]]:
    """Other numbers, large ones, where hidden; or NaN, inf and the largest there are."""
    quiet = subject.derive("quiet", lambda: _quiet(subject))
    case, hidden = quiet.case, _hidden_from_one(subject)[0][..., None]
    changes: dict[str, Any] = {}
    for role, stream in (("key", 17), ("value", 18)):
        old = quiet.data[role]
        new = rounded(16.0 * normal(np, case.data_seed, stream, old.shape), case.dtype)
        if nonfinite:
            most = np.copysign(LARGEST[case.dtype], new)
            new = np.where(abs(new) < 8.0, most, np.where(new > 0, np.nan, np.inf if role == "value" else np.nan))
        changes[role] = np.where(hidden, new, old)
    if nonfinite:  # rows that see it are NaN anyway, and so may their queries be
        changes["query"] = np.where(_hidden_from_one(subject)[1][..., None], quiet.data["query"], np.nan)
    return case.replace(poison=nonfinite), {**quiet.data, **changes}


def _compare_hidden(trial: Trial, check: str, nonfinite: bool) -> Failure | None:
    subject = trial.subject
    hidden, rows = _hidden_from_one(subject)
    changed = subject.derive(f"{check} changed", lambda: _changed(subject, nonfinite))
    got = trial.run(changed)
    base = trial.run(subject.derive("quiet", lambda: _quiet(subject)))
    bitwise = trial.repeats
    what = "NaN, inf and the largest numbers" if nonfinite else "other numbers"
    message = f"{what} at positions that it may not see change it"
    found = []
    for name, result in got.items():
        if name in ("out", "lse", "grad query"):
            keep = rows if name == "lse" else rows[..., None]
        elif name in ("grad attn_mask", "grad sinks"):
            continue  # its sums run over rows that see the change
        else:  # a row that sees NaN has weights of NaN for every key, whatever its upstream gradient
            keep = ~_seen_by_some(subject, ~rows)[..., None] if nonfinite else np.ones((*hidden.shape, 1), np.bool_)
        mine, other = (np.where(keep, x, 0.0) for x in (result, base[name]))
        exact = not nonfinite and (bitwise or name in ("out", "lse"))  # a kernel may go another way to keep NaN out
        if exact:
            found.append(identical(check, name, mine, other, message))
        else:
            found.append(within(trial, check, {name: mine}, {name: other}, message))
    for name in ("grad key", "grad value"):
        if name in got:
            gone = np.where(hidden[..., None], got[name], 0.0)
            unseen = ~_seen_by_some(subject)[..., None]
            gone = np.where(unseen, gone, 0.0)
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
    return _compare_hidden(trial, "causality", nonfinite=False)


def _leak(trial: Trial) -> Failure | None:
    return _compare_hidden(trial, "leak", nonfinite=True)


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
    got, results = trial.run(perturbed), trial.results
    if perturbed.case != trial.case:  # it lies otherwise in memory, which may change bits
        results = trial.run(trial.subject.derive("plainly", lambda: (perturbed.case, trial.data)))
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
