"""Programs under torch's launcher, as tests start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from torch import distributed as dist

__all__ = ["ended", "launched", "started"]

#: The launcher finds a port of its own; whoever runs tests side by side takes none that another has.
_LAUNCHER = ("torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node")


def started(ranks: int, *program: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """A program on so many ranks, which begins."""
    command = [sys.executable, "-m", *_LAUNCHER, str(ranks), *program]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=folder
    )


def launched(ranks: int, *program: str, folder: Path | None = None) -> tuple[int, str]:
    """Exit code and output of a program that ends by itself."""
    process = started(ranks, *program, folder=folder)
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, output


def ended() -> NoReturn:
    """The last that a rank does. A thread of gloo that still holds a tensor would abort a Python that is ending."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
