"""Known divergences: what a backend takes and is known to get wrong, as data that lies beside the backend.

What a kernel does not do is code, in its backend's ``supports``. What it does and gets wrong, by a wrong answer or a
crash, in some versions of some software, is an entry of a TOML file. The backend names that file in its attribute
``divergences`` as ``"package:file.toml"``, and the dispatcher refuses what an entry covers.

    [[divergence]]
    id = "flash-cpu-grouped-heads"    # unique in the file
    backend = ["sdpa-flash"]          # names of the classes that it holds for
    device = "cpu"                    # left out: on every device
    capability = "==9.*"              # of a GPU; left out: any
    versions = { torch = "<2.11" }    # each as in PEP 440; left out: every version seen so far
    when = ["group > 1"]              # conditions on the problem, all of which hold
    symptom = "reads out of bounds"   # what is wrong, for whoever reads the file
    reason = "{heads_q} query heads share {heads_kv}: ..."    # what the user reads; facts of the problem in braces
    link = ""                         # the public issue, or "" if there is none
    cases = []                        # files of fixtures/corpus that show it
    report = ""                       # file of fixtures/divergences that says so upstream, or ""

``mended`` in place of ``reason`` says how the backend makes the call right nevertheless. Such an entry refuses nothing;
it is there to know when the mending can go.

A condition is an expression in Python's notation, which is walked and never run. It knows the facts of a ``Problem``,
which are its fields and properties (``seq_k``, ``group``, ``mask.dtype``, ``query.strided``); numbers and the names of
dtypes and alignments; ``+ - * % **``, comparisons, ``in (a, b)``, ``not``, ``and``, ``or``. Whatever compares with a
fact that is not there (a scale that was left out, the dtype of no mask) is false.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from attnswitch.errors import AttnswitchError
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Alignment, Mask, Memory, Problem

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["Divergence", "condition", "load", "refused"]


def _names(kind: type) -> set[str]:
    derived = {name for name, member in vars(kind).items() if isinstance(member, property)}
    return derived | set(getattr(kind, "_fields", None) or (field.name for field in fields(kind)))


#: Fields that have facts of their own, with a problem that has them all.
PARTS = {"mask": Mask, "query": Memory, "key": Memory, "value": Memory, "attn_mask": Memory}
FACTS = _names(Problem) | {f"{part}.{name}" for part, kind in PARTS.items() for name in _names(kind)}
#: Names that stand for themselves.
WORDS = {*DTYPES, "bool", *get_args(Alignment)}
#: What every condition is tried on when it is loaded: a problem with every part, and one with none.
SAMPLES = (
    Problem(1, 1, 1, 2, 2, 8, 8, "float32", window=(0, 0), mask=Mask("float32"), scale=1.0),
    Problem(1, 1, 1, 2, 2, 8, 8, "float32"),
)
Read = Callable[[Problem], Any]
#: How two facts are compared by an operator of Python's.
Compare = Callable[[Callable[[Any, Any], bool], Any, Any], bool]
ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def condition(text: str) -> Read:
    """What is true of the problems that a condition holds for. Raises ``ValueError`` for what is no condition."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        strict = _read(node, _compare_alike)
        for sample in SAMPLES:
            strict(sample)
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"condition {text!r}: {error}") from error
    return _read(node, _compare)  # a fact has one type, which has now been tried


def _read(node: ast.expr, compare: Compare) -> Read:
    """How to read ``node`` off a problem. Raises ``ValueError`` for what is not in the language."""
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return lambda problem: number
        case ast.Name() | ast.Attribute():
            return _fact(ast.unparse(node))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            whole = _read(part, compare)
            return lambda problem: not whole(problem)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as part):
            whole = _read(part, compare)
            return lambda problem: -whole(problem)
        case ast.BoolOp(op=op, values=parts):
            reads, joined = [_read(part, compare) for part in parts], all if isinstance(op, ast.And) else any
            # Lists: every part is looked at, so that loading meets every mistake.
            return lambda problem: joined([read(problem) for read in reads])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            if isinstance(op, ast.Mod | ast.Pow) and not _small(right, 64 if isinstance(op, ast.Pow) else 2**31):
                raise ValueError(f"{ast.unparse(node)!r}: % takes a number on its right, and ** one up to 64")
            one, two, computed = _read(left, compare), _read(right, compare), ARITHMETIC[type(op)]
            return lambda problem: computed(one(problem), two(problem))
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple(elts=parts)]):
            one, several = _read(left, compare), [_read(part, compare) for part in parts]
            return lambda problem: any(compare(operator.eq, one(problem), item(problem)) for item in several)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            one, two, compared = _read(left, compare), _read(right, compare), COMPARISONS[type(op)]
            return lambda problem: compare(compared, one(problem), two(problem))
    raise ValueError(f"{ast.unparse(node)!r} is not part of the language of conditions")


def _small(node: ast.expr, most: int) -> bool:
    """Whether it is a positive number as written: no condition divides by zero or computes for long."""
    return isinstance(node, ast.Constant) and type(node.value) is int and 0 < node.value <= most


def _compare(compared: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    return left is not None and right is not None and compared(left, right)


def _compare_alike(compared: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """The same; raises ``TypeError`` for facts of which one is a number and the other is none."""
    if left is None or right is None:
        return False
    if not any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, int | float)):
        raise TypeError(f"{left!r} and {right!r} do not compare")
    return compared(left, right)


def _fact(name: str) -> Read:
    if name in WORDS:
        return lambda problem: name
    if name not in FACTS:
        raise ValueError(f"{name!r} is no fact of a Problem (attnswitch/problem/problem.py)")
    part, _, detail = name.partition(".")
    if not detail:
        return operator.attrgetter(name)
    return lambda problem: getattr(getattr(problem, part), detail, None)


#: Software whose versions a device knows.
SOFTWARE = ("torch", "cuda", "cudnn", "driver", "cupy")
#: Stands for a version that is not known: nothing that was fixed is held against it.
NEWEST = (9999,)
REQUIRED = {"id": str, "backend": list, "when": list, "symptom": str, "link": str, "cases": list, "report": str}
OPTIONAL = {"device": str, "capability": str, "versions": dict, "reason": str, "mended": str}


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """One entry."""

    id: str
    backend: tuple[str, ...]
    device: str | None
    capability: SpecifierSet | None
    versions: tuple[tuple[str, SpecifierSet], ...]
    when: tuple[Read, ...]
    symptom: str
    reason: str | None
    mended: str | None
    link: str
    cases: tuple[str, ...]
    report: str

    def on(self, device: Device) -> bool:
        """Whether ``device`` and its software have the fault, whatever the problem."""
        if self.device not in (None, device.kind):
            return False
        if self.capability is not None and not (device.capability and _within(device.capability, self.capability)):
            return False
        return all(_within(device.version(software) or NEWEST, allowed) for software, allowed in self.versions)

    def covers(self, problem: Problem) -> bool:
        """Whether ``problem`` meets the fault, on a device that has it."""
        for holds in self.when:  # noqa: SIM110 - every new problem is asked, and ``all`` takes twice as long
            if not holds(problem):
                return False
        return True

    def why(self, problem: Problem) -> str:
        """The reason to refuse ``problem``, and where to read more."""
        said = re.sub(r"\{([\w.]+)\}", lambda found: str(_fact(found[1])(problem)), self.reason or "")
        return f"{said} (divergence {self.id}{', ' if self.link else ''}{self.link})"


def _within(version: tuple[int, ...], allowed: SpecifierSet) -> bool:
    """Numbers only: ``2.11.0+cu130`` counts as 2.11.0, and a build on the way to 2.16 as 2.16."""
    return ".".join(map(str, version)) in allowed


@functools.cache
def load(source: str | Path) -> tuple[Divergence, ...]:
    """The entries of a file, which is a path or ``"package:file"``.

    Raises ``AttnswitchError``, naming the file, the entry and the condition at fault.
    """
    import tomllib  # slow to import
    from importlib import resources

    try:
        if isinstance(source, Path):
            text = source.read_text(encoding="utf-8")
        else:
            package, _, name = source.partition(":")
            text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, ImportError, ValueError) as error:
        raise AttnswitchError(f"divergences of {source}: cannot be read: {type(error).__name__}: {error}") from error
    listed = tables.pop("divergence", None)
    if tables or not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise AttnswitchError(f"divergences of {source}: expected [[divergence]] tables and nothing else")
    entries: list[Divergence] = []
    for number, table in enumerate(listed, 1):
        name = table.get("id", f"number {number}")
        try:
            entry = _entry(table)
            if any(other.id == entry.id for other in entries):
                raise ValueError("another entry has the same id")
        except ValueError as error:
            raise AttnswitchError(f"divergences of {source}, entry {name}: {error}") from error
        entries.append(entry)
    return tuple(entries)


def _entry(table: dict[str, Any]) -> Divergence:
    """One table, held against the form above. Raises ``ValueError``."""
    for key, kind in (REQUIRED | OPTIONAL).items():
        if key in REQUIRED and key not in table:
            raise ValueError(f"{key} is missing")
        if key in table and not isinstance(table[key], kind):
            raise ValueError(f"{key}={table[key]!r}: expected a {kind.__name__}")
        if kind is list and not all(isinstance(item, str) for item in table[key]):
            raise ValueError(f"{key}={table[key]!r}: expected strings")
    if unknown := table.keys() - (REQUIRED | OPTIONAL):
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", table["id"]):
        raise ValueError(f"id={table['id']!r}: expected lower-case words joined by hyphens")
    if ("reason" in table) == ("mended" in table):
        raise ValueError("expected either reason or mended")
    versions = table.get("versions", {})
    if unknown := versions.keys() - SOFTWARE:
        raise ValueError(f"versions of {', '.join(sorted(unknown))}: expected some of {', '.join(SOFTWARE)}")
    read = {
        "backend": tuple(table["backend"]),
        "capability": _range("capability", table["capability"]) if "capability" in table else None,
        "versions": tuple((software, _range(software, allowed)) for software, allowed in versions.items()),
        "when": tuple(map(condition, table["when"])),
        "cases": tuple(table["cases"]),
    }
    entry = Divergence(**(dict.fromkeys(OPTIONAL) | table | read))
    entry.why(SAMPLES[0])  # a fact in braces that does not exist is found here
    return entry


def _range(what: str, text: str) -> SpecifierSet:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # slow to import

    try:
        return SpecifierSet(text)
    except (InvalidSpecifier, TypeError, AttributeError) as error:
        raise ValueError(f"{what} {text!r}: expected a range of versions such as '>=9.19,<9.26'") from error


#: Entries of a file that hold for a backend on a device, by the device's id: to hash one takes as long as the rest.
_kept: dict[tuple[str | Path, str, int], tuple[Device, tuple[Divergence, ...]]] = {}
_MOST = 256


def _on(source: str | Path, backend: str, device: Device) -> tuple[Divergence, ...]:
    """Remembered apart from the problem: comparing versions costs more than all the rest."""
    known = _kept.get((source, backend, id(device)))
    if known is None or known[0] is not device:
        entries = tuple(entry for entry in load(source) if backend in entry.backend and entry.on(device))
        if len(_kept) >= _MOST:
            _kept.clear()
        known = _kept[source, backend, id(device)] = device, entries
    return known[1]


def refused(backend: Any, problem: Problem, device: Device) -> Iterator[str]:
    """Why known divergences keep ``backend`` from ``problem`` on ``device``, as far as it is asked.

    Nothing where the backend names no file.
    """
    if backend.divergences:
        for entry in _on(backend.divergences, backend.name, device):
            if entry.reason is not None and entry.covers(problem):
                yield entry.why(problem)
