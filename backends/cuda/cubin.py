"""What a compiled kernel takes of a GPU, read from its cubin: an ELF file, whose sections ``.nv.info`` say it.

The attributes are those that ``cuobjdump --dump-elf`` names EIATTR_REGCOUNT and EIATTR_FRAME_SIZE: each a pair of a
symbol's index and a number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Usage", "usage"]

_REGISTERS, _FRAME = 0x2F, 0x11
#: Formats of an attribute: none, one byte, two bytes, sized.
_SIZED = 0x04


class Usage(NamedTuple):
    """Of a thread: registers, and bytes of local memory, which is where registers spill to."""

    registers: int
    local: int


def usage(cubin: bytes) -> Usage:
    """Of the one kernel in ``cubin``. Raises ``ValueError`` if it does not say."""
    found: dict[int, int] = {}
    for name, content in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute in (_REGISTERS, _FRAME):
                    found[attribute] = max(found.get(attribute, 0), struct.unpack("<II", value)[1])
    if len(found) != 2:
        raise ValueError("the cubin does not say how many registers its kernel takes")
    return Usage(found[_REGISTERS], found[_FRAME])


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + n * size) for n in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = text + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + length]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        length = size if form == _SIZED else 0
        yield attribute, content[at + 4 : at + 4 + length]
        at += 4 + length
