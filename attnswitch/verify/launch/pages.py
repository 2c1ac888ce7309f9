"""The keys and values of a case in the pages of a cache, as ``attention_paged`` takes them.

Pages are dealt at random, and some are nobody's. Equal ones are one page, which sequences share where their operands
repeat. NaN lies in pages of nobody and in rows past a length, and the table has numbers there that must not be used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnswitch.arrays import Array
from attnswitch.verify.drawing import stored
from attnswitch.verify.drawing.case import Case

__all__ = ["dealt", "placing"]

#: What stands in the table past the pages of a sequence: some of it names a page.
_UNUSED = (-1, 2**30, 0)
#: Pages of nobody, at most.
_NOBODYS = 3


def dealt(case: Case, data: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
    """The table (B, M), and the caches of "key" and "value", (P, H, page, D), with the values of ``data``.

    Where the case stores them in 8 bits the caches have the elements, and "key_scale" and "value_scale" the scales
    (P, H). Those of pages of nobody are NaN, unless the caller has no scale of each page.
    """
    lengths, page, width = case.lengths or (), case.page, case.seq_k // case.page
    numbers, contents = dict[bytes, int](), list[tuple[Array, ...]]()
    roles = ("key", "value", *(("key_scale", "value_scale") if case.cache else ()))
    named = np.full((case.batch, width), -1)
    for b, length in enumerate(lengths):
        keys, values = (_paged(data[role][b, :, :length], page) for role in ("key", "value"))
        scales = [data[role][b].swapaxes(0, 1) for role in roles[2:]]
        for at, content in enumerate(zip(keys, values, *(each[: len(keys)] for each in scales), strict=True)):
            number = numbers.setdefault(b"".join(part.tobytes() for part in content), len(contents))
            if number == len(contents):
                contents.append(content)
            named[b, at] = number
    count = len(contents) + 1 + case.data_seed % _NOBODYS
    places = np.random.default_rng(case.data_seed).permutation(count)
    unused = np.resize(np.roll(_UNUSED, case.data_seed), named.shape)
    table = np.where(named < 0, unused, places[named])
    caches = {}
    for which, role in enumerate(roles):
        shape = data[role].shape
        caches[role] = np.full((count, shape[1], page, shape[3]), math.nan) if which < 2 else np.ones((count, shape[1]))
        if which >= 2 and contents:
            caches[role][:] = math.nan if "page" in case.scales else contents[0][which]
        for number, content in enumerate(contents):
            caches[role][places[number]] = content[which]
    for role in roles[:2] if case.cache else ():
        caches[role] = stored.elements(caches[role] / caches[f"{role}_scale"][..., None, None], case.cache)
    return table, caches


def placing(kind: str, scales: str) -> str:
    """How a cache lies where its operand was to lie as ``kind``: its pages do not repeat, nor do their rows.

    Nor do the elements of heads, where each has ``scales`` of its own.
    """
    repeats = ("expanded-batch", "expanded-rows", *(("expanded-heads",) if "head" in scales else ()))
    return "contiguous" if kind in repeats else kind


def _paged(rows: Array, page: int) -> Array:
    """``rows`` (H, n, D) as pages (P, H, page, D), with NaN up to a whole one."""
    heads, length, columns = rows.shape
    count = -(-length // page)
    whole = np.full((heads, count * page, columns), math.nan)
    whole[:, :length] = rows
    return whole.reshape(heads, count, page, columns).swapaxes(0, 1)
