"""Packs: cubins that were compiled before anyone asked, an archive for each architecture.

A pack comes with the package, if the wheel was built with one, or lies in the cache folder, where ``attnswitch build``
puts it. A kernel in it is known by a digest of its sources and options, and checked by its hash when it is taken out.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnswitch import files

from . import cache

__all__ = ["OWN", "Pack", "any_there", "cached", "compilers", "has", "kept", "kernel", "there", "write"]

#: What comes with the package.
OWN = Path(__file__).parents[1] / "packs"
_INDEX = "index.json"


def cached() -> Path:
    """The folder of this machine's own packs."""
    return cache.folder() / "packs"


class Pack:
    """One archive, opened: its ``compiler``, a digest of the ``sources``, and the digests of its kernels."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.parent == OWN else files.read_own(path)
        self.path, self._archive = path, zipfile.ZipFile(io.BytesIO(content))
        index = json.loads(self._archive.read(_INDEX))
        self.compiler: str = index["compiler"]
        self.sources: str = index["sources"]
        self._hashes: dict[str, str] = dict(index["kernels"])

    def __contains__(self, digest: str) -> bool:
        return digest in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes)

    def take(self, digest: str) -> bytes:
        """The cubin known by ``digest``. Raises ``ValueError`` if it is not what was put in."""
        cubin = self._archive.read(digest)
        if hashlib.sha256(cubin).hexdigest() != self._hashes[digest]:
            raise ValueError(f"{digest} is damaged")
        return cubin


def kept(path: Path, compiler: str, sources: str) -> dict[str, bytes]:
    """The kernels of the pack at ``path``, if it is by this compiler of these sources; none of one that is damaged."""
    try:
        pack = Pack(path)
        same = (pack.compiler, pack.sources) == (compiler, sources)
        return {digest: pack.take(digest) for digest in pack} if same else {}
    except Exception:  # whatever zipfile, lzma and the file system make of it
        return {}


def write(path: Path, compiler: str, sources: str, kernels: Mapping[str, bytes]) -> None:
    """Write a pack of cubins by their digests. The same kernels come to the same bytes."""
    content = io.BytesIO()
    hashes = {digest: hashlib.sha256(kernels[digest]).hexdigest() for digest in sorted(kernels)}
    index = {"compiler": compiler, "sources": sources, "kernels": hashes}
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as archive:
        members = {_INDEX: json.dumps(index).encode(), **kernels}
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name), members[name], zipfile.ZIP_LZMA)
    files.replace(path, content.getvalue(), private=path.parent == cached())


def kernel(arch: str, digest: str) -> bytes | None:
    """The cubin for ``arch`` that is known by ``digest``, if a pack has it. One that is damaged is warned of."""
    for pack in _packs(arch):
        if digest in pack:
            try:
                return pack.take(digest)
            except Exception as error:  # whatever zipfile and lzma make of it
                _warn(pack.path, error)
    return None


def has(arch: str, digest: str) -> bool:
    """Whether a pack for ``arch`` has it."""
    return any(digest in pack for pack in _packs(arch))


def any_there() -> bool:
    """Whether there is any pack."""
    return any(path for folder in _folders() for path in folder.glob("*.zip"))


def there(arch: str) -> bool:
    """Whether there is a pack for ``arch``."""
    return next(_packs(arch), None) is not None


def compilers(arch: str, sources: str) -> tuple[str, ...]:
    """What compiled the packs for ``arch`` that are of these sources, in the order in which they are looked into."""
    return tuple(pack.compiler for pack in _packs(arch) if pack.sources == sources)


def _folders() -> tuple[Path, ...]:
    return (OWN,) if cache.distrust() else (cached(), OWN)


def _packs(arch: str) -> Iterator[Pack]:
    for folder in _folders():
        pack = _opened(folder / f"{arch}.zip")
        if pack is not None:
            yield pack


@functools.lru_cache(maxsize=64)
def _opened(path: Path) -> Pack | None:
    try:
        return Pack(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # as above
        _warn(path, error)
        return None


def _warn(path: Path, error: Exception) -> None:
    warnings.warn(
        f"{path}: {type(error).__name__}: {error}; its kernels are compiled instead. `attnswitch build` makes it anew",
        RuntimeWarning,
        stacklevel=2,
    )
