"""The process that computes as one rank: it takes tasks from a connection and answers each.

    python -m attnswitch.verify.ranks.worker READ WRITE FOLDER RANK RANKS GENERATION DEVICE SECONDS

The first three are a ``Child``'s. It meets the other ranks at the launcher's store.
"""

from __future__ import annotations

import os
import traceback
from contextlib import nullcontext
from datetime import timedelta

from attnswitch import child

__all__ = ["main"]


def main() -> None:
    """Tasks until the other end closes the connection."""
    tasks, answers, _, (rank, ranks, generation, device, seconds) = child.begin()
    import torch
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from attnswitch.verify.ranks import faults
    from attnswitch.verify.ranks.compute import compute
    from attnswitch.verify.ranks.task import Answer, Task

    limit = timedelta(seconds=float(seconds))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there, whoever began it
    store, *_ = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(f"attnswitch/{generation}", store)
    if device != "cpu":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    kind = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(kind, store=store, rank=int(rank), world_size=int(ranks), timeout=limit)
    answers.send(None)
    while True:
        try:
            task: Task = tasks.recv()
        except EOFError:
            break
        try:
            with faults.planted(task.fault) if task.fault else nullcontext():
                answer = compute(task, dist.group.WORLD, device)
        except Exception as error:  # whatever a call raises is a finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = Answer(failed=f"{type(error).__name__}: {str(error)[:500]} ({last.name})")
        answers.send(answer)
    os._exit(0)  # a process group whose other ranks are gone may wait for them


if __name__ == "__main__":
    main()
