"""The HTML page: what it shows, and that it needs nothing else."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attnswitch.verify import Case, Failure, Found, Outcome, Report, to_html
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.mutants.matrix import Matrix, Row
from attnswitch.verify.session.coverage import TRIGGERS

#: What a kernel may say, to break out of the page.
NASTY = "</td></style><script>alert(1)</script> \"quoted\" 'and' {{ 1 }} \x00 \ud800"
CASE = Case(seq_q=20, seq_k=33)


def outcome(backend: str, **fields: Any) -> Outcome:
    return Outcome(CASE, backend, "cpu", fields.pop("verdict", "verified"), backend, **fields)


def wrong(message: str) -> Outcome:
    failure = Failure("reference", message, "grad query", (0, 0, 17, 3), 1.0, 2.0, 0.5)
    checks = ("form", "inputs", "reference")
    ratios = {"out": 0.25, "grad query": 40.0}
    return outcome("two", verdict="mismatch", failure=failure, ratios=ratios, checks=checks)


@pytest.fixture
def report() -> Report:
    """One backend that is right, one that is wrong on one check, and one that refuses."""
    made = Report(seed=3, seconds=1.5, workers=2, environment={"python": "3.11", "gpu": "a <GPU> & more"})
    right = ("form", "inputs", "reference")
    for length in (20, 33, 128):
        made.drew(CASE.replace(seq_k=length))
        ratios = {"out": 0.25, "lse": 0.0}
        made.add(outcome("one", ratios=ratios, worst={"out": (0, 0, 17, 3)}, checks=("form", "inputs", "leak")))
        two = outcome("two", ratios={"out": 1.0}, worst={"out": (0, 0, 130, 127)}, checks=right)
        made.add(wrong("wrong on purpose") if length == 33 else two)
        made.add(outcome("three", verdict="refused", reasons=("softcap: it has none",)))
    made.failures.append(Found(wrong("wrong on purpose"), Path("corpus/two.json"), seconds=0.5, after=2))
    return made


def nasty() -> Report:
    """A report with a message that breaks out of its place."""
    made = Report(seed=0, environment={"torch": NASTY})
    made.add(wrong(NASTY))
    made.add(outcome("three", verdict="refused", reasons=(NASTY,)))
    made.failures.append(Found(wrong(NASTY), None, seconds=0.5, after=1))
    return made


@pytest.fixture(params=["finished", "nasty", "empty"])
def each(request: pytest.FixtureRequest, report: Report) -> Report:
    """Reports of every kind."""
    return {"finished": report, "nasty": nasty(), "empty": Report(seed=1)}[request.param]


VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """A page's tags, checked to be closed in order, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def titles(self) -> list[str]:
        """What fields say when pointed at."""
        return [attrs["title"] or "" for _, attrs in self.tags if "title" in attrs]

    def ids(self) -> set[str]:
        return {attrs["id"] or "" for _, attrs in self.tags if "id" in attrs}


def row(name: str, first: str | None, caught: dict[str, int] | None = None, seen: str = "") -> Row:
    return Row(name, "tail", "A fault with <angles>.", seen, first, 40, 1.5, caught or {})


def matrix(*rows: Row) -> Matrix:
    return Matrix(rows, ("reference", "split", "hull"), 0, 2000)


def test_the_page(report: Report) -> None:
    page = Page(to_html(report))
    assert "1 distinct mismatch" in page.text
    for check in CHECKS:
        assert check.name in page.text
        assert check.says in page.text
    for part in ("one", "two", "three", "wrong on purpose", "attnswitch replay corpus/two.json", "a <GPU> & more"):
        assert part in page.text
    assert str(report.failures[0].outcome.case) in page.text
    assert "element [0, 0, 17, 3] is 1.0, expected 2.0 within 0.5" in page.text
    assert "found after 2 cases, 0.5 s" in page.text
    for name in TRIGGERS:
        assert name in page.text
    assert page.text.count("never met") == sum(not report.triggers[name] for name in TRIGGERS)
    assert page.ids() == {"failures", "backends", "checks", "errors", "places", "coverage", "reasons"}


def test_the_page_tells_held_broken_and_never_apart(report: Report) -> None:
    page = Page(to_html(report))
    kinds = {
        attrs["title"]: attrs["class"]
        for tag, attrs in page.tags
        if tag == "td" and "title" in attrs and "class" in attrs
    }
    assert kinds["reference, two on cpu: broken 1 times, held 2 times"] == "bad"
    assert (
        kinds["leak, one on cpu: held 3 times. NaN and inf at positions that a row may not see do not reach it"]
        == "good"
    )
    assert kinds["leak, two on cpu: never looked at"] == "never"
    assert kinds["form, three on cpu: never looked at"] == "never"


def test_the_drawings_of_the_page(report: Report) -> None:
    page = Page(to_html(report))
    bars = [attrs for tag, attrs in page.tags if tag == "rect" and attrs["class"] in ("bar", "over")]
    counted = sum(1 for tally in report.tallies.values() for bins in tally.ratios.values() for n in bins if n)
    assert len(bars) == counted
    assert [bar["class"] for bar in bars].count("over") == 1  # the gradient that is 40 bounds off
    for bar in bars:
        assert 0 <= float(bar["y"] or "") <= 40
        assert math.isclose(float(bar["y"] or "") + float(bar["height"] or ""), 40, abs_tol=0.2)
    assert "3 calls: error/bound 2⁻³ to 2⁻²" in page.text
    assert "queries 16–31, dimensions 0–15: error/bound 0.25" in page.text
    cells = [attrs for tag, attrs in page.tags if tag == "rect" and attrs["class"] in ("heat", "never")]
    assert len(cells) == 2 * 64


def test_the_page_needs_no_other_and_no_script(each: Report) -> None:
    page = Page(to_html(each, matrix(row("a", None))))
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "image", "use", "form"}
    )
    ids = page.ids()
    for _, attrs in page.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset", "data", "action") for name in attrs)
        assert not attrs.get("href", "#backends").startswith("#") or attrs.get("href", "#backends")[1:] in ids  # type: ignore[union-attr, index]
    source = to_html(each)
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert not re.search(r"url\(|@import|https?:", style)
    assert "prefers-color-scheme: dark" in style


def test_a_message_cannot_leave_its_place() -> None:
    source = to_html(nasty())
    assert "<script" not in source
    assert "alert(1)" in Page(source).text


def test_a_page_without_mutants_has_no_section_for_them(report: Report) -> None:
    assert "mutants" not in Page(to_html(report)).ids()


def test_the_mutants_on_the_page(report: Report) -> None:
    faults = (
        row("dropped-tile", "split", {"reference": 12, "split": 1200}, seen="torch#1"),
        row("inverted-mask", "crash", {"reference": 3}),
        row("nobody-sees-it", None),
    )
    page = Page(to_html(report, matrix(*faults)))
    assert "2 of 3 faulty variants of the tiled backend were caught" in page.text
    assert "half of them within 40 cases and 1.5 s" in page.text
    assert "Not caught: nobody-sees-it." in page.text
    assert "A fault with <angles>." in page.text
    assert "dropped-tile: seen by reference alone in its case 12" in page.titles()
    first = [attrs["title"] for tag, attrs in page.tags if tag == "td" and attrs.get("class") == "first"]
    assert first == ["dropped-tile: seen by split alone in its case 1,200; it ended the run"]
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "tr"].count("survivor") == 1
    heads = [attrs for tag, attrs in page.tags if tag == "th" and attrs.get("class") == "check"]
    assert len(heads) == 3
    assert re.search(r"seen by the check\s*210\s*seen by no other\s*1\s", page.text)  # by reference, split, hull


def test_the_mutants_of_a_run_in_which_no_check_looked_alone(report: Report) -> None:
    page = Page(to_html(report, Matrix((row("dropped-tile", "split"), row("inverted-mask", None)), (), 0, 50)))
    assert "Not caught: inverted-mask." in page.text
    assert "seen by" not in page.text
    assert [attrs for tag, attrs in page.tags if tag == "th" and attrs.get("class") == "check"] == []
