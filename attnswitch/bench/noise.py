"""How far dropout moves a right result: moments of what it adds, and bounds that a right result all but never passes.

A weight is kept at the rate 1 - p and then divided by it. So output and gradients are linear in independent errors n of
mean 0 and variance p / (1 - p), one for each weight: dropout adds the sum of n_c a_c over the weights c, where the
vector a_c is known. The mean square of that is exact. The variance of its square is too, but for how much the vectors
of a row or a key are alike: where that is not worked out, they count as the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["FALSE_ALARM", "Cells", "Noise", "Sum", "gradients", "output"]

#: How often a right result of a head passes one of its bounds, about: a gamma stands for how its norm is spread.
FALSE_ALARM = 1e-9
_SURE = -math.log(FALSE_ALARM / 2)
#: What rounding in float64 leaves of a difference, of the squares of its terms.
_LEFT = 1e-12
#: Keys up to which those of a row are compared with each other, in all rows; beyond, in the first few.
_KEYS, _ROWS = 2048, 16
#: Keys whose rows are compared with each other, and how many at a time.
_EXACT, _TOGETHER = 64, 8


@dataclass(frozen=True, slots=True)
class Noise:
    """Of what dropout adds to a head's result: bounds of its norm, and of its part along the answer, of either sign."""

    least: float
    most: float
    along: float
    #: The root of its mean square.
    usual: float


@dataclass(frozen=True, slots=True)
class Cells:
    """Weights of some rows, (G, R, Lk): the a_c of each is ``strength`` times a vector.

    ``square`` is the square of a_c's norm, ``toward`` its product with the answer.
    """

    strength: torch.Tensor
    square: torch.Tensor
    toward: torch.Tensor


class Sum:
    """What dropout at the rate ``rate`` adds to one result, summed up over chunks of rows.

    By rows, as of the output, there are G heads, whose rows are independent; ``by_keys`` there is one, of all query
    heads that share the keys.
    """

    def __init__(self, rate: float, heads: int, *, by_keys: bool = False, alike: float = 1.0) -> None:
        """``alike``: by how much the sums of squares of keys may fall short, as these are not independent."""
        self._rate, self._by_keys, self._alike = rate, by_keys, alike
        zero = torch.zeros(heads, dtype=torch.float64)
        self._mean = self._alone = self._along = self._step = self._squares = zero
        self._keys, self._first, self._rows = torch.zeros(1), torch.zeros(1), 0

    def add(self, cells: Cells, vectors: torch.Tensor, caps: torch.Tensor, centres: torch.Tensor | None) -> None:
        """Take in ``cells``. Vectors are of rows, (G, R, D), if ``by_keys``; else of keys, times caps less centres."""
        if not cells.square.numel():
            return
        square, dims = cells.square.double(), (0, 1, 2) if self._by_keys else (1, 2)
        self._mean = self._mean + square.sum(dims).cpu()
        self._alone = self._alone + square.square().sum(dims).cpu()
        self._along = self._along + cells.toward.double().square().sum(dims).cpu()
        self._step = torch.maximum(self._step, cells.toward.double().abs().amax(dims).cpu())
        if self._by_keys:
            self._keys = self._keys.to(square) + square.sum((0, 1))
            some = vectors.flatten(0, 1)
            weights = (cells.square / vectors.square().sum(-1, keepdim=True).clamp_min(1e-30)).flatten(0, 1)
            first = [
                (some[:, None] * weights[:, j : min(j + _TOGETHER, _EXACT), None]).flatten(1).T @ some
                for j in range(0, min(_EXACT, weights.shape[1]), _TOGETHER)
            ]
            self._first = self._first.to(some) + torch.cat(first)
            return
        if vectors.shape[0] <= _KEYS:
            of_rows = _alike(cells.strength.square(), vectors, caps, centres).minimum(square.sum(-1).square())
            self._squares = self._squares + of_rows.sum(-1).cpu()
            return
        exact = max(0, min(_ROWS - self._rows, square.shape[1]))
        self._rows += square.shape[1]
        rest = square[:, exact:].sum(-1).square().sum(-1)
        for g in range(square.shape[0]):
            for i in range(exact):
                x = vectors * caps[g, i, :, None] - (0 if centres is None else centres[g, i])
                rest[g] += ((x * cells.strength[g, i, :, None].square()).T @ x).square().sum()
        self._squares = self._squares + rest.cpu()

    def heads(self) -> list[Noise]:
        """The bounds of each head."""
        squares = self._squares
        if self._by_keys:
            of_first = self._first.double().square().sum().cpu()
            squares = squares + of_first + self._keys[_EXACT:].square().sum().cpu()
        p = self._rate
        variance = p / (1.0 - p)
        # Errors are not normal: their fourth moment counts where few weights do.
        tailed = max(0.0, (1.0 - 3.0 * p * (1.0 - p)) / (p * (1.0 - p)) - 3.0)
        widest = max(1.0, variance)
        found = []
        for mean, square, alone, along, step in zip(
            *map(torch.Tensor.tolist, (self._mean, squares, self._alone, self._along, self._step)), strict=True
        ):
            spread = 2.0 * self._alike * square + tailed * alone
            low, high = _gamma(mean * mean / spread) if spread else (1.0, 1.0)
            usual, jump = math.sqrt(variance * mean), _SURE * widest * step / 3.0
            sideways = jump + math.sqrt(jump * jump + 2.0 * _SURE * variance * along)  # Bernstein's inequality
            found.append(Noise(math.sqrt(low) * usual, math.sqrt(high) * usual, sideways, usual))
        return found


def _alike(weights: torch.Tensor, keys: torch.Tensor, caps: torch.Tensor, centres: torch.Tensor | None) -> torch.Tensor:
    """The sum of w_j w_k <x_j, x_k>^2 in each row, (G, R), of x_j = cap_j key_j - centre."""
    products, capped = keys @ keys.T, weights * caps
    strong = capped * caps
    found = ((strong @ products.square()) * strong).sum(-1)
    if centres is None:
        return found
    beside, square = caps * (centres @ keys.T), centres.square().sum(-1)
    alone, once, twice = weights.sum(-1), (weights * beside).sum(-1), (weights * beside.square()).sum(-1)
    across = capped @ products
    found = found - 4.0 * (across * capped * beside).sum(-1) + 2.0 * square * (across * capped).sum(-1)
    found = found + 2.0 * (twice * alone + once.square()) + square * alone * (square * alone - 4.0 * once)
    return found.clamp_min(0.0)


def _gamma(shape: float) -> tuple[float, float]:
    """What a gamma variable of mean 1 stays between, by Chernoff: its tails are exp(-shape (x - 1 - log x))."""

    def edge(inside: float, outside: float) -> float:
        for _ in range(100):
            middle = (inside + outside) / 2.0
            if shape * (math.expm1(middle) - middle) < _SURE:
                inside = middle
            else:
                outside = middle
        return math.exp(outside)

    return edge(0.0, -1.0 - _SURE / shape), edge(0.0, math.log(4.0 + 4.0 * _SURE / shape))


def output(total: Sum, weights: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Add what dropout does to ``out`` (G, R, Dv), of ``weights`` (G, R, Lk)."""
    square = weights.square() * value.square().sum(-1)
    cells = Cells(weights, square, weights * (out @ value.T))
    total.add(cells, value, torch.ones_like(weights), None)


def gradients(
    totals: dict[str, Sum],
    answers: dict[str, torch.Tensor],
    weights: torch.Tensor,
    caps: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Add what dropout does to the gradients in ``answers``: of "q" (G, R, D) these rows, of "k" and "v" (Lk, D or Dv).

    ``caps`` (G, R, Lk) are a softcap's derivatives; ``operands`` are query (G, R, D), key, value, grad_out (G, R, Dv).
    """
    query, key, value, grad_out = operands
    if "v" in totals:
        square = weights.square() * grad_out.square().sum(-1, keepdim=True)
        totals["v"].add(Cells(weights, square, weights * (grad_out @ answers["v"].T)), grad_out, caps, None)
    # An error of weight j moves the gradient of score k by strength * (caps_k [j is k] - (weights * caps)_k).
    strength, shared = weights * (grad_out @ value.T) * scale, weights * caps
    if "q" in totals:
        centre = shared @ key
        norm = _distance(caps.square() * key.square().sum(-1), caps * (centre @ key.T), centre.square().sum(-1))
        toward = caps * (answers["q"] @ key.T) - (answers["q"] * centre).sum(-1, keepdim=True)
        totals["q"].add(Cells(strength, strength.square() * norm, strength * toward), key, caps, centre)
    if "k" in totals:
        norm = _distance(caps.square(), caps * shared, shared.square().sum(-1))
        square = strength.square() * norm * query.square().sum(-1, keepdim=True)
        product = query @ answers["k"].T
        toward = caps * product - (shared * product).sum(-1, keepdim=True)
        totals["k"].add(Cells(strength, square, strength * toward), query, caps, None)


def _distance(one: torch.Tensor, product: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|x - y|^2 of x in cells and y in rows, from their squares and products: 0 where rounding alone is left."""
    squares = one + other[..., None]
    distance = squares - 2.0 * product
    return distance.where(distance > _LEFT * squares, 0.0)
