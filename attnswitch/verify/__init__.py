"""The verifier: tries every backend of a machine on drawn cases, and holds what comes back to properties.

    drawing  cases, what Hypothesis draws, and their data      checks   the properties, one of which is the reference
    launch   a case through the public calls                   trial    one case on one backend, and running it again
    truth    the float64 answer, and how far rounding goes     judge    one case on some backends: verdicts
    session  a whole run: workers, shrinking, saved cases      outcome  what a verdict is
    report   a run as JSON, JUnit, HTML and others             mutants  faulty backends, by which the verifier is tested
    emulation  what lets a CPU check a kernel for GPUs         demands  precision and problems that a run demands
    terms      on which a process judges                      court    kernels apart from what judges them

This is library code, used alike by the tests and by ``attnswitch verify``. Names are loaded when they are first used:
judging a case needs nothing of a run, Hypothesis least of all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnswitch.verify.drawing.case import Case, MaskRecipe, Placing
    from attnswitch.verify.drawing.strategies import Space, cases
    from attnswitch.verify.judge import check, examine
    from attnswitch.verify.outcome import AUTO, Failure, Outcome
    from attnswitch.verify.report.document import to_json
    from attnswitch.verify.report.html import to_html
    from attnswitch.verify.report.joined import joined
    from attnswitch.verify.report.junit import to_junit
    from attnswitch.verify.report.ndjson import EventLog
    from attnswitch.verify.report.pytest_file import to_pytest
    from attnswitch.verify.report.summary import to_markdown
    from attnswitch.verify.session.corpus import Saved, default_folder, load
    from attnswitch.verify.session.plan import EXAMPLES, Plan, Target, targets
    from attnswitch.verify.session.shard import Shard
    from attnswitch.verify.session.tally import Found, Report
    from attnswitch.verify.session.whole import run

__all__ = [
    "AUTO",
    "EXAMPLES",
    "Case",
    "EventLog",
    "Failure",
    "Found",
    "MaskRecipe",
    "Outcome",
    "Placing",
    "Plan",
    "Report",
    "Saved",
    "Shard",
    "Space",
    "Target",
    "cases",
    "check",
    "default_folder",
    "examine",
    "joined",
    "load",
    "run",
    "targets",
    "to_html",
    "to_json",
    "to_junit",
    "to_markdown",
    "to_pytest",
]

_PLACES = {
    "drawing.case": ("Case", "MaskRecipe", "Placing"),
    "drawing.strategies": ("Space", "cases"),
    "judge": ("check", "examine"),
    "outcome": ("AUTO", "Failure", "Outcome"),
    "report.document": ("to_json",),
    "report.html": ("to_html",),
    "report.joined": ("joined",),
    "report.junit": ("to_junit",),
    "report.ndjson": ("EventLog",),
    "report.pytest_file": ("to_pytest",),
    "report.summary": ("to_markdown",),
    "session.whole": ("run",),
    "session.corpus": ("Saved", "default_folder", "load"),
    "session.plan": ("EXAMPLES", "Plan", "Target", "targets"),
    "session.shard": ("Shard",),
    "session.tally": ("Found", "Report"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name, from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
