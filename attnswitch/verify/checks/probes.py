"""Probes: operands made so that the right answer is known to the last bit, and one wrong key changes it.

Random data hide a dropped key among a thousand others; a query that selects exactly one key does not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import elements, identical
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.generator import hashed, rounded
from attnswitch.verify.launch.call import expected as returned
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial

__all__ = ["CHECKS"]

#: Logits this far below the maximum leave a weight of exactly 0, in float32 and below, and in float64.
_NATS = {"float16": 128.0, "bfloat16": 128.0, "float32": 128.0, "float64": 800.0}
#: Visibility is written out for cases up to this many scores; beyond, only what a formula gives.
_WRITTEN_OUT = 2**25
_BASE = 128


def _plain(case: Case) -> bool:
    """Nothing but bool masks changes the scores, and nothing is drawn."""
    drawn = case.dropout or case.poison or case.sinks or case.alibi
    return not drawn and (case.mask is None or case.mask.dtype == "bool") and case.work > 0


# -- one-hot -----------------------------------------------------------------------------------------------------------


def _one_hot_applies(case: Case) -> bool:
    if not _plain(case) or (case.scale is not None and case.scale <= 2.0**-10) or case.dim_qk < 2:
        return False
    hiding = case.mask is not None
    return not case.softcap and not (hiding and math.prod(case.scores) > _WRITTEN_OUT)


def _targets(subject: Subject) -> Any:
    """The key that each query selects (B, Hq, Lq), -1 for rows that see none.

    Rows walk backwards through their visible keys from the last, so that as many keys as there are rows are selected.
    """
    case = subject.case
    b, h, lq, lk = case.scores
    rows = np.arange(b * h * lq, dtype=np.int64).reshape(b, h, lq) + case.data_seed % max(lk, 1)
    steps = max(1, lk // max(1, b * h * lq))
    while math.gcd(steps, lk) > 1:  # else the walk would come back before it has been everywhere
        steps += 1
    if case.mask is None:
        first, last = _span(case)
        count = np.maximum(last - first + 1, 0)
        walk = (rows * steps) % np.maximum(count, 1)
        return np.where(count > 0, last - walk, -1) + np.zeros((b, h, lq), np.int64)
    visible = subject.visible
    count = visible.sum(-1)
    walk = count - 1 - (rows * steps) % np.maximum(count, 1)
    ranks = np.cumsum(visible, axis=-1) - 1
    chosen = ((ranks == walk[..., None]) & visible).argmax(-1)
    return np.where(count > 0, chosen, -1)


def _span(case: Case) -> tuple[Any, Any]:
    """First and last key that each row sees, (B, 1, Lq), where there is no mask."""
    lengths = np.array(case.lengths or (case.seq_k,) * case.batch, dtype=np.int64).reshape(-1, 1, 1)
    place = np.arange(case.seq_q)[None, None, :] + (lengths - case.seq_q if case.alignment == "bottom_right" else 0)
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    first = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    last = lengths - 1 + 0 * place if right is None else np.minimum(lengths - 1, place + right)
    return first, last


def _one_hot_subject(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """Key j carries the bits of its code, each as a pair that a query with the same bit meets with 0.

    So the target's logit is a sum of zeros, exactly 0 in any order of summation, and every other one is far below.
    Codes repeat where the head dimension has no room for all bits; keys of one code then share one value.
    """
    case = subject.case
    bits = min(max(1, (case.seq_k - 1).bit_length()), case.dim_qk // 2)
    code = np.arange(case.seq_k, dtype=np.int64) % 2**bits
    target = np.maximum(_targets(subject), 0) % 2**bits
    gain = 2.0 ** math.ceil(math.log2(_NATS[case.dtype] / case.softmax_scale))
    key = np.zeros((case.batch, case.heads_kv, case.seq_k, case.dim_qk))
    query = np.zeros((*case.scores[:3], case.dim_qk))
    for bit in range(bits):
        one, wanted = (code >> bit & 1).astype(np.float64), (target >> bit & 1).astype(np.float64)
        key[..., 2 * bit], key[..., 2 * bit + 1] = -one, one - 1.0
        query[..., 2 * bit], query[..., 2 * bit + 1] = gain * (1.0 - wanted), gain * wanted
    value = np.zeros((case.batch, case.heads_kv, case.seq_k, case.dim_v)) + _digits(code, case.dim_v)
    small = hashed(np, case.data_seed, 11, math.prod(case.scores[:3]) * case.dim_v) & 3
    grad_out = (small.astype(np.float64) - 1.0).reshape(*case.scores[:3], case.dim_v)
    zero = np.zeros(case.scores[:3])
    plain, changed = subject.with_data(query=query, key=key, value=value, grad_out=grad_out, grad_lse=zero)
    return plain.replace(lse=False), changed


def _digits(number: Any, columns: int) -> Any:
    """A number's digits in base 128, repeated over the columns: exact in every float type."""
    return np.stack([(number // _BASE ** (column % 3) % _BASE).astype(np.float64) for column in range(columns)], -1)


def _one_hot(trial: Trial) -> Failure | None:
    case = trial.case
    if _NATS[case.dtype] / case.softmax_scale > 2.0**14:
        raise NotApplicable("the scale is too small for a one-hot row")
    probe = trial.subject.derive("one-hot", lambda: _one_hot_subject(trial.subject))
    got = trial.run(probe)
    target = _targets(trial.subject)
    bits = min(max(1, (case.seq_k - 1).bit_length()), case.dim_qk // 2)
    whole = 2**bits >= case.seq_k
    if not whole:  # several keys share each row's weight, which a kernel may round
        off, _ = elements(probe.exact, got, trial.limits(probe))
        return off and Failure("one-hot", off.message, off.result, off.index, off.got, off.expected, off.bound)
    expected = np.where(target[..., None] >= 0, _digits(target % 2**bits, case.dim_v), 0.0)
    wrong = identical("one-hot", "out", got["out"], expected, "")
    if wrong is not None and wrong.index is not None:
        row = wrong.index[:3]
        return _named(wrong, int(target[row]), got["out"][row])
    found = []
    for name in ("grad query", "grad key"):
        if name in got:
            found.append(identical("one-hot", name, got[name], np.zeros_like(got[name]), "it should be exactly 0"))
    if "grad value" in got:
        expected = _value_gradient(case, target, probe.data["grad_out"])
        exact = np.abs(expected) <= 2 * _BASE  # sums that every type holds
        message = "it is not the sum of the rows that select the key"
        found.append(identical("one-hot", "grad value", got["grad value"][exact], expected[exact], message))
    return first_of(*found)


def _named(wrong: Failure, target: int, row: Any) -> Failure:
    """The failure with the key that the row shows, where its digits say one."""
    digits = [*row[:3]]
    readable = len(digits) == 3 and all(np.isfinite(d) and d == int(d) and 0 <= d < _BASE for d in digits)
    found = f"key {int(sum(d * _BASE**n for n, d in enumerate(digits)))}" if readable else "a mixture of keys"
    asked = f"key {target}" if target >= 0 else "none, it sees no key"
    message = f"the query selects {asked} and the output shows {found}{wrong.message}"
    return Failure(wrong.check, message, wrong.result, wrong.index, wrong.got, wrong.expected, 0.0)


def _value_gradient(case: Case, target: Any, grad_out: Any) -> Any:
    """dV: the upstream gradients of the rows that select a key, summed."""
    total = np.zeros((case.batch, case.heads_kv, case.seq_k, case.dim_v))
    b, h, i = np.nonzero(target >= 0)
    np.add.at(total, (b, h // case.group, target[b, h, i]), grad_out[b, h, i])
    return total


# -- uniform -----------------------------------------------------------------------------------------------------------


def _uniform_applies(case: Case) -> bool:
    return _plain(case) and math.prod(case.scores) <= _WRITTEN_OUT and case.work <= 2**25


def _uniform_subject(subject: Subject) -> tuple[Case, dict[str, Any]]:
    case = subject.case
    word = hashed(np, case.data_seed, 12, subject.data["value"].size) & 3
    value = np.minimum(word.astype(np.float64) - 1.0, 1.0).reshape(subject.data["value"].shape)
    plain, changed = subject.with_data(query=np.zeros_like(subject.data["query"]), value=value)
    return plain.replace(lse=False, grads=""), changed


def _uniform(trial: Trial) -> Failure | None:
    """A query of 0 averages what it sees: exact where it sees 2**n keys, since no step rounds but the last."""
    case = trial.case
    probe = trial.subject.derive("uniform", lambda: _uniform_subject(trial.subject))
    visible = trial.subject.visible
    count = visible.sum(-1)
    rows = (count > 0) & (count & (count - 1) == 0)
    if not rows.any():
        raise NotApplicable("no row sees a power of two of keys")
    got = trial.run(probe)["out"]
    value = np.repeat(probe.data["value"], case.group, axis=1)
    mean = rounded((visible.astype(np.float64) @ value) / np.maximum(count, 1)[..., None], case.dtype)
    message = "the mean of the values that a query of 0 sees is not exact"
    return identical(
        "uniform", "out", np.where(rows[..., None], got, 0.0), np.where(rows[..., None], mean, 0.0), message
    )


# -- powers of two -----------------------------------------------------------------------------------------------------


def _powers_apply(case: Case) -> bool:
    finite = case.data not in ("large", "negative", "activations") and not case.poison
    return finite and not case.unseeded and case.work > 0


def _powers(trial: Trial) -> Failure | None:
    """(V * 4) gives (O * 4), and (Q * 4, scale / 4) the same O, to the bit: a power of two never rounds."""
    case, subject = trial.case, trial.subject
    changes = {
        "value": lambda: (case, {**subject.data, "value": subject.data["value"] * 4.0}),
        "query": lambda: (
            case.replace(scale=case.softmax_scale / 4.0),
            {**subject.data, "query": subject.data["query"] * 4.0},
        ),
    }
    role = "value" if case.data_seed % 2 else "query"
    got = trial.run(trial.repeatable(subject.derive(f"powers of {role}", changes[role])))
    factors = (
        {"out": 4.0, "grad query": 4.0, "grad key": 4.0, "grad attn_mask": 4.0, "grad sinks": 4.0}
        if role == "value"
        else {"grad query": 0.25}
    )
    results = trial.repeatable_results
    if not trial.repeats:
        results = {name: result for name, result in results.items() if name in ("out", "lse")}
    # The upstream gradient of lse does not grow with V; in float16, gradients of scores may be subnormal on the way.
    if role == "value" and (case.lse or case.dtype == "float16"):
        results = {name: results[name] for name in ("out", "lse", "grad value") if name in results}
    found = []
    for name, base in results.items():
        factor, types = factors.get(name, 1.0), {case.dtype, returned(case)[name][1]}
        lowest, highest = max(_LOWEST[type_] for type_ in types), min(_HIGHEST[type_] for type_ in types)
        normal = (np.abs(base) > lowest) & (np.abs(base) < highest)
        message = f"{role} times 4 does not change it by exactly {factor:g}"
        found.append(identical("powers-of-two", name, got[name][normal], base[normal] * factor, message))
    return first_of(*found)


#: Results below or above these may have lost bits to subnormals or overflow on the way.
_LOWEST = {"float16": 2.0**-4, "bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-500}
_HIGHEST = {"float16": 2.0**14, "bfloat16": 2.0**100, "float32": 2.0**100, "float64": 2.0**900}


CHECKS = (
    Check(
        "one-hot",
        "a query that selects one key returns its value to the bit, and its gradients are exact",
        "One key more or less among thousands is within the error bound of random data; here it is another digit.",
        _one_hot_applies,
        _one_hot,
        alone=True,
    ),
    Check(
        "uniform",
        "a query of 0 returns the mean of the values it sees, to the bit",
        "The one probe of sums over many keys at once whose answer has no error: no bound can be too wide for it.",
        _uniform_applies,
        _uniform,
        alone=True,
    ),
    Check(
        "powers-of-two",
        "a power of two in V or Q goes through the whole computation without rounding",
        "Bitwise, so that it sees what no error bound can: an operand rounded, clipped or scaled on the way.",
        _powers_apply,
        _powers,
    ),
)
