"""Reports: each format holds what a run found, and stands what kernels may say."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attnswitch.verify import (
    Case,
    EventLog,
    Failure,
    Found,
    Outcome,
    Plan,
    Report,
    Space,
    Target,
    to_html,
    to_json,
    to_junit,
    to_markdown,
)
from attnswitch.verify.checks import CHECKS
from attnswitch.verify.demands.figures import Demanded, Share
from attnswitch.verify.demands.requirement import Requirement
from attnswitch.verify.report import demands, facts, summary
from attnswitch.verify.session.coverage import TRIGGERS
from attnswitch.verify.session.explore import Source

#: What a kernel may say, to break out of each format.
NASTY = '</td><script>alert(1)</script> "quoted" \'and\' ``` | a\\b """ \x00\x1b[31m \ud800 && | \n# heading'


def outcome(backend: str, verdict: str = "verified", **fields: Any) -> Outcome:
    """As the judge would give it."""
    case = fields.pop("case", Case(seq_q=20, seq_k=33))
    values: dict[str, Any] = {"checks": ("form", "inputs", "reference"), "seconds": 0.25, "chosen": backend}
    if verdict == "refused":
        values = {"reasons": ("softcap: it has none",)}
    return Outcome(case, backend, fields.pop("device", "cpu"), verdict, **(values | fields))  # type: ignore[arg-type]


def wrong(message: str = "wrong on purpose", check: str = "reference", backend: str = "two") -> Outcome:
    failure = Failure(check, message, "grad query", (0, 0, 17, 3), 1.0, 2.0, 0.5)
    return outcome(backend, "mismatch", failure=failure, ratios={"out": 0.25, "grad query": 40.0})


@pytest.fixture
def report() -> Report:
    """One backend that is right, one that is wrong on one check, and one that refuses."""
    made = Report(
        seed=3, seconds=1.5, workers=2, environment={"python": "3.11", "torch": "9.9", "gpu": "a <GPU> & more"}
    )
    for length in (20, 33, 128):
        made.drew(Case(seq_q=20, seq_k=length))
        place = {"out": (0, 0, 17, 3)}
        ratios = {"out": 0.25, "lse": 0.0}
        made.add(outcome("one", ratios=ratios, worst=place, variant="wide", checks=("form", "inputs", "leak")))
        made.add(wrong() if length == 33 else outcome("two", ratios={"out": 1.0}, worst={"out": (0, 0, 130, 127)}))
        made.add(outcome("three", "refused"))
    made.failures.append(Found(wrong(), Path("corpus/two.json"), seconds=0.5, after=2))
    return made


def nasty() -> Report:
    """A report with a message that breaks out of each format."""
    made = Report(seed=0, environment={"torch": NASTY})
    made.add(wrong(NASTY))
    made.add(outcome("three", "refused", reasons=(NASTY,)))
    made.failures.append(Found(wrong(NASTY), None, seconds=0.5, after=1))
    return made


@pytest.fixture(params=["finished", "nasty", "empty"])
def each(request: pytest.FixtureRequest, report: Report) -> Report:
    """Reports of every kind."""
    return {"finished": report, "nasty": nasty(), "empty": Report(seed=1)}[request.param]


# -- what the formats share --------------------------------------------------------------------------------------------


def test_totals_are_sums_and_worsts() -> None:
    made = Report(seed=0)
    for dtype, ratio in (("float32", 0.5), ("float16", 0.75)):
        case = Case(dtype=dtype, grads="qkv")
        made.add(outcome("one", case=case, ratios={"out": ratio}, worst={"out": (0, 0, 0, 0)}))
    total = facts.by_backend(made)["cpu", "one"]
    assert (total.verified, total.gradients, total.worst, total.seconds) == (2, 2, 0.75, 0.5)
    assert total.worst_case == Case(dtype="float16", grads="qkv")
    assert (total.held["form"], sum(total.ratios["out"]), total.places) == (2, 2, {(0, 0): 0.75})
    assert all(sum(tally.ratios["out"]) == 1 for tally in made.tallies.values())  # its parts are left as they were


@pytest.mark.parametrize("ratio", [0.0, 2.0**-20, 2.0**-16, 1.01 * 2.0**-16, 0.3, 0.5, 0.51, 1.0, 1.001, 7.0, math.inf])
def test_a_ratio_lies_between_the_edges_of_its_bin(ratio: float) -> None:
    made = Report(seed=0)
    made.add(outcome("one", ratios={"out": ratio}))
    (tally,) = made.tallies.values()
    (bin_,) = (n for n, count in enumerate(tally.ratios["out"]) if count)
    edges = (-1.0, *facts.EDGES, math.inf)
    assert edges[bin_] < ratio <= edges[bin_ + 1]
    assert len(tally.ratios["out"]) == len(edges) - 1


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_the_json_document(report: Report) -> None:
    document = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert (document["schema"], document["seed"], document["workers"], document["exit_code"]) == (3, 3, 2, 1)
    assert document["environment"] == report.environment
    rows = {row["backend"]: row for row in document["results"]}
    assert [rows[name]["verified"] for name in ("one", "two", "three")] == [3, 2, 0]
    assert rows["two"]["checks"]["reference"] == {"held": 2, "broken": 1}
    assert rows["one"]["checks"] == {name: {"held": 3, "broken": 0} for name in ("form", "inputs", "leak")}
    assert rows["one"]["places"] == {"1,0": 0.25}
    assert rows["two"]["places"] == {"0,7": 1.0}
    assert rows["one"]["variants"] == {"one wide": 3}
    assert rows["three"]["reasons"] == {"softcap: it has none": 3}
    assert sum(rows["one"]["ratios"]["out"]) == 3
    assert len(rows["one"]["ratios"]["out"]) == len(document["ratio_edges"]) + 1
    assert document["ratio_edges"][-1] == 1.0
    assert document["triggers"].keys() == TRIGGERS.keys()
    assert (document["triggers"]["keys % 32 == 1"], document["triggers"]["keys over 65,536"]) == (1, 0)


def test_a_failure_in_the_json_document(report: Report) -> None:
    (failure,) = to_json(report)["failures"]
    found = report.failures[0]
    assert Case.from_json(failure["case"]) == found.outcome.case
    assert failure["replay"] == "attnswitch replay corpus/two.json"
    assert (failure["title"], failure["seconds"], failure["cases_before"]) == ("reference: grad query", 0.5, 2)
    assert (failure["failure"]["check"], failure["failure"]["result"]) == ("reference", "grad query")


def test_json_has_no_numbers_that_json_has_not() -> None:
    made = Report(seed=0)
    failure = Failure("reference", "not finite", "out", (0,), math.nan, math.inf, -math.inf)
    bad = outcome("one", "mismatch", failure=failure, ratios={"out": math.inf}, worst={"out": (0, 0, 0, 0)})
    made.add(bad)
    made.failures.append(Found(bad, None))
    (row,) = json.loads(json.dumps(to_json(made), allow_nan=False))["failures"]
    assert [row["failure"][name] for name in ("got", "expected", "bound")] == ["nan", "inf", "-inf"]


def test_every_report_is_json(each: Report) -> None:
    json.dumps(to_json(each), allow_nan=False)


# -- JUnit -------------------------------------------------------------------------------------------------------------


def test_the_junit_document(report: Report) -> None:
    (suite,) = ElementTree.fromstring(to_junit(report))
    tests = {(test.get("classname"), test.get("name")): {part.tag for part in test} for test in suite.iter("testcase")}
    assert len(tests) == 3 * len(CHECKS)
    assert "failure" in tests["attnswitch.cpu.two", "reference"]
    assert tests["attnswitch.cpu.one", "leak"] == {"system-out"}
    assert "skipped" in tests["attnswitch.cpu.two", "leak"]  # nothing was looked at: never passed
    assert all("skipped" in parts for (name, _), parts in tests.items() if name == "attnswitch.cpu.three")
    counted = {tag: sum(tag in parts for parts in tests.values()) for tag in ("failure", "skipped")}
    found = {name: int(suite.get(name, "")) for name in ("tests", "failures", "skipped")}
    assert found == {"tests": len(tests), "failures": counted["failure"], "skipped": counted["skipped"]}
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "reference: grad query: wrong on purpose"
    text = failure.text or ""
    for part in (str(report.failures[0].outcome.case), "is 1.0, expected 2.0", "attnswitch replay corpus/two.json"):
        assert part in text
    reasons = {element.get("message") for element in suite.iter("skipped")}
    assert "softcap: it has none" in reasons


def test_a_failure_that_was_not_made_smaller_fails_its_test(report: Report) -> None:
    report.failures.clear()
    (suite,) = ElementTree.fromstring(to_junit(report))
    assert [failure.get("message") for failure in suite.iter("failure")] == ["1 cases failed"]


@pytest.mark.parametrize("check", ["crash", "hang"])
def test_what_returned_nothing_is_a_test_of_its_own(check: str, report: Report) -> None:
    crash = outcome("one", "mismatch", failure=Failure(check, "the process died of SIGSEGV"), checks=())
    report.add(crash)
    report.failures.append(Found(crash, None))
    (suite,) = ElementTree.fromstring(to_junit(report))
    failed = [test for test in suite.iter("testcase") if test.find("failure") is not None]
    assert [(test.get("classname"), test.get("name")) for test in failed] == [
        ("attnswitch.cpu.one", check),
        ("attnswitch.cpu.two", "reference"),
    ]


def test_every_report_is_xml(each: Report) -> None:
    ElementTree.fromstring(to_junit(each).encode())


# -- line by line ------------------------------------------------------------------------------------------------------

PLAN = Plan((Target("cpu", ("one", "two"), Space()),), 10, 0)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.ndjson"
    with EventLog(path) as log:
        log.start(PLAN)
        assert [event["event"] for event in events(path)] == ["start"]
        quiet = Report(seed=3)
        log.progress(quiet, Source.DRAWN, (outcome("one", ratios={"out": 0.123456789}), outcome("three", "refused")))
        assert [event["event"] for event in events(path)] == ["start", "case", "outcome", "reason", "outcome"]
        log.progress(quiet, Source.DRAWN, (outcome("three", "refused"),))
        log.progress(report, Source.DRAWN, (wrong(),))
        log.progress(report, Source.DRAWN, ())
        log.end(report)
    written = events(path)
    names = [event["event"] for event in written]
    of_cases = [name for name in names if name != "case"]
    assert of_cases == ["start", "outcome", "reason", "outcome", "outcome", "outcome", "failure", "end"]
    assert names.count("case") == 3
    assert {event["source"] for event in written if event["event"] == "case"} == {"drawn"}
    written = [event for event in written if event["event"] != "case"]
    assert written[0]["plan"]["targets"][0]["backends"] == ["one", "two"]
    assert (written[0]["plan"]["examples"], "python" in written[0]["environment"]) == (10, True)
    assert (written[1]["ratios"], written[1]["checks"]) == ({"out": 0.1235}, ["form", "inputs", "reference"])
    assert (written[2]["id"], written[2]["text"]) == (0, "softcap: it has none")
    assert [event["reasons"] for event in written if event.get("verdict") == "refused"] == [[0], [0]]
    assert (written[5]["case"], written[5]["verdict"]) == (str(wrong().case), "mismatch")
    assert written[5]["failure"]["result"] == "grad query"
    assert Case.from_json(written[6]["case"]) == wrong().case
    assert (written[6]["cases_before"], written[6]["replay"]) == (2, "attnswitch replay corpus/two.json")
    assert (written[7]["exit_code"], written[7]["failures"], written[7]["cases"]) == (1, 1, 3)


def test_a_failure_recorded_as_the_run_ends_is_in_the_log(report: Report, tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        log.end(report)
    assert [event["event"] for event in events(tmp_path / "log")] == ["failure", "end"]


def test_a_log_goes_on_after_another(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        with EventLog(path) as log:
            log.start(PLAN)
            log.progress(Report(0), Source.DRAWN, (outcome("three", "refused"),))
    assert [event["event"] for event in events(path)] == ["start", "case", "reason", "outcome"] * 2
    path.write_text(path.read_text() + '{"event":"outc')  # a process that was killed while it wrote
    with EventLog(path) as log:
        log.start(PLAN)
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "start"


def test_a_log_says_what_ended_the_run(tmp_path: Path) -> None:
    def interrupted() -> None:
        with EventLog(tmp_path / "log"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert events(tmp_path / "log")[-1]["error"].startswith("KeyboardInterrupt")


def test_a_killed_process_leaves_what_it_logged(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from attnswitch.verify import Case, EventLog, Outcome, Report
from attnswitch.verify.session.explore import Source
with EventLog(Path("log")) as log:
    for length in range(50):
        log.progress(Report(0), Source.DRAWN, (Outcome(Case(seq_k=length), "one", "cpu", "verified"),))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=False)
    assert ran.returncode < 0
    assert [event["event"] for event in events(tmp_path / "log")] == ["case", "outcome"] * 50


def test_every_report_can_be_logged(each: Report, tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        log.progress(each, Source.DRAWN, tuple(found.outcome for found in each.failures))
        log.end(each)
    assert events(tmp_path / "log")[-1]["event"] == "end"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def test_the_summary(report: Report) -> None:
    text = to_markdown(report)
    assert "**1 distinct mismatch**" in text
    assert "| cpu | two | 2 | 0 | 1.000 | 0 | **1** |" in text
    assert "| cpu | three | 0 | 0 | – | 3 | 0 |" in text
    assert f"    {report.failures[0].outcome.case}\n    wrong on purpose\n" in text
    assert "    attnswitch replay corpus/two.json" in text
    assert f"of {len(TRIGGERS)} known triggers were met; never met: " in text


def test_the_summary_shows_the_first_failures_and_counts_the_rest(report: Report) -> None:
    report.failures *= 13
    text = to_markdown(report)
    assert text.count("attnswitch replay") == summary.SHOWN
    assert "… and 3 more." in text


def test_the_summary_stays_below_what_is_shown(report: Report) -> None:
    report.failures[:] = [Found(wrong("x" * 2**21), None)] * 20
    assert len(to_markdown(report).encode()) < 2**20
    for number in range(10_000):
        report.add(outcome(f"backend-{number}-{'x' * 100}"))
    text = to_markdown(report)
    assert len(text.encode()) < summary.LIMIT
    assert "cut off" in text


def test_a_message_stays_in_its_block() -> None:
    text = to_markdown(nasty())
    assert not re.search(r"^(# heading|```)", text, re.MULTILINE)
    assert not re.search(r"^(?!    ).*<script>", text, re.MULTILINE)


# -- what was demanded -------------------------------------------------------------------------------------------------


@pytest.fixture
def demanding(report: Report) -> Report:
    """The same report, of a run that demanded two classes of three backends."""
    places = [("cpu", name) for name in ("one", "two", "three")]
    report.demanded = Demanded([Requirement.parse("causal,Lq<=20")], places)
    case = Case(seq_q=20, seq_k=33, dim_qk=64, dim_v=64)
    for each in (case, case.replace(causal=True)):
        report.demanded.add(outcome("one", case=each))
        report.demanded.add(outcome("two", "refused" if each.causal else "verified", case=each, reasons=(NASTY,)))
    return report


def test_the_document_says_what_was_demanded(demanding: Report) -> None:
    document = json.loads(json.dumps(to_json(demanding), allow_nan=False))
    figures = {
        (row["backend"], row["class"]): (row["drawn"], row["taken"], row["share"]) for row in document["demanded"]
    }
    assert figures == {
        ("one", "causal"): (1, 1, 1.0),
        ("one", "Lq<=20"): (2, 2, 1.0),
        ("two", "causal"): (1, 0, 0.0),
        ("two", "Lq<=20"): (2, 1, 0.5),
        ("three", "causal"): (0, 0, None),
        ("three", "Lq<=20"): (0, 0, None),
    }
    assert document["demanded"][2]["reasons"] == {NASTY: 1}


def test_the_document_ends_with_a_verdict_for_programs(demanding: Report) -> None:
    document = json.loads(json.dumps(to_json(demanding), allow_nan=False))
    assert list(document)[-1] == "verdict"
    assert document["verdict"]["correct"] is False
    one, three, two = document["verdict"]["backends"]
    assert one == {
        "device": "cpu",
        "backend": "one",
        "correct": True,
        "of": "demanded",
        "share": 1.0,
        "worst": 0.25,
        "speed": [],
        "told": [],
        "refused": [],
    }
    assert (two["correct"], two["share"], two["worst"]) == (False, 0.5, 40.0)
    assert two["told"] == ["reference: grad query: wrong on purpose"]
    assert two["refused"][0].startswith("causal: 0 of 1 cases taken, refused: ")
    assert (three["correct"], three["share"]) == (False, None)
    assert three["refused"] == ["causal: never tried", "Lq<=20: never tried"]


def test_a_verdict_without_demands_is_of_what_was_drawn(report: Report) -> None:
    verdict = to_json(report)["verdict"]
    one, three, two = verdict["backends"]
    assert [(each["correct"], each["of"], each["share"]) for each in (one, two, three)] == [
        (True, "drawn", 1.0),
        (False, "drawn", 2 / 3),
        (False, "drawn", 0.0),
    ]
    assert three["refused"] == ["softcap: it has none"]
    assert to_json(Report(seed=0))["verdict"] == {"correct": False, "backends": []}


def test_a_class_that_was_refused_fails_in_junit(demanding: Report) -> None:
    suite = ElementTree.fromstring(to_junit(demanding)).find("testsuite")
    assert suite is not None
    tests = {
        (case.get("classname"), case.get("name")): [part.tag for part in case]
        for case in suite
        if ".demanded" in case.get("classname", "")
    }
    assert tests == {
        (f"attnswitch.cpu.{backend}.demanded", f"{word} of causal,Lq<=20"): tags
        for backend, tags in (("one", []), ("two", ["failure"]), ("three", ["skipped"]))
        for word in ("causal", "Lq<=20")
    }
    assert suite.get("failures") == str(len(list(suite.iter("failure"))))


def test_markdown_and_html_have_a_table_of_what_was_demanded(demanding: Report) -> None:
    markdown, page = to_markdown(demanding), to_html(demanding)
    assert r"| causal,Lq&lt;=20 | causal | cpu | two | 1 | 0 | 0 % | " in markdown
    assert "<script>" not in markdown.replace("&lt;", "")
    assert "<h2>Demanded</h2>" in page
    assert "<script>" not in page
    assert "<h2>Demanded</h2>" not in to_html(Report(seed=0))
    assert "1 distinct mismatch, 2 demanded classes refused" in markdown


@pytest.mark.parametrize(("taken", "drawn", "says"), [(999, 1000, "99 %"), (1000, 1000, "100 %"), (0, 0, "–")])
def test_nearly_all_is_not_all(taken: int, drawn: int, says: str) -> None:
    assert demands.Row("lse", "lse", "cpu", "one", Share(drawn, taken)).percent == says
