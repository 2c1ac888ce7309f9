"""The verifier: fuzzes every backend of a machine against float64, with an error bound for every element.

    case        one problem and the recipe for its data     oracle, rows    the float64 answer, in two independent forms
    strategies  what Hypothesis draws                       bounds          how far rounding can take a right kernel
    provider    where its choices come from                 checks          one case on some backends: verdicts
    data        the recipe's numbers, from a hash           runner          a whole run: corpus, fuzzing, shrinking
    layouts     the same numbers, differently in memory     corpus, report  saved cases; JSON and JUnit
    compare     results against bounds, element by element  environment     versions and devices of a result
    unguarded   running a backend on what it refuses

This is library code, used alike by the tests and by ``attnswitch verify``.
"""

from attnswitch.verify.case import Case, MaskRecipe, Placing
from attnswitch.verify.checks import AUTO, Outcome, check, examine
from attnswitch.verify.compare import Failure
from attnswitch.verify.corpus import Saved, default_folder, load
from attnswitch.verify.report import to_json, to_junit
from attnswitch.verify.runner import EXAMPLES, Found, Plan, Report, Target, run, targets
from attnswitch.verify.strategies import Space, cases

__all__ = [
    "AUTO",
    "EXAMPLES",
    "Case",
    "Failure",
    "Found",
    "MaskRecipe",
    "Outcome",
    "Placing",
    "Plan",
    "Report",
    "Saved",
    "Space",
    "Target",
    "cases",
    "check",
    "default_folder",
    "examine",
    "load",
    "run",
    "targets",
    "to_json",
    "to_junit",
]
