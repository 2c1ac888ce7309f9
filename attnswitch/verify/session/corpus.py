"""Saved cases: one JSON file each, which replays the failure anywhere and is replayed first by every later run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attnswitch import files, reading
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.names import one_of, shown
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.data import ALIBI_KINDS, DISTRIBUTIONS, MASK_KINDS, SINK_KINDS
from attnswitch.verify.drawing.placings import FAR, PLACINGS
from attnswitch.verify.drawing.stored import SCALE_KINDS
from attnswitch.verify.drawing.trees import TREE_KINDS
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.session.tally import Report

__all__ = ["WORST", "Saved", "default_folder", "digest", "load", "read_all", "save", "save_worst"]

SCHEMA = 1
_FIELDS = {
    "backend": str,
    "device": str,
    "case": dict,
    "failure": dict | None,
    "note": str | None,
}
_BACKEND = re.compile(r"[\w.@+-]+(:[\w.]+)?")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
#: Folder, within the corpus, of each backend's worst case.
WORST = "worst"


@dataclass(frozen=True, slots=True)
class Saved:
    """A case on file, with the backend and device that it concerns."""

    path: Path
    case: Case
    backend: str
    device: str
    check: str
    note: str


def default_folder() -> Path:
    """ATTNSWITCH_CORPUS if set; ``fixtures/corpus`` in the clone that this package is of; else the user's data folder.

    A folder of that name elsewhere may be anybody's. A user without a home has it in the cache folder.
    """
    if named := os.environ.get("ATTNSWITCH_CORPUS"):
        return Path(named)
    here = Path("fixtures/corpus")
    if here.is_dir() and _in_its_clone():
        return here
    from platformdirs import user_data_path

    try:
        folder = user_data_path("attnswitch")
    except RuntimeError:  # no home
        folder = files.cache_folder()
    return (folder if folder.is_absolute() else files.cache_folder()) / "corpus"


def _in_its_clone() -> bool:
    """Whether the current folder is the clone that this package runs from."""
    root = Path(files.__file__).parents[1]
    return (root / "pyproject.toml").is_file() and root.samefile(Path.cwd())


def save(outcome: Outcome, folder: Path, facts: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write a failed outcome; the file is named by what failed, and a file that says the same is kept.

    ``facts`` are added to what is recorded of the environment.
    """
    assert outcome.failure is not None
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": outcome.backend,
        "device": outcome.device,
        "problem": str(outcome.case.problem()),
        "case": outcome.case.to_json(),
        "failure": asdict(outcome.failure),
        "chosen": outcome.chosen,
        "environment": {**provenance(), **facts},
        "note": "",
    }
    words = (outcome.backend.rpartition(":")[2], outcome.device.replace(":", ""), outcome.failure.title)
    plain = "-".join("".join(letter if letter.isalnum() or letter == "-" else " " for letter in word) for word in words)
    stem = f"{'-'.join(plain.split())}-{digest(outcome.case)}"
    path = folder / f"{stem}.json"
    files.replace(path, f"{json.dumps(record, indent=2, default=str)}\n".encode())
    return path


def save_worst(report: Report, folder: Path) -> list[Path]:
    """Write each backend's worst case, unless the one that is saved is as bad; the files that were written.

    The next run replays them with the others, so that an error that grows shows.
    """
    worst: dict[tuple[str, str], tuple[float, Case]] = {}
    for (device, backend, _), tally in report.tallies.items():
        key = device.split(":")[0], backend
        if tally.worst_case is not None and tally.worst > worst.get(key, (0.0,))[0]:
            worst[key] = tally.worst, tally.worst_case
    written = []
    for (device, backend), (ratio, case) in sorted(worst.items()):
        name = re.sub(r"[^\w.@+-]+", "-", backend)  # of a target, a path and more
        path = folder / WORST / f"{device}-{name}.json"
        if _ratio(path) >= ratio:
            continue
        record = {
            "schema": SCHEMA,
            "backend": backend,
            "device": "cpu" if device == "cpu" else f"{device}:0",
            "problem": str(case.problem()),
            "case": case.to_json(),
            "ratio": ratio,
            "environment": report.environment,
            "note": "the largest error in units of its bound that was met; right up to 1",
        }
        files.replace(path, f"{json.dumps(record, indent=2)}\n".encode())
        written.append(path)
    return written


def digest(case: Case) -> str:
    """Eight digits that name a case."""
    import hashlib

    return hashlib.sha256(json.dumps(case.to_json(), sort_keys=True).encode()).hexdigest()[:8]


def _ratio(path: Path) -> float:
    """How bad a saved worst case is; 0 if there is none that can be read."""
    try:
        ratio: float = reading.table(reading.load(path), {"ratio": float})["ratio"]
    except (InvalidProblem, OSError):
        return 0.0
    return ratio


def load(path: Path) -> Saved:
    """Read a saved case.

    Raises:
        InvalidProblem: the file is not a saved case, or of a schema this version does not know.
        OSError: it cannot be read.
    """
    try:
        record = reading.load(path)
        schema = reading.table(record, {"schema": int})["schema"]
        if schema != SCHEMA:
            raise InvalidProblem(f"it is of schema {schema}, and this version reads schema {SCHEMA}")
        values = reading.table(record, _FIELDS)
        failure = reading.table(values["failure"] or {}, {"check": str | None}, "failure")
        _check_names(values["backend"], values["device"])
        case = Case.from_json(values["case"])
        _check(case, values["device"])
    except InvalidProblem as problem:
        raise InvalidProblem(f"{path} is not a saved case: {problem}") from None
    check, note = failure["check"] or "", values["note"] or ""
    return Saved(path, case, values["backend"], values["device"], check, note)


def _check_names(backend: str, device: str) -> None:
    """Raise ``InvalidProblem`` for what names neither: both are handed on, to commands and to files."""
    if not (_BACKEND.fullmatch(backend) or registry.is_function(backend)):
        raise InvalidProblem(f"backend is {shown(backend)}: expected a name, or a target such as package.module:Class")
    if not _DEVICE.fullmatch(device):
        raise InvalidProblem(f"device is {shown(device)}: expected cpu, cuda, or one of many such as cuda:1")


def _check(case: Case, device: str) -> None:
    """Raise ``InvalidProblem`` for a recipe that names what there is not."""
    placings = tuple(asdict(case.placing).values())
    kinds = MASK_KINDS if case.mask is not None else ()
    for what, value, known in (
        ("library", case.library, ("numpy", "torch", "cupy")),
        ("layout", case.layout, ("BHLD", "BLHD")),
        ("data", case.data, DISTRIBUTIONS),
        ("sinks", case.sinks, ("", *SINK_KINDS)),
        ("alibi", case.alibi, ("", *ALIBI_KINDS)),
        ("scales", case.scales, SCALE_KINDS if case.cache else ("",)),
        ("tree", case.tree, ("", *TREE_KINDS)),
        ("check", case.check, [check.name for check in CHECKS]),
        *(("placing", placing, (*PLACINGS, FAR)) for placing in placings),
        *(("mask.kind", case.mask.kind, kinds) for _ in kinds[:1] if case.mask is not None),
    ):
        if value not in known:
            raise InvalidProblem(f"case.{what} is {shown(value)}: {one_of(value, known)}")
    if case.library == "cupy" and device == "cpu":
        raise InvalidProblem("case.library is 'cupy' and the device cpu: CuPy has arrays on GPUs alone")
    if case.cache and case.poison:
        raise InvalidProblem("case.poison with case.cache: what is stored in 8 bits has no NaN and no inf to hide")
    if FAR in placings and (case.page or case.batch * case.heads_q > 1):
        raise InvalidProblem(f"case.placing is {FAR}: expected one batch entry and head, without pages")
    for what, number in (("data_seed", case.data_seed), ("dropout_seed", case.dropout_seed or 0)):
        if number < 0:
            raise InvalidProblem(f"case.{what} is {number}: expected an integer from 0 to 2**64 - 1")


def read_all(folder: Path, passed_over: list[str] | None = None) -> Iterator[Saved]:
    """The saved cases of a folder, by name.

    Of what ``load`` raises, ``passed_over`` takes the sentences; without it, the first is raised.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            if not path.is_file():  # what is a pipe may never end
                raise InvalidProblem(f"{path} is not a saved case: it is no file")
            yield load(path)
        except (InvalidProblem, OSError) as problem:
            if passed_over is None:
                raise
            passed_over.append(str(problem))
