"""A failure as a test file of its own, to be sent to whoever maintains the kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnswitch.machine import registry
from attnswitch.names import printable
from attnswitch.verify import emulation
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.outcome import Failure
from attnswitch.verify.report.facts import element
from attnswitch.verify.terms import Terms

__all__ = ["file_name", "to_pytest"]

_TEMPLATE = '''\
"""{title}.

{what}

Seen with {environment}.
It needs attnswitch and pytest, and draws nothing.{alone}
"""

import pytest{torch}

{judging}from attnswitch.verify.drawing.case import Case
from attnswitch.verify.{check} import check

CASE = Case.from_json(
{case}
)


{mark}def test_{name}() -> None:
    {call}
    if outcome.verdict {skipped}:
        pytest.skip("; ".join(outcome.reasons))
    failure = outcome.failure
    assert outcome.verdict != "unavailable", outcome.reasons
    assert outcome.verdict == "verified", (
        f"{{failure.title}}: {{failure.message}}\\n"
        f"element {{failure.index}} is {{failure.got!r}}, expected {{failure.expected!r}} within {{failure.bound!r}}\\n"
        f"{{CASE}}"
    )
'''
_CALL = "outcome = check(CASE, {backend}, {device})"
#: What the same needs beside, where the run demanded a precision of its own, and of a kernel before the court.
_JUDGING = {
    "precision": """\
from attnswitch.machine.backend import Precision
from attnswitch.verify import terms
""",
    "court": """\
from attnswitch.verify.court import Court, sitting
""",
}
_DEMANDING = """\
demanded = Precision(
{fields}
    )
    with terms.within(terms.Terms(demanded)):
        """
_SEATED = "with sitting(Court(({backend},), forbidden={forbidden})):\n{indent}    "
_MARK = """\
@pytest.mark.skipif(torch.cuda.device_count() <= {index}, reason={reason})
"""


def to_pytest(
    case: Case,
    backend: str,
    device: str,
    failure: Failure,
    environment: Mapping[str, str],
    demands: Terms = Terms(),  # noqa: B008
) -> str:
    """The source of a test that runs ``case`` and fails as long as ``failure``, or any other, is there.

    The backend is held to the precision of ``demands``. For its conduct it stands before their court.
    It names everything it needs and draws nothing. Unless the backend is emulated, it does not import Hypothesis.
    Text stands in it as literals and in the docstring, so that none of it is run.
    """
    file, on_gpu = file_name(backend, device, failure), device.startswith("cuda")
    what = "\n".join(line for line in (str(case), failure.message, element(failure)) if line)
    index = int(number) if (number := device.partition(":")[2]).isdecimal() else 0
    emulated = emulation.text(emulation.variables((backend,), device))
    alone = f"\n{backend} must be importable." if ":" in backend else ""
    if registry.is_function(backend):
        file = backend.rpartition(":")[0]
        alone = f"\n{file} has to be there, seen from the folder in which the test runs."
    if emulated:
        alone += f"\nThe kernel is emulated, in a process of its own under {emulated}."
    if failure.check in ("crash", "hang", "lost"):
        alone += "\nThe failure may end the process, or never return: run it alone."
    call, needed, precision = _CALL.format(backend=_text(backend), device=_text(device)), [], demands.precision
    if failure.check == "conduct" and not emulated:
        needed, indent = ["court"], "    " if precision is None else "        "
        call = _SEATED.format(backend=_text(backend), forbidden=demands.court.forbidden, indent=indent) + call
    if precision is not None:
        needed = ["precision", *needed]
        fields = "\n".join(f"        {name}={_text(value)}," for name, value in asdict(precision).items())
        call = _DEMANDING.format(fields=fields) + call
    return _TEMPLATE.format(
        call=call,
        judging="".join(_JUDGING[name] for name in needed),
        title=_quoted(f"{failure.title}, {backend} on {device}"),
        # A target that is not there is no reason to pass over its failure.
        check="session.apart" if emulated else "judge",
        skipped='== "refused"' if ":" in backend else 'in ("refused", "unavailable")',
        what=_quoted(what),
        environment=_quoted(", ".join(f"{key} {value}" for key, value in environment.items())),
        alone=_quoted(alone),
        case=_literal(case.to_json()),
        torch="\nimport torch" if on_gpu else "",
        mark=_MARK.format(index=index, reason=_text(f"{device} is not in this machine")) if on_gpu else "",
        name=file.removeprefix("test_").removesuffix(".py"),
    )


def file_name(backend: str, device: str, failure: Failure) -> str:
    """What to call the file; failures of different kinds have different names."""
    return f"test_{_identifier(f'{backend}_{device}_{failure.check}_{failure.sort}')}.py"


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower()


def _quoted(text: str) -> str:
    """``text`` so that it can stand in a docstring, in which a lone carriage return would be a line's end too."""
    return printable(text.replace("\\", "\\\\").replace('"""', "'''"))


def _literal(value: Any, depth: int = 1) -> str:
    """Python for what JSON can hold, a field a line."""
    indent = "    " * depth
    if isinstance(value, dict):
        fields = (f"{indent}    {_text(key)}: {_literal(item, depth + 1).lstrip()},\n" for key, item in value.items())
        return f"{indent}{{\n{''.join(fields)}{indent}}}"
    return indent + _text(value)


def _text(value: Any) -> str:
    """A literal, with the quotes that a formatter prefers where either will do."""
    quoted = isinstance(value, str) and value.isprintable() and not {*value} & {*"'\"\\"}
    return f'"{value}"' if quoted else repr(value)
