"""A finished run as data: the JSON document and the JUnit file."""

from __future__ import annotations

import datetime
import math
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from attnswitch.verify.environment import environment
from attnswitch.verify.runner import Found, Report

__all__ = ["replay_command", "to_json", "to_junit"]

SCHEMA = 1


def replay_command(found: Found) -> str:
    """The line that runs a failure again."""
    return f"attnswitch replay {found.path}" if found.path else "(not saved: --no-corpus)"


def _number(x: float | None) -> float | str | None:
    """JSON has no inf and NaN: they are written as text."""
    return x if x is None or math.isfinite(x) else str(x)


def to_json(report: Report) -> dict[str, Any]:
    """One document: what ran where, the counts by device, backend and dtype, and every failure with its case."""
    rows = []
    for (device, backend, dtype), tally in sorted(report.tallies.items()):
        rows.append(
            {
                "device": device,
                "backend": backend,
                "dtype": dtype,
                "verified": tally.verified,
                "with_gradients": tally.gradients,
                "refused": tally.refused,
                "mismatched": tally.mismatched,
                "unavailable": tally.unavailable,
                "worst_error_over_bound": _number(tally.worst),
                "worst_case": tally.worst_case.to_json() if tally.worst_case else None,
                "reasons": dict(sorted(tally.reasons.items(), key=lambda item: -item[1])),
            }
        )
    failures = []
    for found in report.failures:
        outcome, failure = found.outcome, found.outcome.failure
        assert failure is not None
        failures.append(
            {
                "device": outcome.device,
                "backend": outcome.backend,
                "chosen": outcome.chosen,
                "problem": str(outcome.case.problem()),
                "failure": asdict(failure)
                | {name: _number(getattr(failure, name)) for name in ("got", "expected", "bound")},
                "case": outcome.case.to_json(),
                "replay": replay_command(found),
            }
        )
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": report.seed,
        "cases": report.cases,
        "replayed": report.replayed,
        "verified": report.verified,
        "seconds": round(report.seconds, 3),
        "stopped": report.stopped,
        "exit_code": report.exit_code,
        "environment": environment(),
        "results": rows,
        "failures": failures,
    }


def to_junit(report: Report) -> str:
    """JUnit XML: a test case for each device, backend and dtype; refused alone is skipped, never passed."""
    suite = ElementTree.Element("testsuite", name="attnswitch verify", time=f"{report.seconds:.3f}")
    counts = {"tests": 0, "failures": 0, "skipped": 0}
    for (device, backend, dtype), tally in sorted(report.tallies.items()):
        counts["tests"] += 1
        test = ElementTree.SubElement(suite, "testcase", classname=f"attnswitch.{device}.{backend}", name=dtype)
        mine = [
            found
            for found in report.failures
            if (found.outcome.device, found.outcome.backend, found.outcome.case.dtype) == (device, backend, dtype)
        ]
        if mine:
            counts["failures"] += 1
            for found in mine:
                failure = found.outcome.failure
                assert failure is not None
                element = ElementTree.SubElement(test, "failure", message=f"{failure.check}: {failure.message}")
                element.text = f"{found.outcome.case}\n{failure}\n{replay_command(found)}"
        elif tally.mismatched:  # the distinct failure was shrunk to a case of another dtype
            counts["failures"] += 1
            ElementTree.SubElement(test, "failure", message=f"{tally.mismatched} cases failed")
        elif not tally.verified:
            counts["skipped"] += 1
            reason = next(iter(tally.reasons), "it cannot run here")
            ElementTree.SubElement(test, "skipped", message=reason)
        ElementTree.SubElement(test, "system-out").text = f"{tally.verified} verified, {tally.refused} refused"
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
