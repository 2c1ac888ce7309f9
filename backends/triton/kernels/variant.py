"""What a kernel is compiled for, as its one compile-time argument."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Variant"]


class Variant(NamedTuple):
    """Sizes of a tile, and what is known of the problem. Kernels call it ``how``."""

    #: Queries and keys in a tile; the head dimensions, padded to powers of two.
    block_m: int
    block_n: int
    block_d: int = 16
    block_dv: int = 16
    #: Head dimensions that are not padded, and lengths that are multiples of a tile.
    even_d: bool = False
    even_dv: bool = False
    even_q: bool = False
    even_k: bool = False
    #: Scores are q . k times a positive factor and nothing else, which becomes a part of exp2.
    fold: bool = False
    softcap: bool = False
    #: NO_MASK, BOOL_MASK or FLOAT_MASK of ``tile``.
    mask_kind: int = 0
    dropout: bool = False
    has_lengths: bool = False
    #: Whether a query sees no farther than so many keys to the left, or to the right.
    has_left: bool = False
    has_right: bool = False
    #: Tiles are visited as ``lists`` says.
    listed: bool = False
    #: K and V (or Q and dO) are tensor descriptors; and so are the rows that a program owns, Q and OUT.
    tma: bool = False
    tma_rows: bool = False
    #: Triton has to be told that rows are aligned to 16 bytes, and that zeros follow what ends within 16.
    aligned: bool = False
    #: Offsets within a tile may take more than 32 bits.
    wide: bool = False
    #: Rows are the queries of all heads that share a key head.
    packed: bool = False
    #: Programs take a part of the keys each, which ``merge`` puts together.
    split: bool = False
    #: The kernel before, or after, runs at the same time up to where it waits.
    overlap: bool = False
    #: One loop over all tiles, each with every edge, and what is told of a problem by numbers is asked at run time.
    generic: bool = False
    #: Heads are wider than a tile: ``block_d`` and ``block_dv`` are columns of a panel (``panels.py``).
    panelled: bool = False
    #: Batch entries are sequences one after another (``varlen.py``).
    varlen: bool = False
    #: One more key for every row, which the forward counts where keys are not split.
    sinks: bool = False
    #: A slope times the distance from query to key is taken from the scores.
    alibi: bool = False
    #: Keys lie in pages (``paged.py``).
    paged: bool = False
    #: They are of 8 bits, each times a scale of its page.
    scaled: bool = False
    #: Bits name which of the newest keys, those of the queries themselves, each query sees.
    tree: bool = False
