"""How far a result is from the answer: no proof, which is ``verify``'s, but a fast wrong kernel is noticed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnswitch.bench.workload import Workload
from attnswitch.problem import Problem

__all__ = ["Reference", "allowed", "make", "where"]

#: Largest relative deviation that rounding explains, by dtype of the operands; TF32 is within that of float32.
_ROUNDING = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 3e-3, "float64": 1e-8}
#: What the answer is worked out in, by dtype of the operands: a type that rounds much less, where there is one.
_WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}
#: Of the largest norm of a head's answer: what the norm of every other counts as at the least.
_SHARE = 1e-3
#: Elements of the scores held at a time.
_CHUNK = 2**25


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer on a few key heads with their query heads, in a wider type (``_WIDE``), without dropout.

    ``parts`` pairs (batch, key head) with the results there: output and the gradients, each (heads, length, D).
    """

    work: Workload
    parts: dict[tuple[int, int], tuple[torch.Tensor, ...]]

    @property
    def empty(self) -> bool:
        """Whether there is no answer to compare with: to a mask's gradient alone, and to no sequences."""
        return not any(self.parts.values())

    def deviation(self, results: Sequence[torch.Tensor]) -> float:
        """The largest ||result - reference|| / ||reference|| of a head; NaN if anything in ``results`` is.

        A head whose answer is far smaller than others, such as a gradient that vanishes for want of a second key, is
        held against a share of the largest. ``results`` are the output (forward), or the gradients of q, k and v that
        the problem names (backward).
        """
        worst, p = 0.0, self.work.problem
        roles = [role for role in ("query", "key", "value") if role[0] in p.grads] if p.grads else ["query"]
        for result in results:
            if not bool(torch.isfinite(result).all()):
                return math.nan
        largest = [max(map(_largest, each)) for each in zip(*self.parts.values(), strict=True)]
        for (b, h), answers in self.parts.items():
            # A mask's gradient has no answer.
            for result, role, answer, most in zip(results, roles, answers, largest, strict=False):
                group = answer.shape[0]
                part = self.work.entry(result, b, role)[h * group : (h + 1) * group].to(answer.dtype)
                if part.shape != answer.shape:
                    return math.nan
                distance, size = _sizes(part - answer), _sizes(answer).clamp_min(_SHARE * most)
                ratio = torch.where(distance == 0, 0.0, distance / size)
                worst = max(worst, float(ratio.max())) if group else worst
        return worst


def _sizes(heads: torch.Tensor) -> torch.Tensor:
    """The norm of each of ``heads``, (heads, length, D)."""
    sizes: torch.Tensor = heads.flatten(1).norm(dim=1)
    return sizes


def _largest(heads: torch.Tensor) -> float:
    return float(_sizes(heads).max()) if heads.shape[0] else 0.0


def allowed(problem: Problem) -> tuple[float, float]:
    """Least and largest deviation of a right result.

    Dropout of p leaves each weight's expectation alone and adds noise of sqrt(p / (1 - p)) of what it is added to: a
    result without that noise did not drop.
    """
    rounding = _ROUNDING[problem.dtype]
    if not problem.dropout:
        return 0.0, rounding
    noise = math.sqrt(problem.dropout / (1.0 - problem.dropout)) if problem.dropout < 1.0 else 1.0
    return 0.5 * noise, 2.0 * noise + rounding


def where(problem: Problem) -> str:
    """What the deviation is from, in words."""
    kind = _WIDE[problem.dtype]
    dropped = " without dropout" if problem.dropout else ""
    return f"{kind} math{dropped}, first and last key head"


def make(work: Workload) -> Reference:
    """The answer on the first key head of the first sequence and the last of the last."""
    p = work.problem
    if not p.batch:
        return Reference(work, {})
    places = sorted({(0, 0), (p.batch - 1, p.heads_kv - 1)})
    return Reference(work, {(b, h): _answer(work, b, h) for b, h in places})


def _answer(work: Workload, b: int, h: int) -> tuple[torch.Tensor, ...]:
    """Output, or the gradients, of key head ``h`` of sequence ``b``, by rows in chunks."""
    p = work.problem
    wide: torch.dtype = getattr(torch, _WIDE[p.dtype])
    heads = slice(h * p.group, (h + 1) * p.group)
    query = work.entry(work.query, b, "query")[heads].detach().to(wide)
    key, value = (work.entry(getattr(work, role), b, role)[h].detach().to(wide) for role in ("key", "value"))
    grad_out = None if work.grad_out is None else work.entry(work.grad_out, b, "query")[heads].to(wide)
    queries = query.shape[1]
    step = max(1, _CHUNK // max(1, p.group * p.seq_k))
    outs, query_grads = [], []
    key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        leaves = tuple(tensor.detach().requires_grad_(bool(p.grads)) for tensor in (query[:, rows], key, value))
        with torch.set_grad_enabled(bool(p.grads)):
            out = _rows(work, b, heads, rows, queries, *leaves)
        if grad_out is None:
            outs.append(out)
            continue
        grads = torch.autograd.grad(out, leaves, grad_out[:, rows])
        query_grads.append(grads[0])
        key_grad += grads[1]
        value_grad += grads[2]
    if grad_out is None:
        return (torch.cat(outs, dim=1) if outs else query.new_zeros(p.group, 0, p.dim_v),)
    whole = (
        torch.cat(query_grads, dim=1) if query_grads else torch.zeros_like(query),
        key_grad[None],
        value_grad[None],
    )
    return tuple(grad for letter, grad in zip("qkv", whole, strict=True) if letter in p.grads)


def _rows(
    work: Workload,
    b: int,
    heads: slice,
    rows: slice,
    queries: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attention of some of ``queries`` rows by the formula: scores, softcap, alibi, float mask, hiding, softmax."""
    p = work.problem
    scores = query @ key.T * p.softmax_scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    length = key.shape[0] if work.key_lengths is None else int(work.key_lengths[b])
    j = torch.arange(key.shape[0], device=scores.device)
    visible = (j < length).expand(rows.stop - rows.start, -1)
    i = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    i = i + (length - queries if p.bottom_right else 0)
    if work.alibi_slopes is not None:
        scores = scores - work.alibi_slopes[heads, None, None].to(scores.dtype) * (i - j).abs()
    if p.positional:
        left, right = p.window or (None, None)
        if p.causal:
            visible = visible & (j <= i)
        if left is not None:
            visible = visible & (j >= i - left)
        if right is not None:
            visible = visible & (j <= i + right)
    if (seen := work.seen(b)) is not None:
        visible = visible & seen[rows]
    if work.attn_mask is not None:
        mask = work.attn_mask.detach()[b if work.attn_mask.shape[0] > 1 else 0]
        mask = mask[heads] if mask.shape[0] > 1 else mask
        mask = mask[:, rows] if mask.shape[1] > 1 else mask
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            scores = scores + mask.to(scores.dtype)
    dead = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible & ~dead, -math.inf)
    if work.sinks is not None:  # one more key, of value 0
        sinks = work.sinks[heads, None, None].to(scores.dtype).expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return weights.masked_fill(dead | ~visible, 0.0) @ value
