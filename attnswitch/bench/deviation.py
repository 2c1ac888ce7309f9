"""How far a result is from the answer: no proof, which is ``verify``'s, but a fast wrong kernel is noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from attnswitch.bench import noise
from attnswitch.bench.noise import Noise
from attnswitch.bench.workload import Workload

__all__ = ["Part", "Reference", "make"]

#: Largest relative deviation that rounding explains, by dtype of the operands; TF32 is within that of float32.
_ROUNDING = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 3e-3, "float64": 1e-8}
#: What the answer is worked out in, by dtype of the operands: a type that rounds much less, where there is one.
_WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}
#: Of the largest norm of a head's answer: what the norm of every other counts as at the least.
_SHARE = 1e-3
#: Elements of a result of which one, if weights were dropped, is not the answer to rounding: of fewer, all may be.
_TELLING = 32
#: Elements of the scores held at a time, and where some ten arrays of them are, in float64.
_CHUNK, _NOISE_CHUNK = 2**25, 2**22


@dataclass(frozen=True, slots=True)
class Part:
    """The answers at one key head, output or gradients, (heads, length, D) each, and what dropout adds to each head."""

    answers: tuple[torch.Tensor, ...]
    noises: tuple[list[Noise], ...] = ()


@dataclass(frozen=True, slots=True)
class _Gap:
    """One head of a result beside its answer, relative to the answer's norm; ``along`` is of the part along it.

    ``result`` is the number of the result, ``elements`` how many of it the head has.
    """

    deviation: float
    along: float = math.nan
    noise: Noise | None = None
    result: int = 0
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer on a few key heads with their query heads, in a wider type (``_WIDE``), without dropout.

    ``parts`` pairs (batch, key head) with what there is to know there.
    """

    work: Workload
    parts: dict[tuple[int, int], Part]

    @property
    def empty(self) -> bool:
        """Whether there is no answer to compare with: to a mask's gradient alone, and to no sequences."""
        return not any(part.answers for part in self.parts.values())

    @property
    def where(self) -> str:
        """What the deviation is from, in words."""
        p = self.work.problem
        dropped = " without dropout" if 0.0 < p.dropout < 1.0 else ""
        return f"{_WIDE[p.dtype]} math{dropped}, first and last key head"

    def deviation(self, results: Sequence[torch.Tensor]) -> float:
        """The largest ||result - reference|| / ||reference|| of a head; NaN if anything in ``results`` is.

        A head whose answer is far smaller than others, such as a gradient that vanishes for want of a second key, is
        held against a share of the largest. ``results`` are the output (forward), or the gradients of q, k and v that
        the problem names (backward).
        """
        found = [gap.deviation for gap in self._gaps(results)]
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    def wrong(self, results: Sequence[torch.Tensor]) -> str:
        """What is wrong with ``results``, or nothing.

        Rounding explains so much of a deviation; and dropout what ``attnswitch.bench.noise`` says, so that a head is
        wrong by mistake once in 1 / ``FALSE_ALARM`` times. A result that is the answer to rounding did not drop, since
        weights that are kept are scaled: rows would have to balance that in every column, of ``_TELLING`` at least.
        """
        rounding, rate = _ROUNDING[self.work.problem.dtype], self.work.problem.dropout
        found, words = list(self._gaps(results)), f"its deviation from {self.where} is"
        if any(math.isnan(gap.deviation) for gap in found):
            return f"{words} nan"
        # Where all weights are kept, they are scaled all the same.
        moves = 0.0 < rate < 1.0 and rate / (1.0 - rate) > 2.0 * rounding
        for at in sorted({gap.result for gap in found if moves}):
            moved = [gap for gap in found if gap.result == at and gap.noise and gap.noise.usual > 4.0 * rounding]
            if sum(gap.elements for gap in moved) < _TELLING:
                continue
            if (most := max(gap.deviation for gap in moved)) <= rounding:
                return f"{words} {most:.2g}: nothing was dropped"
        for gap in sorted(found, key=lambda gap: -gap.deviation):
            added = gap.noise or Noise(0.0, 0.0, 0.0, 0.0)
            slack = rounding * (1.0 + added.usual)
            least, most = max(0.0, added.least - slack), added.most + slack
            if not least <= gap.deviation <= most:
                return f"{words} {gap.deviation:.2g}, and a right result's is from {least:.2g} to {most:.2g}"
            if added.usual and abs(gap.along) > (most := added.along + slack):
                return (
                    f"{words} {gap.along:+.2g} along the answer, and a right result's is at most {most:.2g} either way"
                )
        return ""

    def _gaps(self, results: Sequence[torch.Tensor]) -> Iterator[_Gap]:
        p = self.work.problem
        roles = [role for role in ("query", "key", "value") if role[0] in p.grads] if p.grads else ["query"]
        if not all(bool(torch.isfinite(result).all()) for result in results):
            yield _Gap(math.nan)
            return
        answers = (part.answers for part in self.parts.values())
        largest = [max(map(_largest, each)) for each in zip(*answers, strict=True)]
        for (b, h), known in self.parts.items():
            # A mask's gradient has no answer.
            for at, (result, role, answer) in enumerate(zip(results, roles, known.answers, strict=False)):
                group = answer.shape[0]
                part = self.work.entry(result, b, role)[h * group : (h + 1) * group].to(answer.dtype)
                if part.shape != answer.shape:
                    yield _Gap(math.nan)
                    return
                for gap in _beside(part, answer, largest[at], known.noises[at] if known.noises else None):
                    yield replace(gap, result=at, elements=answer[0].numel())


def _beside(part: torch.Tensor, answer: torch.Tensor, largest: float, noises: list[Noise] | None) -> Iterator[_Gap]:
    """Each head of ``part`` beside that of ``answer``, (heads, length, D)."""
    sizes = _sizes(answer).clamp_min(_SHARE * largest)
    distances = _sizes(part - answer)
    along = ((part - answer) * answer).flatten(1).sum(1)
    for h, (size, distance, toward) in enumerate(zip(sizes.tolist(), distances.tolist(), along.tolist(), strict=True)):
        ratio = 0.0 if distance == 0.0 else distance / size if size else math.inf
        noise = None
        if noises is not None and size:
            n = noises[h]
            noise = Noise(n.least / size, n.most / size, n.along / size**2, n.usual / size)
        yield _Gap(ratio, toward / size**2 if size else 0.0, noise)


def _sizes(heads: torch.Tensor) -> torch.Tensor:
    """The norm of each of ``heads``, (heads, length, D)."""
    sizes: torch.Tensor = heads.flatten(1).norm(dim=1)
    return sizes


def _largest(heads: torch.Tensor) -> float:
    return float(_sizes(heads).max()) if heads.shape[0] else 0.0


def make(work: Workload) -> Reference:
    """The answer on the first key head of the first sequence and the last of the last."""
    p = work.problem
    if not p.batch:
        return Reference(work, {})
    places = sorted({(0, 0), (p.batch - 1, p.heads_kv - 1)})
    return Reference(work, {(b, h): _part(work, b, h) for b, h in places})


def _part(work: Workload, b: int, h: int) -> Part:
    answers = _answer(work, b, h)
    noisy = answers and 0.0 < work.problem.dropout < 1.0
    return Part(answers, _noises(work, b, h, answers) if noisy else ())


def _noises(work: Workload, b: int, h: int, answers: tuple[torch.Tensor, ...]) -> tuple[list[Noise], ...]:
    """What dropout adds to each of ``answers``, by rows in chunks, in float64."""
    p = work.problem
    query, key, value, grad_out = _operands(work, b, h, torch.float64)
    answers = tuple(answer.double() for answer in answers)
    letters = [letter for letter in "qkv" if letter in p.grads]
    # The errors of a row leave the sum of its scores' gradients alone: the gradients of two keys are but one.
    totals = {
        x: noise.Sum(p.dropout, p.group if x == "q" else 1, by_keys=x != "q", alike=2.0 if x == "k" else 1.0)
        for x in letters or "q"
    }
    for rows in _chunks(work, query, key, _NOISE_CHUNK):
        weights, caps = _weights(work, b, h, rows, query[:, rows], key)
        if not letters:
            noise.output(totals["q"], weights, value, answers[0][:, rows])
            continue
        assert grad_out is not None
        known = {x: answer[:, rows] if x == "q" else answer[0] for x, answer in zip(letters, answers, strict=True)}
        operands = query[:, rows], key, value, grad_out[:, rows]
        noise.gradients(totals, known, weights, caps, operands, p.softmax_scale)
    return tuple(total.heads() for total in totals.values())


def _operands(
    work: Workload, b: int, h: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Query (G, Lq, D), key (Lk, D), value and grad_out at key head ``h`` of sequence ``b``, in a type."""
    heads = _heads(work, h)
    query = work.entry(work.query, b, "query")[heads].detach().to(wide)
    key, value = (work.entry(getattr(work, role), b, role)[h].detach().to(wide) for role in ("key", "value"))
    grad_out = None if work.grad_out is None else work.entry(work.grad_out, b, "query")[heads].to(wide)
    return query, key, value, grad_out


def _heads(work: Workload, h: int) -> slice:
    return slice(h * work.problem.group, (h + 1) * work.problem.group)


def _chunks(work: Workload, query: torch.Tensor, key: torch.Tensor, elements: int) -> Iterator[slice]:
    step = max(1, elements // max(1, work.problem.group * key.shape[0]))
    for start in range(0, query.shape[1], step):
        yield slice(start, min(start + step, query.shape[1]))


def _answer(work: Workload, b: int, h: int) -> tuple[torch.Tensor, ...]:
    """Output, or the gradients, of key head ``h`` of sequence ``b``, by rows in chunks."""
    p = work.problem
    query, key, value, grad_out = _operands(work, b, h, getattr(torch, _WIDE[p.dtype]))
    outs, query_grads = [], []
    key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
    for rows in _chunks(work, query, key, _CHUNK):
        leaves = tuple(tensor.detach().requires_grad_(bool(p.grads)) for tensor in (query[:, rows], key, value))
        with torch.set_grad_enabled(bool(p.grads)):
            weights, _ = _weights(work, b, h, rows, *leaves[:2])
            out = (weights * 0.0 if p.dropout == 1.0 else weights) @ leaves[2]
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


def _weights(
    work: Workload, b: int, h: int, rows: slice, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of some rows by the formula: scores, softcap, alibi, float mask, hiding, softmax.

    Beside them the derivative of each capped score; both are (G, R, Lk).
    """
    p = work.problem
    heads, queries = _heads(work, h), work.entry(work.query, b, "query").shape[1]
    scores = query @ key.T * p.softmax_scale
    caps = torch.ones_like(scores)
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
        caps = 1.0 - (scores.detach() / p.softcap).square()
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
    return weights.masked_fill(dead | ~visible, 0.0), caps
