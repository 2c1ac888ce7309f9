"""Wisdom as a file to carry from machine to machine. It is taken whole and unchanged, or refused.

The first line holds the number of the lines below it and their SHA-256, which reveals a file that was cut off, even
between two lines.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnswitch import files, reading
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.wisdom import store, view
from attnswitch.wisdom.compact import newest
from attnswitch.wisdom.record import Record, from_line, to_line
from attnswitch.wisdom.signature import machine, sign
from attnswitch.wisdom.view import Wisdom

__all__ = ["adopt", "content", "foreign", "held", "newest", "read", "write"]

VERSION = 1
_TARGET = "it is a target, which is code to import: what was measured of one stays on its machine"
_HEAD = b'{"wisdom":'
_FIELDS = {"wisdom": int, "lines": int, "sha256": str}


def write(records: Iterable[Record], path: Path) -> None:
    """Write ``records`` as such a file. After an ``OSError`` the file is as it was."""
    files.replace(path, content(records))


def content(records: Iterable[Record]) -> bytes:
    """The bytes of such a file."""
    lines = [to_line(record) for record in records]
    body = b"".join(lines)
    head = {"wisdom": VERSION, "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


def read(path: Path) -> list[Record]:
    """The records of a file that ``write`` wrote.

    Raises:
        InvalidProblem: it is not such a file, or was cut off or changed; nothing of it may be used.
        OSError: it cannot be read.
    """
    try:
        head, _, body = reading.content(path).partition(b"\n")
    except InvalidProblem as problem:
        raise InvalidProblem(f"{path}: {problem}; nothing of it was taken") from None
    if not head.startswith(_HEAD):
        raise InvalidProblem(
            f"{path} is not a file of exported wisdom: its first line is not a head; `attnswitch wisdom export` writes"
            " such files"
        )
    try:
        version, lines, digest = reading.table(reading.parse(head), _FIELDS).values()
    except InvalidProblem:
        raise InvalidProblem(f"{path}, line 1: the head is damaged; export it again") from None
    if version != VERSION:
        raise InvalidProblem(f"{path} is of version {version}, and this version reads version {VERSION}")
    records = []
    for number, line in enumerate(body.splitlines(keepends=True), 2):
        try:
            records.append(from_line(line))
        except InvalidProblem as problem:
            raise InvalidProblem(f"{path}, line {number}: {problem}; nothing of it was taken") from None
    if len(records) != lines:
        raise InvalidProblem(
            f"{path} has {len(records)} lines of wisdom and was written with {lines}: it was cut off, or added to;"
            " nothing of it was taken"
        )
    if hashlib.sha256(body).hexdigest() != digest:
        raise InvalidProblem(f"{path} is not as it was written: its lines were changed; nothing of it was taken")
    return records


def foreign(record: Record, devices: Sequence[Device], among: Wisdom) -> str | None:
    """Why ``record`` does not hold with these devices and the software here, as half a sentence; None if it does.

    A mismatch of other versions holds until ``among`` has a later verdict that its case is right.
    """
    device = next((device for device in devices if machine(device) == record.signature.device), None)
    if device is None:
        return f"it was measured on {record.signature.device}, which is not in this machine"
    if not registry.is_known(
        record.backend
    ):  # a line is no reason to run code, so it is given the benefit of the doubt
        return None
    signature = sign(record.backend, device)
    if isinstance(signature, Missing):
        return signature.reason
    return None if record in among.standing(record.backend, device) else record.signature.differs(signature)


def held(records: Sequence[Record], devices: Sequence[Device]) -> tuple[list[Record], Counter[str]]:
    """The newest of ``records`` that hold here, and why the others do not: each reason with how many it applies to."""
    holding: list[Record] = []
    unused: Counter[str] = Counter()
    among = view.indexed(records)
    for record in newest(records):
        if why := foreign(record, devices, among):
            unused[f"{record.backend}: {why}"] += 1
        else:
            holding.append(record)
    return holding, unused


def adopt(path: Path, devices: Sequence[Device]) -> int:
    """Add all records of an exported file to the user's store, or none, and return how many there are.

    Raises:
        InvalidProblem: the file is damaged, or a line does not hold here; the text says which line and why.
        OSError: the file cannot be read, or the store cannot be written.
    """
    records = read(path)
    among = view.indexed(records)
    for number, record in enumerate(records, 2):
        target = ":" in record.backend  # to sign it would import it
        if why := _TARGET if target else foreign(record, devices, among):
            raise InvalidProblem(f"{path}, line {number} ({record.backend}): {why}; nothing of it was taken")
    store.here().change(lambda before: newest([*before, *records]))
    view.reload()
    return len(records)
