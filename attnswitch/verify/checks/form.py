"""What a call may not do whatever its numbers are: other shapes or types, writing to inputs, writing beside results."""

from __future__ import annotations

from attnswitch import arrays
from attnswitch.verify.checks.check import Check
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.launch.call import expected, missing
from attnswitch.verify.launch.layouts import host
from attnswitch.verify.launch.neighbours import overlap
from attnswitch.verify.launch.sequences import offsets
from attnswitch.verify.outcome import Failure
from attnswitch.verify.trial import Trial

__all__ = ["CHECKS"]


def _every(case: Case) -> bool:
    return True


def _form(trial: Trial) -> Failure | None:
    """Library, device, shape and dtype of every result."""
    where = arrays.facts(trial.placed.query, "query")
    results = trial.returned.results
    if odd := missing(trial.case, results):
        return Failure("form", odd)
    for name, (shape, dtype) in expected(trial.case).items():
        facts = arrays.facts(results[name], name)
        for what, got, right in (
            ("library", facts.library, where.library),
            ("device", facts.device, where.device),
            ("shape", facts.shape, shape),
            ("dtype", facts.dtype, dtype),
        ):
            if got != right:
                return Failure("form", f"{what} is {got}, expected {right}", name)
    return None


def _inputs(trial: Trial) -> Failure | None:
    """Every byte of the inputs, and of the junk around and between their elements, is what it was."""
    for role, storage in trial.placed.storage.items():
        if storage.changed():
            return Failure("inputs", "it, or the memory around it, was written to", role)
    case, placed = trial.case, trial.placed
    beside = [
        ("key_lengths", placed.key_lengths, list(case.lengths or ())),
        ("cu_seqlens_q", placed.cu_seqlens_q, offsets(case, "query")),
        ("cu_seqlens_k", placed.cu_seqlens_k, offsets(case, "key")),
        ("block_table", placed.block_table, None if placed.table is None else placed.table.tolist()),
        ("tree_mask", placed.tree_mask, None if placed.bits is None else placed.bits.tolist()),
    ]
    for name, array, numbers in beside:
        if array is not None and host(array).tolist() != numbers:
            return Failure("inputs", "it was written to", name)
    results = trial.returned.results
    for name in ("out", "lse"):
        for role in ("query", "key", "value", "attn_mask"):
            array = getattr(placed, role)
            if name in results and array is not None and overlap(results[name], array):
                return Failure(
                    "inputs", f"it lies in the memory of {role}: whoever writes to it changes an input", name
                )
    return None


CHECKS = (
    Check(
        "form",
        "results have the caller's library and device, and the shapes and dtypes of the contract",
        "",
        _every,
        _form,
        always=True,
        varlen=True,
    ),
    Check(
        "inputs",
        "no byte of an input, nor of the memory around it, is written to; none of an operand is an output's",
        "It alone looks at the memory itself: a write that leaves the results right is nobody else's to see.",
        _every,
        _inputs,
        always=True,
        varlen=True,
    ),
)
