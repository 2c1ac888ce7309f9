"""A problem put together from its parts: key ranges merged by lse, a prefix, the last row alone, heads written out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from attnswitch.verify.checks.check import Check
from attnswitch.verify.checks.compare import alike, identical
from attnswitch.verify.checks.symmetry import within
from attnswitch.verify.drawing.case import Case, MaskRecipe
from attnswitch.verify.outcome import Failure, first_of
from attnswitch.verify.trial import NotApplicable, Subject, Trial, plainly_placed
from attnswitch.verify.truth.oracle import distances

__all__ = ["CHECKS"]


def _plain(case: Case) -> bool:
    return not case.dropout and not case.poison and case.work > 0


# -- keys in two parts, merged by lse ----------------------------------------------------------------------------------


def _splits(case: Case) -> bool:
    written_out = not case.hides or math.prod(case.scores) <= 2**22
    float_mask = case.mask is not None and case.mask.dtype != "bool"
    return _plain(case) and written_out and not float_mask and not case.alibi


def _cut(case: Case) -> int:
    """Where to split: anywhere, both ends included."""
    return case.data_seed % (case.seq_k + 1)


def _part(subject: Subject, keys: slice, first: bool) -> tuple[Case, dict[str, Any]]:
    """The keys of one part alone, with everything that hides as an explicit mask. The sinks are in the first."""
    case = subject.case
    if not first:
        case = case.replace(sinks="")
    changes = {role: subject.data[role][:, :, keys] for role in ("key", "value")}
    plain = case.replace(
        seq_k=keys.stop - keys.start, causal=False, window=None, alignment="top_left", lengths=None, grads="", lse=True
    )
    plain = plainly_placed(plain, {"key", "value"})
    if case.hides:
        changes["attn_mask"] = np.array(subject.visible[..., keys])
        plain = plain.replace(mask=MaskRecipe("bool", "bhqk", 4, "random"))
    return plain, {**subject.data, **changes}


def _split(trial: Trial) -> Failure | None:
    case, subject = trial.case, trial.subject
    cut = _cut(case)
    parts = [
        subject.derive(f"part {n}", partial(_part, subject, keys, n == 0))
        for n, keys in enumerate((slice(0, cut), slice(cut, case.seq_k)))
    ]
    exact = subject.exact
    got = [trial.run(part) for part in parts]
    limits = [_limits_at(trial, part) for part in parts]
    outs, lses = ([exact.part(g[name]) for g in got] for name in ("out", "lse"))
    with np.errstate(all="ignore"):
        top = np.maximum(*lses)
        top = np.where(np.isfinite(top), top, 0.0)
        weights = [np.exp(lse - top) for lse in lses]
        total = weights[0] + weights[1]
        shares = [(w / np.where(total > 0, total, 1.0))[..., None] for w in weights]
        merged = shares[0] * outs[0] + shares[1] * outs[1]
        lse = np.where(total > 0, top + np.log(np.where(total > 0, total, 1.0)), -np.inf)
        moved = np.minimum(shares[0], shares[1]) * np.abs(outs[0] - outs[1])
        drift = sum(np.expm1(np.minimum(limit["lse"], 50.0)) for limit in limits)[..., None]
        reach = sum(share * limit["out"] for share, limit in zip(shares, limits, strict=True))
        bound = trial.limits()["out"] + reach + moved * drift
    message = f"keys up to {cut} and from there on, merged by their lse, give another"
    found = alike("split", "out", exact.part(trial.results["out"]), merged, bound, message)
    if found is None and "lse" in trial.results:
        limit = trial.limits()["lse"] + limits[0]["lse"] + limits[1]["lse"]
        found = alike("split", "lse", exact.part(trial.results["lse"]), lse, limit, message)
    return found


def _limits_at(trial: Trial, part: Subject) -> dict[str, Any]:
    """Error bounds of a part, for the rows that the whole is known at."""
    limits, rows = trial.limits(part), trial.subject.exact.rows
    if rows is None:
        return limits
    if part.exact.rows is None:
        return {name: limits[name][rows] for name in ("out", "lse")}
    # The rows that are sampled depend on the queries alone; a part may have a whole key head after them.
    return {name: limits[name][: len(rows[0])] for name in ("out", "lse")}


# -- a prefix, and the last row ----------------------------------------------------------------------------------------


def _prefixed(case: Case) -> bool:
    return _plain(case) and case.causal and case.alignment == "top_left" and case.mask is None and case.seq_q > 1


def _prefix(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """The first rows, with the keys that they may see."""
    case = subject.case
    n = _prefix_rows(case)
    keys = min(case.seq_k, n)
    changes = {role: subject.data[role][:, :, :n] for role in ("query", "grad_out", "grad_lse")}
    changes |= {role: subject.data[role][:, :, :keys] for role in ("key", "value")}
    lengths = None if case.lengths is None else tuple(min(length, keys) for length in case.lengths)
    return case.replace(seq_q=n, seq_k=keys, lengths=lengths, grads=""), {**subject.data, **changes}


def _prefix_rows(case: Case) -> int:
    return 1 + case.data_seed % (case.seq_q - 1)


def _prefix_consistency(trial: Trial) -> Failure | None:
    shorter = trial.subject.derive("prefix", lambda: _prefix(trial.subject))
    got, n = trial.run(shorter), _prefix_rows(trial.case)
    message = f"the first {n} rows of a causal problem differ from the same rows alone"
    whole = {name: trial.results[name][:, :, :n] for name in got if name in trial.results}
    return _against(trial, shorter, "prefix", got, whole, message)


def _decodes(case: Case) -> bool:
    aligned = not (case.causal or case.window is not None or case.alibi) or case.alignment == "bottom_right"
    rows = case.mask is not None and "q" in case.mask.axes
    return _plain(case) and aligned and not rows and case.seq_q > 1


def _last_row(subject: Subject) -> tuple[Case, dict[str, Any]]:
    changes = {role: subject.data[role][:, :, -1:] for role in ("query", "grad_out", "grad_lse")}
    return subject.case.replace(seq_q=1, grads=""), {**subject.data, **changes}


def _decode(trial: Trial) -> Failure | None:
    step = trial.subject.derive("last row", lambda: _last_row(trial.subject))
    got = trial.run(step)
    whole = {name: trial.results[name][:, :, -1:] for name in got if name in trial.results}
    return _against(trial, step, "decode", got, whole, "the last row differs from the same row alone, a decoding step")


def _against(
    trial: Trial, part: Subject, check: str, got: dict[str, Any], whole: dict[str, Any], message: str
) -> Failure | None:
    """Results of ``part`` against the same rows of the whole, which have the same truth."""
    exact = part.exact
    limits = trial.apart(exact, part.case)
    for name in ("out", "lse"):
        if name in got and name in whole:
            mine, other = exact.part(got[name]), exact.part(whole[name])
            found = alike(check, name, other, mine, limits[name], message)
            if found is not None:
                return found
    return None


# -- one batch entry alone ---------------------------------------------------------------------------------------------


def _batched(case: Case) -> bool:
    alike = case.lengths is None or case.varlen or case.page > 0
    return _plain(case) and case.batch > 1 and alike and (case.mask is None or "b" not in case.mask.axes)


def _alone(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """One batch entry; a sequence among others is then a call without any, and keys in pages lie without them."""
    case, b = subject.case, subject.case.data_seed % subject.case.batch
    rows, keys = _sizes(case, b)
    data = {role: subject.data[role][b : b + 1, :, :rows] for role in ("query", "grad_out", "grad_lse")}
    data |= {role: subject.data[role][b : b + 1, :, :keys] for role in ("key", "value")}
    if case.alibi == "batch":
        data["alibi_slopes"] = subject.data["alibi_slopes"][b : b + 1]
    alone = case.replace(batch=1, grads="", seq_q=rows, seq_k=keys)
    if case.varlen or case.page:
        alone = alone.replace(lengths=None, query_lengths=None, page=0, splits=0, latent=False)
    if case.tree:  # whose bits are a mask there
        data["attn_mask"] = subject.data["attn_mask"][b : b + 1, :, :rows, :keys]
        alone = alone.replace(tree="", mask=MaskRecipe("bool", "qk"))
    return alone, {**subject.data, **data}


def _sizes(case: Case, b: int) -> tuple[int, int]:
    """Queries and keys of a batch entry."""
    queries = case.seq_q if case.query_lengths is None else case.query_lengths[b]
    return queries, case.seq_k if case.lengths is None else case.lengths[b]


def _batch_invariance(trial: Trial) -> Failure | None:
    b = trial.case.data_seed % trial.case.batch
    # What 8 bits and a scale stand for is in no type of rows without pages.
    make = partial(_one_of_pages, trial.subject, b) if trial.case.cache else partial(_alone, trial.subject)
    alone = trial.subject.derive("alone", make)
    got = trial.run(alone)
    whole = {name: trial.results[name][b : b + 1, :, : alone.case.seq_q] for name in got if name in trial.results}
    return _against(trial, alone, "batch", got, whole, "a batch entry differs from the same entry alone")


# -- keys in pages -----------------------------------------------------------------------------------------------------


def _paged(case: Case) -> bool:
    return case.page > 0 and case.work > 0


def _dealt_otherwise(trial: Trial) -> Failure | None:
    case = trial.case
    other = trial.subject.derive("dealt", lambda: (case.replace(data_seed=(case.data_seed + 1) % 2**64), trial.data))
    got, base = trial.run(trial.repeatable(other)), trial.repeatable_results
    message = "it differs where the same keys lie in other pages"
    if not trial.repeats:
        return within(trial, "pages", got, base, message)
    return first_of(*(identical("pages", name, got[name], base[name], message) for name in got))


def _divided(case: Case) -> bool:
    return _paged(case) and case.splits > 0 and case.batch > 1


def _one_of_pages(subject: Subject, b: int) -> tuple[Case, dict[str, Any]]:
    """Sequence ``b``, with a table of its own pages alone."""
    case = subject.case
    _, keys = _sizes(case, b)
    width = -(-keys // case.page) * case.page
    data = {role: subject.data[role][b : b + 1] for role in ("query", "grad_out", "grad_lse")}
    data |= {role: subject.data[role][b : b + 1, :, :width] for role in ("key", "value")}
    if case.cache:
        scales = ("key_scale", "value_scale")
        data |= {role: subject.data[role][b : b + 1, :, : width // case.page] for role in scales}
    if case.alibi == "batch":
        data["alibi_slopes"] = subject.data["alibi_slopes"][b : b + 1]
    if case.tree:
        data["attn_mask"] = subject.data["attn_mask"][b : b + 1, ..., :width]
    queries = None if case.query_lengths is None else case.query_lengths[b : b + 1]
    return case.replace(batch=1, seq_k=width, lengths=(keys,), query_lengths=queries), {**subject.data, **data}


def _same_bits_alone(trial: Trial) -> Failure | None:
    for b in range(trial.case.batch):
        alone = trial.subject.derive(f"pages of {b}", partial(_one_of_pages, trial.subject, b))
        message = f"with num_splits sequence {b} has the same bits alone, and it differs"
        got, whole = trial.run(alone), trial.results
        found = first_of(*(identical("splits", name, got[name], whole[name][b : b + 1], message) for name in got))
        if found is not None:
            return found
    return None


# -- shared heads written out ------------------------------------------------------------------------------------------


def _grouped(case: Case) -> bool:
    return _plain(case) and case.group > 1


def _expanded(subject: Subject) -> tuple[Case, dict[str, Any]]:
    case = subject.case
    changes = {role: np.repeat(subject.data[role], case.group, axis=1) for role in ("key", "value")}
    return case.replace(heads_kv=case.heads_q, group=1), {**subject.data, **changes}


def _heads_written_out(trial: Trial) -> Failure | None:
    case, exact = trial.case, trial.subject.exact
    expanded = trial.subject.derive("expanded", lambda: _expanded(trial.subject))
    got = trial.run(expanded)
    limits = trial.apart(exact, expanded.case)
    for name in ("key", "value"):
        if f"grad {name}" in got:
            got[f"grad {name}"] = _summed(case, got[f"grad {name}"])
            if exact.rows is not None:  # another key head of the written-out ones is known
                del got[f"grad {name}"]
            else:  # the written-out gradients are each rounded before they are summed here
                limits[name] = trial.limits()[name] + _summed(case, trial.limits(expanded)[name])
    message = "key heads repeated for each query head give another"
    return within(trial, "grouped-heads", got, trial.results, message, limits, factor=1.0)


def _summed(case: Case, x: Any) -> Any:
    """Over the query heads that share a key head: (B, Hq, ...) to (B, Hkv, ...)."""
    return x.reshape(x.shape[0], case.heads_kv, case.group, *x.shape[2:]).sum(2)


# -- sinks and slopes written out --------------------------------------------------------------------------------------


def _of_heads(case: Case) -> bool:
    return _plain(case) and bool(case.sinks or case.alibi) and math.prod(case.scores) <= 2**22


def _written_out(subject: Subject) -> tuple[Case, dict[str, Any]]:
    """Sinks as one more key, of 0, whose score and value are 0; their own scores, and all else, in a float mask."""
    case, data = subject.case, subject.data
    mask = np.zeros(case.scores)
    if case.alibi:
        mask = mask - data["alibi_slopes"][:, :, None, None] * np.abs(distances(case))
    if case.mask is not None and case.mask.dtype != "bool":
        mask = mask + data["attn_mask"]
    mask = np.where(subject.visible, mask, -np.inf)
    changes, keys, grads = {}, case.seq_k, case.grads.replace("m", "")
    if case.sinks:
        changes = {role: np.concatenate([data[role], 0 * data[role][:, :, :1]], 2) for role in ("key", "value")}
        sinks = np.broadcast_to(data["sinks"][None, :, None, None], (*case.scores[:3], 1))
        mask, keys, grads = np.concatenate([mask, sinks], -1), keys + 1, grads and grads + "m"
    plain = case.replace(seq_k=keys, causal=False, window=None, alignment="top_left", lengths=None, sinks="", alibi="")
    plain = plain.replace(mask=MaskRecipe("float64", "bhqk", 4, "random"), grads=grads)
    return plainly_placed(plain, {"key", "value"}), {**data, **changes, "attn_mask": mask}


def _heads_as_mask(trial: Trial) -> Failure | None:
    case, exact = trial.case, trial.subject.exact
    plain = trial.subject.derive("heads as mask", lambda: _written_out(trial.subject))
    if exact.rows is not None or plain.exact.rows is not None:
        raise NotApplicable("too long to be known in whole")
    got = {name.removeprefix("grad "): result for name, result in trial.run(plain).items()}
    moved = dict(trial.limits(plain))
    for found in (got, moved):
        found |= {name: found[name][:, :, : case.seq_k] for name in ("key", "value") if name in found}
        by_mask = found.pop("attn_mask", None)
        if by_mask is not None and case.sinks:
            found["sinks"] = by_mask[..., -1].sum((0, 2))
    limits = {name: limit + moved[name] for name, limit in trial.limits().items() if name in moved}
    results = {name.removeprefix("grad "): result for name, result in trial.results.items()}
    got = {name: result for name, result in got.items() if name in limits}
    message = "sinks as one more key, or alibi as a float mask, give another"
    return within(trial, "heads-written-out", got, results, message, limits, factor=1.0)


CHECKS = (
    Check(
        "split",
        "attention over two parts of the keys, merged by lse, is attention over all",
        "The law of every split-KV kernel: it needs no reference, and sees keys lost or counted twice at any length.",
        _splits,
        _split,
    ),
    Check(
        "prefix",
        "the first rows of a causal problem do not depend on how many follow",
        "It needs no reference, and compares two launches of different size.",
        _prefixed,
        _prefix_consistency,
    ),
    Check(
        "decode",
        "the last row computed alone, as in decoding, is the last row of the whole",
        "It holds the path for one query against the one for many, with no reference.",
        _decodes,
        _decode,
    ),
    Check(
        "batch",
        "a batch entry computed alone is the same as in its batch",
        "It needs no reference, and compares two launches of different size.",
        _batched,
        _batch_invariance,
        varlen=True,
    ),
    Check(
        "pages",
        "which pages hold the keys of a sequence changes nothing, to the bit",
        "Bitwise, on the same keys: a page that is read in the place of another may hold numbers that are close.",
        _paged,
        _dealt_otherwise,
        varlen=True,
    ),
    Check(
        "splits",
        "with num_splits a sequence has the same bits alone and in a batch",
        "Bitwise: keys divided otherwise give a sum that every bound allows.",
        _divided,
        _same_bits_alone,
        varlen=True,
    ),
    Check(
        "heads-written-out",
        "a sink is one more key of value 0, and alibi a float mask of distances",
        "It needs no reference: the way through a kernel that has them is held against the one of a mask.",
        _of_heads,
        _heads_as_mask,
    ),
    Check(
        "grouped-heads",
        "shared key heads give what key heads repeated for each query head give",
        "It needs no reference, and sees heads matched in the wrong order at any length.",
        _grouped,
        _heads_written_out,
    ),
)
