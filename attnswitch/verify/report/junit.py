"""A finished run as a JUnit file, which CI services show as tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from attnswitch.verify.report import demands, facts
from attnswitch.verify.session.tally import Found, Report, Tally

__all__ = ["to_junit"]

#: What XML 1.0 cannot hold, however it is escaped; a kernel's message may.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """A test case for each device, backend and check, and for each demanded class.

    What was never verified is skipped, never passed; a class of which a case was refused has failed.
    """
    suite = ElementTree.Element("testsuite", name="attnswitch verify", time=f"{report.seconds:.3f}")
    counts = {"tests": 0, "failures": 0, "skipped": 0}
    backends = facts.by_backend(report)
    for place, tally in backends.items():
        device, backend = place
        mine = [found for found in report.failures if (found.outcome.device, found.outcome.backend) == place]
        for check in facts.checks([tally], mine):
            test = ElementTree.SubElement(suite, "testcase", classname=f"attnswitch.{device}.{backend}", name=check)
            counts["tests"] += 1
            found = facts.found_in(report, place, check)
            if found or tally.broken[check]:
                counts["failures"] += 1
                _fail(test, found, tally.broken[check])
            elif not tally.held[check]:
                counts["skipped"] += 1
                ElementTree.SubElement(test, "skipped", message=_clean(_why_not(tally)))
            said = f"{facts.says(check)}\n{tally.held[check]} held, {tally.broken[check]} broken"
            ElementTree.SubElement(test, "system-out").text = said
    for row in demands.rows(report):
        counts["tests"] += 1
        _demanded(suite, row, counts)
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _demanded(suite: ElementTree.Element, row: demands.Row, counts: dict[str, int]) -> None:
    """A test case for a demanded class, whose requirement its name tells as well."""
    where = f"attnswitch.{row.device}.{row.backend}.demanded"
    test = ElementTree.SubElement(suite, "testcase", classname=where, name=f"{row.word} of {row.requirement}")
    if row.share.refused:
        counts["failures"] += 1
        reasons = "\n".join(f"{count} {reason}" for reason, count in row.share.reasons.most_common(demands.SHOWN))
        ElementTree.SubElement(test, "failure", message=_clean(demands.says(row))).text = _clean(reasons)
    elif not row.share.tried:
        counts["skipped"] += 1
        ElementTree.SubElement(test, "skipped", message=_clean(demands.says(row)))


def _fail(test: ElementTree.Element, found: list[Found], broken: int) -> None:
    """JUnit has one failure a test: the first gives its message, and all are in its text."""
    if not found:  # counted, and the run ended before it was made smaller, or it is known under another dtype
        ElementTree.SubElement(test, "failure", message=f"{broken} cases failed")
        return
    first = found[0].outcome.failure
    assert first is not None
    element = ElementTree.SubElement(test, "failure", message=_clean(f"{first.title}: {first.message}"))
    element.text = _clean("\n\n".join(_text(item) for item in found))


def _text(found: Found) -> str:
    failure = found.outcome.failure
    assert failure is not None
    lines = (str(found.outcome.case), f"{failure.title}: {failure.message}", facts.element(failure))
    return "\n".join(line for line in (*lines, facts.replay_command(found)) if line)


def _why_not(tally: Tally) -> str:
    return "no case was looked at for it" if tally.verified else facts.refused_only(tally)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
