"""Tasks and answers by way of the launcher's store, which takes messages of a few megabytes."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["come", "drop", "key_of", "put", "take"]

#: Bytes of a message: torch's store refuses more than 8 MiB, and drops whoever sends it.
_MOST = 2**22


def key_of(what: str, number: int, rank: int | None = None) -> str:
    """The key of a task, of a rank's answer to it, or of the word that nobody waits for that any more."""
    return f"attnswitch/{what}/{number}" if rank is None else f"attnswitch/{what}/{number}/{rank}"


def put(store: Any, key: str, message: Any) -> None:
    """Leave ``message`` under ``key``."""
    data = pickle.dumps(message)
    parts = range(0, len(data), _MOST)
    for n, start in enumerate(parts):
        store.set(f"{key}/part/{n}", data[start : start + _MOST])
    store.set(key, str(len(parts)))


def come(store: Any, key: str) -> bool:
    """Whether there is a message."""
    return bool(store.check([key]))


def take(store: Any, key: str) -> Any:
    """The message under ``key``, which stays there."""
    return pickle.loads(b"".join(map(store.get, _parts(store, key))))


def drop(store: Any, key: str) -> None:
    """Leave nothing of the message under ``key``."""
    for part in (*_parts(store, key), key):
        store.delete_key(part)


def _parts(store: Any, key: str) -> list[str]:
    return [f"{key}/part/{n}" for n in range(int(store.get(key)))]
