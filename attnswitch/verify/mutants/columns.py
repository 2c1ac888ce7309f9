"""Every check alone, on the same cases of every mutant: those that it sees, with the number of the case."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from attnswitch.verify.checks import named
from attnswitch.verify.drawing import lattice
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.judge import apart
from attnswitch.verify.mutants.kills import together
from attnswitch.verify.session.explore import draw

__all__ = ["COLUMN_CASES", "columns"]

#: Drawn cases that every check looks at alone, of so many that it may apply to.
COLUMN_CASES, _DRAWN = 16, 400
#: They are small: a check that needs great lengths gets those of the lattice besides.
_SPACE = Space(work=2**17, longest=300)

#: By check, the targets that it sees, with the number of the case among its own.
Columns = dict[str, dict[str, int]]


def columns(checks: Sequence[str], targets: Sequence[str], far: Collection[str], seed: int) -> Columns:
    """What each of ``checks`` sees of ``targets`` when it looks alone; the checks share the runs that they look at.

    Only the targets of ``far`` get the cases of the lattice as well.
    """
    found: Columns = {check: {} for check in checks}
    numbers = dict.fromkeys(checks, 0)

    def look(case: Case, looking: Sequence[str], targets: Sequence[str]) -> None:
        for check in looking:
            numbers[check] += 1
        wanted = {target: [check for check in looking if target not in found[check]] for target in targets}
        for some in together(case, [target for target, left in wanted.items() if left]):
            for check, outcome in apart(case, {target: wanted[target] for target in some}):
                if outcome.verdict == "mismatch":
                    found[check][outcome.backend] = numbers[check]

    for case in _drawn(seed):
        suiting = [check for check in checks if numbers[check] < COLUMN_CASES and named(check).suits(case, "cpu")]
        look(case, suiting, targets)
    few = [target for target in targets if target in far]
    for case in (*lattice.probes(Space(), False), *lattice.long(Space(), False), *lattice.extremes(Space())):
        if case.check in checks:
            look(case, [case.check], few)
    return found


@functools.cache
def _drawn(seed: int) -> list[Case]:
    """The cases that every check chooses from."""
    return draw(_SPACE, seed, _DRAWN)
