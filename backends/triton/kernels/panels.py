"""Heads too wide for a tile: products over them in panels of columns, each brought from memory in its turn.

A program makes one panel of its outputs, and all of the scores for it. So the scores are made once for each panel of
the output, and registers and shared memory are those of a head of one panel, however wide it is.
"""

import triton
import triton.language as tl

from .tile import load_rows, product, tile_of, widened


@triton.jit
def panel_at(at, column, how: tl.constexpr):
    """The array that ``tile_of`` takes, from ``column`` on."""
    array = at[0] + column * at[2]
    if how.paged:
        return array, at[1], at[2], at[3]
    else:
        return array, at[1], at[2]


@triton.jit
def product_of_panels(
    rows, at, b, head, start, end, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PANEL: tl.constexpr, EVEN: tl.constexpr,
    EDGE: tl.constexpr, CLEAN: tl.constexpr, DEALT: tl.constexpr, how: tl.constexpr, where=None,
):  # fmt: skip
    """``rows`` times the transpose of a tile of BLOCK rows of ``at``, (ROWS, BLOCK), summed over the panels of ``dim``.

    ``rows`` is (pointers (ROWS, 1), which of them are inside, step from column to column); the rest is for ``tile_of``.
    """
    pointers, inside, step = rows
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for panel in range(tl.cdiv(dim, PANEL)):
        column = panel * PANEL
        own = load_rows(pointers + column * step, inside, step, dim - column, PANEL, EVEN)
        other = tile_of(
            panel_at(at, column, how), b, head, start, end, dim - column,
            BLOCK, PANEL, EVEN, EDGE, CLEAN, DEALT, how, where,
        )  # fmt: skip
        if how.scaled:
            other = widened(other, own.dtype)
        acc = product(own, tl.trans(other), acc)
    return acc


@triton.jit
def product_of_rows(
    left, right, dim,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PANEL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same of ``left`` and ``right``, both as ``rows``: (LEFT, RIGHT)."""
    pointers, inside, step = left
    others, there, other_step = right
    acc = tl.zeros((LEFT, RIGHT), tl.float32)
    for panel in range(tl.cdiv(dim, PANEL)):
        column = panel * PANEL
        own = load_rows(pointers + column * step, inside, step, dim - column, PANEL, EVEN)
        other = load_rows(others + column * other_step, there, other_step, dim - column, PANEL, EVEN)
        acc = product(own, tl.trans(other), acc)
    return acc


@triton.jit
def dots_of_rows(left, right, dim, ROWS: tl.constexpr, PANEL: tl.constexpr, EVEN: tl.constexpr):
    """The product of each row of ``left`` with the same of ``right``, (ROWS,)."""
    pointers, inside, step = left
    others, _, other_step = right
    acc = tl.zeros((ROWS,), tl.float32)
    for panel in range(tl.cdiv(dim, PANEL)):
        column = panel * PANEL
        own = load_rows(pointers + column * step, inside, step, dim - column, PANEL, EVEN)
        other = load_rows(others + column * other_step, inside, other_step, dim - column, PANEL, EVEN)
        acc += tl.sum(own.to(tl.float32) * other.to(tl.float32), 1)
    return acc
