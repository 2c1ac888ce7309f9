"""Where ``attnswitch verify`` writes what it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnswitch.errors import InvalidProblem
from attnswitch.verify.report import file_name, to_html, to_json, to_junit, to_markdown, to_pytest
from attnswitch.verify.report.facts import environment_of
from attnswitch.verify.session.tally import Report
from attnswitch.verify.terms import Terms

from . import files, render

__all__ = ["Outputs"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to write a finished run, None where not."""

    json: Path | None
    junit: Path | None
    html: Path | None
    summary: Path | None
    tests: Path | None
    #: What the run demanded, which the tests demand as well.
    demands: Terms = Terms()  # noqa: RUF009

    @property
    def quiet(self) -> bool:
        """Whether standard output is for a document alone."""
        return any(map(files.is_standard, (self.json, self.junit, self.html)))

    def check(self, corpus: Path | None, log: Path | None = None) -> None:
        """Find out before a long run, not after it, that a result could not be written."""
        for option, folder in (("--corpus", corpus), ("--emit-pytest", self.tests)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise InvalidProblem(f"{option} {folder} is a file: expected a folder")
        files.check((self.json, self.junit, self.html), appended=(self.summary, log))

    def write(self, report: Report) -> None:
        """Write what was asked for."""
        if self.json is not None:
            render.write_json(to_json(report), self.json)
        if self.junit is not None:
            files.write(to_junit(report), self.junit)
        if self.html is not None:
            files.write(to_html(report), self.html)
        if self.summary is not None:
            with self.summary.open("a", encoding="utf-8", errors="replace") as file:
                file.write(to_markdown(report))
        if self.tests is not None:
            self._write_tests(report, self.tests)

    def _write_tests(self, report: Report, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in (found.outcome for found in report.failures):
            assert outcome.failure is not None
            where, environment = (outcome.backend, outcome.device), environment_of(report)
            test = to_pytest(outcome.case, *where, outcome.failure, environment, self.demands)
            name = file_name(outcome.backend, outcome.device, outcome.failure)
            (folder / name).write_text(test, encoding="utf-8", errors="replace")
