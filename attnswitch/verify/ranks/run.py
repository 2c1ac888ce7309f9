"""A run of the verifier over ranks: what each process of the launcher does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of
from attnswitch.parallel import METHODS
from attnswitch.verify.drawing.strategies import Space
from attnswitch.verify.ranks.conductor import Conductor
from attnswitch.verify.ranks.supervisor import Supervisor
from attnswitch.verify.session import whole
from attnswitch.verify.session.plan import RECIPES, Plan, Target
from attnswitch.verify.session.pool import Here
from attnswitch.verify.session.tally import Report
from attnswitch.verify.session.whole import Progress

__all__ = ["joined", "methods_of", "plan", "run"]

#: What is refused over ranks whatever the method, and would be drawn in vain; NaN and inf are for the kernels' own run.
_LACKS = ("dropout", "nonfinite", "seeded")
#: What a launcher says to each process.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def methods_of(text: str) -> tuple[str, ...]:
    """The methods that "ring,all-to-all" names. Raises ``InvalidProblem``."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METHODS:
            raise InvalidProblem(f"--ranks {name or repr(name)}: {one_of(name, METHODS)}")
    return names


@contextlib.contextmanager
def joined(device: str | None, timeout: float) -> Iterator[Conductor | None]:
    """What gives cases to all ranks, if this is rank 0. Any other serves until that ends, and has None.

    Raises ``InvalidProblem`` where no launcher started this process, or there are fewer GPUs than processes here.
    """
    if absent := [name for name in _VARIABLES if name not in os.environ]:
        raise InvalidProblem(
            f"--ranks: {absent[0]} is not set; start it by torchrun --nproc-per-node N -m attnswitch verify --ranks ..."
        )
    from torch.distributed.rendezvous import rendezvous

    where = _place(device)
    store, rank, ranks = next(rendezvous("env://"))
    serving = Supervisor(store, rank, ranks, where, timeout)
    if rank:
        serving.serve()
        yield None
        return
    thread = threading.Thread(target=serving.serve, daemon=True)
    thread.start()
    conductor = Conductor(store, ranks, where.partition(":")[0])
    try:
        yield conductor
    finally:
        conductor.end()
        thread.join(10.0)


def plan(
    backends: Sequence[str],
    conductor: Conductor,
    examples: int | None,
    seed: int,
    seconds: float | None,
    corpus: Path | None,
    max_failures: int = 10,
    shrink_tries: int = 100,
) -> Plan:
    """The cases of a run, of as many ``examples``, or for so many ``seconds``; saved ones first."""
    device = conductor.device
    dtypes = ("float32", "bfloat16", "float16", *(("float64",) if device == "cpu" else ()))
    space = Space(libraries=("torch",), dtypes=dtypes, work=2**20, longest=600, lacks=_LACKS)
    folder = None if corpus is None else corpus / "ranks"  # what one process replays is another's
    return Plan(
        (Target(device, tuple(backends), space, RECIPES if device == "cuda" else 1),),  # where each problem compiles
        examples,
        seed,
        seconds,
        max_failures=max_failures,
        corpus=folder,
        pass_over=True,
        shrink_tries=shrink_tries,
        replayed_by=(*conductor.launcher, "--ranks", ",".join(backends), "--examples", "1"),
    )


def run(
    chosen: Plan, conductor: Conductor, progress: Progress = lambda report, source, device, outcomes: None
) -> Report:
    """Carry ``chosen`` out on all ranks."""
    report = whole.run(chosen, progress, lambda plan: Here(plan, conductor.examine))
    report.environment = {**report.environment, "ranks": str(conductor)}
    return report


def _place(device: str | None) -> str:
    """The device of this process: a GPU of its own, or the CPU."""
    import torch

    local, beside = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    count = torch.cuda.device_count()
    if device is None:
        device = "cuda" if count >= beside else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidProblem(f"--device {device} with --ranks: cpu or cuda; each process takes the GPU of its number")
    if device == "cuda" and local >= count:
        raise InvalidProblem(f"--device cuda: this machine has {count} GPUs, and {beside} processes of the launcher")
    return "cpu" if device == "cpu" else f"cuda:{local}"
