"""Resident memory of a call on the CPU, beyond its operands; each call in a process of its own.

The allocator of the CPU counts nothing, so the system is asked for the peak of the process. Before the call, what is
imported or built on first sight is there already: a small call of the same kind by the same backend has run. What the
process has freed and not given back counts as there too: the figure is right to a few MiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnswitch import child
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.problem import DTYPES, Problem

__all__ = ["AUTO", "PROBLEMS", "Resident", "resident"]

#: The dispatcher's choice.
AUTO = "auto"
#: A window over 32,768 tokens, and 16,384 new tokens behind as many old ones.
PROBLEMS = ("b1.h1.s32768.d64.fp32.window=256,0", "b1.h1.s16384x32768.d64.fp32.causal-br")
#: Seconds that a process may take.
TIMEOUT = 300.0
_STATUS = Path("/proc/self/status")
_SMALL = 8


@dataclass(frozen=True, slots=True)
class Resident:
    """One call: bytes of its operands, and the most that it had beyond them, its results included.

    ``chosen`` is the backend that ran; ``why`` says why nothing was measured.
    """

    problem: str
    backend: str
    chosen: str | None
    operands: int
    beyond: int | None
    seconds: float | None
    why: str | None = None

    @property
    def ratio(self) -> float | None:
        """``beyond`` in units of the operands."""
        return None if self.beyond is None else self.beyond / self.operands

    def to_json(self) -> dict[str, Any]:
        """The fields by name, and the ratio."""
        return {**asdict(self), "ratio": None if self.ratio is None else round(self.ratio, 3)}


def resident(text: str, backend: str = AUTO, timeout: float = TIMEOUT) -> Resident:
    """Run ``text`` in a new process. Never raises for what happens there.

    Raises ``InvalidProblem`` for no problem, or one with gradients, and ``Unsupported`` where the system does not tell.
    """
    p = Problem.parse(text)
    if p.grads:
        raise InvalidProblem(f"{p}: the memory of a call is measured without gradients")
    if not _STATUS.exists():
        raise Unsupported("resident memory is read from /proc, which only Linux has")
    command, environment = child.command("attnswitch.bench.resident", str(p), backend), child.environment()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return _failed(p, backend, f"it took longer than {timeout:g} s")
    if done.returncode:  # such as -9, by the system, for want of memory
        return _failed(p, backend, f"its process ended with {done.returncode} {done.stderr.strip()[-200:]}".strip())
    return Resident(**json.loads(done.stdout.splitlines()[-1]))


def _failed(p: Problem, backend: str, why: str) -> Resident:
    return Resident(str(p), backend, None, _operand_bytes(p), None, None, why)


def _operand_bytes(p: Problem) -> int:
    """Bytes of query, key, value and mask."""
    query = p.batch * p.heads_q * p.seq_q * p.dim_qk
    keys = p.batch * p.heads_kv * p.seq_k * (p.dim_qk + p.dim_v)
    mask = 0
    if p.mask is not None and p.mask_shape is not None:
        b, h, q, k = p.mask_shape
        mask = b * h * q * k * (1 if p.mask.is_bool else DTYPES[p.mask.dtype])
    return (query + keys) * DTYPES[p.dtype] + mask


def _measure(text: str, backend: str) -> Resident:
    """The same in this process."""
    import attnswitch
    from attnswitch.bench import workload

    p = Problem.parse(text)
    named = None if backend == AUTO else backend
    work = workload.of(p, "cpu")
    operands, keywords = (work.query, work.key, work.value), work.keywords()
    chosen = attnswitch.plan(*operands, **keywords, backend=named).backend
    small = workload.of(p.replace(seq_q=min(p.seq_q, _SMALL), seq_k=min(p.seq_k, _SMALL)), "cpu")
    attnswitch.attention(small.query, small.key, small.value, **small.keywords(), backend=chosen)
    before = _status("VmRSS")
    start = time.perf_counter()
    result = attnswitch.attention(*operands, **keywords, backend=named)
    seconds = time.perf_counter() - start
    peak = _status("VmHWM")  # getrusage would count the process that started this one
    del result
    return Resident(str(p), backend, chosen, _operand_bytes(p), max(peak - before, 0), round(seconds, 3))


def _status(name: str) -> int:
    """Bytes of this process, by the name that Linux has for them: VmRSS is resident now, VmHWM was at most."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _main(text: str, backend: str) -> None:
    child.follow()
    try:
        made = _measure(text, backend)
    except Exception as error:  # a kernel may fail in any way
        made = _failed(Problem.parse(text), backend, f"{type(error).__name__}: {error}")
    print(json.dumps(asdict(made)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
