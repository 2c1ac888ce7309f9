"""The properties that ``attnswitch verify`` holds every backend to. To add one, write it and add it to ``CHECKS``.

form, reference, identities   looked at on every case, from the one run that there is anyway
probes                        operands whose right answer is known to the last bit
symmetry, hiding, composition laws that hold without a reference, at any length
repetition, surroundings      running again, and what is around a call
fences                        the same beside memory that nobody may touch
conduct                       what the runs before it left behind, so that it comes last
"""

from attnswitch.verify.checks import (
    composition,
    conduct,
    fences,
    form,
    hiding,
    identities,
    probes,
    reference,
    repetition,
    surroundings,
    symmetry,
)
from attnswitch.verify.checks.check import Check

__all__ = ["ALWAYS", "CHECKS", "DRAWN", "LAST", "Check", "named"]

#: Looked at behind all others.
LAST = conduct.CHECKS
#: Every check, in the order they are looked at and shown.
CHECKS: tuple[Check, ...] = (
    *form.CHECKS,
    *reference.CHECKS,
    *identities.CHECKS,
    *probes.CHECKS,
    *hiding.CHECKS,
    *symmetry.CHECKS,
    *composition.CHECKS,
    *repetition.CHECKS,
    *surroundings.CHECKS,
    *fences.CHECKS,
    *conduct.CHECKS,
)
ALWAYS = tuple(check for check in CHECKS if check.always and check not in LAST)
DRAWN = tuple(check for check in CHECKS if not check.always)
_BY_NAME = {check.name: check for check in CHECKS}


def named(name: str) -> Check:
    """The check called ``name``."""
    return _BY_NAME[name]
