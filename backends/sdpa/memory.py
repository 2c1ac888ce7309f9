"""Bytes that torch's operators hold beside operands and results, as measured at the peak of a call."""

from __future__ import annotations

from attnswitch.problem import DTYPES, Problem, cost

__all__ = ["composed", "with_bias", "with_scores", "with_sums"]


def composed(problem: Problem, accepted: tuple[str, ...]) -> int:
    """Of a mask made for an operator that adds one of the types ``accepted``: itself, and what it is made of."""
    p = problem
    if not p.needs_mask:
        return 0
    hides = p.hides_by_position or p.key_lengths  # of which there is a tensor
    item = 0 if p.mask is None else p.element("attn_mask")
    made = DTYPES[accepted[0]]
    if p.mask is not None and p.adds_mask:
        made = item if p.mask.dtype in accepted else item + DTYPES[accepted[-1]]
        if not hides:
            return cost.hiding_elements(p) * (made - item)
        return cost.hiding_elements(p) * (made + 2)  # of what is visible, and what is not, a byte each
    if hides:
        return cost.hiding_elements(p) * (made + 1 + item)
    return cost.hiding_elements(p) * made


def with_scores(problem: Problem) -> int:
    """Of the composite of matrix products: S, P and a byte each; with gradients P, dP and dS."""
    p = problem
    wide = "float64" if p.dtype == "float64" else "float32"
    scores = p.batch * p.heads_q * p.seq_q * p.seq_k
    forward = scores * (2 * DTYPES[wide] + 1) + composed(p, (wide,))
    if p.causal and not p.needs_mask:
        forward += p.seq_q * p.seq_k * (DTYPES[wide] + 1)
    rows = p.batch * (p.heads_q * p.seq_q + p.heads_kv * p.seq_k)
    raised = 0 if p.dtype == wide else rows * (p.dim_qk + p.dim_v) * DTYPES[wide]
    repeated = 0 if p.group == 1 else cost.kv_bytes(p) * p.group * DTYPES[wide] // DTYPES[p.dtype]
    return raised + repeated + max(forward, 3 * DTYPES[wide] * scores if p.grads else 0)


def with_bias(problem: Problem) -> int:
    """Of an operator on a GPU: a bias whose rows have room to a multiple of 8, and a gradient of all scores."""
    p = problem
    if not p.needs_mask:
        return 0
    rows = cost.hiding_elements(p) // max(p.seq_k, 1)
    extra = rows * (p.seq_k + -p.seq_k % 8) * DTYPES[p.dtype]
    if "m" in p.grads:
        extra += p.batch * p.heads_q * p.seq_q * p.seq_k * DTYPES[p.dtype]
    return extra


def with_sums(problem: Problem) -> int:
    """Of cuDNN's backward: float32 sums of dQ, and keys and values of each query head with their gradients."""
    p = problem
    if not p.grads:
        return 0
    written_out = 0 if p.group == 1 else 2 * p.group * cost.kv_bytes(p)
    return p.batch * p.heads_q * p.seq_q * p.dim_qk * DTYPES["float32"] + written_out
