"""Blocks that each have some keys: of all, or of those alone that a query sees, where the others' zeros are filled in.

A block of keys that nobody sees costs as much as any other to begin and to end, and writes its zeros at less than half
the pace of memory. So where many are, they are left off the end of the grid, in which tiles come before heads then.
"""

from __future__ import annotations

from typing import NamedTuple

from attnswitch.problem import Problem

from ...own import arithmetic

__all__ = ["KeyGrid", "key_grid", "seen_keys"]

#: Blocks, and the share of all keys, from which on leaving them off is worth it: filling takes the host two launches
#: more, and writes all zeros; and heads that follow one another by tiles share less in the L2.
_BLOCKS, _SHARE = 256, 0.5


class KeyGrid(NamedTuple):
    """Blocks of a launch, and how many heads run side by side.

    ``clears``: gradients of key and value are filled with 0 before it, as it writes those of the first keys alone.
    """

    blocks: int
    section: int
    clears: bool = False


def seen_keys(p: Problem) -> int:
    """The first so many keys are all that any query sees, whatever lengths and masks say."""
    _, after = p.reach
    if p.varlen or p.bottom_right or after is None:
        return p.seq_k
    return max(0, min(p.seq_k, p.seq_q + after))


def key_grid(p: Problem, keys: int, section: int, splits: int = 1) -> KeyGrid:
    """The grid of blocks that have ``keys`` keys of one key head, of which ``section`` run side by side.

    With ``splits`` blocks leave parts, which are added up for every key.
    """
    heads = p.batch * p.heads_kv
    tiles, seen = (arithmetic.tiles(length, keys) for length in (p.seq_k, seen_keys(p)))
    left_off = tiles - seen
    if splits > 1 or heads * left_off < _BLOCKS or left_off < _SHARE * tiles:
        return KeyGrid(heads * tiles * splits, section)
    return KeyGrid(heads * seen, heads, clears=True)
