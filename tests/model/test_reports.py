"""Texts to file about engines of context parallelism: on the versions that they name, their block says WRONG."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXTS = Path(__file__).parents[2] / "fixtures" / "divergences" / "engines"
#: By file, the package that it is about and the latest version that is known to be so.
REPORTS = {
    "diffusers-ulysses-anything-mask.md": ("diffusers", "0.42.1"),
    "yunchang-ring-gradients.md": ("yunchang", "0.6.4"),
    "yunchang-torch-math-lse.md": ("yunchang", "0.6.4"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_holds(name: str, tmp_path: Path) -> None:
    package, version = REPORTS[name]
    if importlib.metadata.version(package) != version:
        pytest.skip(f"seen with {package} {version}")
    text = (TEXTS / name).read_text()
    assert "attnswitch" not in text
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (program := tmp_path / "block.py").write_text(block)  # its processes import it
    ran = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "WRONG"
    assert all(line.startswith(f"{package} {version}, ") for line in ran.stdout.splitlines()[:-1])
