"""Processes that speak over gloo: a test file starts itself once a rank, and each saves what it comes to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from filelock import FileLock
from launched import ended
from torch import distributed as dist

__all__ = ["joined", "run", "save"]


def run(program: str, world: int, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saved of ``python program rank world folder``, run once for all workers of pytest."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / f"{Path(program).stem}-{world}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _run(program, world, folder)
            (folder / "done").touch()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def _run(program: str, world: int, folder: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, program, str(rank), str(world), str(folder)], stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        errors = [one.communicate(timeout=500)[1].decode() for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * world, "\n".join(errors)


def joined() -> tuple[int, int, Path]:
    """Of one rank: it, how many there are, and the folder, once all are there."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=240)
    )
    return rank, world, folder


def save(results: dict[str, Any]) -> NoReturn:
    """The last that a rank does."""
    rank, folder = dist.get_rank(), Path(sys.argv[3])
    torch.save(results, folder / f"{rank}.pt")
    ended()
