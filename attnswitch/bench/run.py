"""Rows measured one after the other, the candidates of a row in turn; records come as they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from attnswitch.bench import deviation, workload
from attnswitch.bench.candidates import Attend, Refused, configs, of_backend, with_configs
from attnswitch.bench.measure import Budget, Limits, Timing, current, measure, release
from attnswitch.bench.peers import PEERS
from attnswitch.bench.record import PASSES, Direction, Record
from attnswitch.bench.suites import Row
from attnswitch.bench.workload import Workload
from attnswitch.machine.device import Device
from attnswitch.problem import cost

__all__ = ["Step", "idle_configs", "run", "steps"]

#: Results of one run: the output, or the gradients.
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One row in one direction: what is measured together."""

    row: Row
    direction: Direction

    def __str__(self) -> str:
        return f"{self.row.suite}: {self.row.name}, {self.direction}"


@dataclass(slots=True)
class _Entry:
    """One candidate of a step on its way to a record."""

    record: Record
    call: Callable[[], Any] | None = None

    def fail(self, error: Exception) -> None:
        """Record what it raised, in one line; nothing of it is kept that would hold memory."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        text = "out of memory" if isinstance(error, torch.cuda.OutOfMemoryError) else type(error).__name__
        self.record = replace(self.record, status="failed", why=f"{text}: {first}" if first else text)
        self.call = None


def steps(rows: Iterable[Row], directions: Iterable[Direction] = get_args(Direction)) -> list[Step]:
    """Every row in each of its directions that is among ``directions``."""
    wanted = tuple(directions)
    return [Step(row, direction) for row in rows for direction in row.directions if direction in wanted]


def idle_configs(todo: Sequence[Step], device: str) -> list[str]:
    """The parts of texts that ``todo`` names configs by and that no config of its backends has."""
    place = Device.parse(device)
    idle = list(dict.fromkeys(part for step in todo for part in step.row.configs if part))
    for step in todo:
        problem = workload.asked(step.row, step.direction)
        for name in step.row.backends:
            if idle:
                texts = list(configs(name, problem, place))
                idle = [part for part in idle if not any(part in text for text in texts)]
    return idle


def run(step: Step, device: str, limits: Limits, budget: Budget) -> Iterator[Record]:
    """Measure one step: a record for each candidate, in the row's order, backends first.

    Never raises for what a candidate does. Each is run once and held against the answer before it is timed.
    """
    place = Device.parse(device)
    with current(device):
        entries = [_Entry(_blank(step, name)) for name in (*step.row.backends, *step.row.peers)]
        if step.row.kind == "memory" and device == "cpu":
            why = "peak memory is counted by the allocator of a GPU; the CPU's counts nothing"
            yield from (replace(entry.record, status="refused", why=why) for entry in entries)
            return
        try:
            work = workload.make(step.row, step.direction, device)
            reference = deviation.make(work)
        except Exception as error:  # mostly a want of memory, which is every candidate's
            for entry in entries:
                entry.fail(error)
            yield from (entry.record for entry in entries)
            return
        backends = tuple(with_configs(step.row.backends, step.row.configs, work.problem, place))
        entries = [_Entry(_blank(step, name)) for name in (*backends, *step.row.peers)]
        for index, entry in enumerate(entries):
            _prepare(entry, step, work, is_peer=index >= len(backends))
            _try_out(entry, work, reference)
        if step.row.kind != "memory":
            _time(entries, work, limits, budget)
        for entry in entries:
            entry.call = None
        del work, reference
        release(device)
        yield from (entry.record for entry in entries)


def _blank(step: Step, candidate: str) -> Record:
    row = step.row
    return Record(row.suite, row.name, str(row.problem), row.kind, step.direction, candidate, "measured")


def _prepare(entry: _Entry, step: Step, work: Workload, *, is_peer: bool) -> None:
    """Make the call that is checked and timed, or say why there is none."""
    name = entry.record.candidate
    try:
        attend = PEERS[name](work) if is_peer else of_backend(name, work)
        if step.row.kind == "memory" or step.direction == "training":
            entry.call = functools.partial(_both, attend, work)
        elif step.direction == "backward":
            out = attend()
            entry.call = functools.partial(_backward, out, work)
        else:
            entry.call = functools.partial(_forward, attend)
    except Refused as refusal:
        entry.record = replace(entry.record, status=refusal.status, why=str(refusal))
    except Exception as error:  # a kernel or a compiler may fail in any way
        entry.fail(error)
        release(work.device)


def _forward(attend: Attend) -> Results:
    return (attend(),)


def _backward(out: torch.Tensor, work: Workload) -> Results:
    """The gradients alone: the graph is there already, and kept."""
    return torch.autograd.grad(out, work.leaves, work.grad_out, retain_graph=True)


def _both(attend: Attend, work: Workload) -> Results:
    return torch.autograd.grad(attend(), work.leaves, work.grad_out)


def _try_out(entry: _Entry, work: Workload, reference: deviation.Reference) -> None:
    """Run it, hold what it returns against the answer, and see how much memory it takes."""
    if entry.call is None:
        return
    try:
        results, memory = _observed(entry.call, work.device)
        found = reference.deviation(results)
    except Exception as error:  # a kernel may fail in any way
        entry.fail(error)
        release(work.device)
        return
    if reference.empty and found == 0.0:  # NaN and inf are seen all the same
        entry.record = replace(entry.record, memory=memory)
        return
    entry.record = replace(entry.record, memory=memory, deviation=found, against=reference.where)
    if why := reference.wrong(results):
        entry.record = replace(entry.record, status="wrong", why=why)


def _observed(call: Callable[[], Any], device: str) -> tuple[Results, int | None]:
    """What ``call`` returns, and the bytes that it held at most beyond what was there, None on the CPU."""
    if device == "cpu":
        results: Results = call()
        return results, None
    call()  # what is built on first sight, workspaces included, is not counted
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    return results, torch.cuda.max_memory_allocated() - before


def _time(entries: list[_Entry], work: Workload, limits: Limits, budget: Budget) -> None:
    by_name = {entry.record.candidate: entry for entry in entries if entry.call is not None}
    calls = {name: entry.call for name, entry in by_name.items() if entry.call is not None}
    times = measure(calls, work.device, budget=budget, failed=lambda name, error: by_name[name].fail(error))
    for name, timing in times.items():
        by_name[name].record = _timed(by_name[name].record, work, timing, limits)


def _timed(record: Record, work: Workload, timing: Timing, limits: Limits) -> Record:
    """``record`` with its times and rates."""
    record = replace(
        record,
        ms=timing.median,
        ms_low=timing.low,
        ms_high=timing.high,
        runs=timing.runs,
        host_ms=timing.host,
    )
    if record.kind == "decode":
        gbps = cost.kv_read(work.problem) * work.kept / timing.median / 1e6
        return replace(record, gbps=gbps, percent=100 * gbps / limits.gbps)
    flops = sum(cost.flops(work.problem, backward=backward) for backward in PASSES[record.direction])
    tflops = flops / timing.median / 1e9
    return replace(record, tflops=tflops, percent=100 * tflops / limits.tflops)
