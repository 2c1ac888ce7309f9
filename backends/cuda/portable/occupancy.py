"""What an SM of each GPU has, and how many blocks of a tile it holds at one time, without compiling anything.

Sizes are those of the table "Technical Specifications per Compute Capability" of the CUDA programming guide. The
registers of a tile are looked up in ``registers.json``, which ``fixtures/make_cuda_registers.py`` makes.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import NamedTuple

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .tiles import Tile, on_tensor_cores, shared

__all__ = ["MOST_REGISTERS", "SM", "blocks", "registers", "sm"]

_KIB = 1024
#: Warps and blocks that an SM holds at most, by compute capability; the least of all where it is not here.
_HOLDS = {
    (7, 5): (32, 16),
    (8, 0): (64, 32),
    (8, 6): (48, 16),
    (8, 7): (48, 16),
    (8, 9): (48, 24),
    (9, 0): (64, 32),
    (10, 0): (64, 32),
    (12, 0): (48, 24),
}
_LEAST = (32, 16)
#: 32-bit registers of a thread at most.
MOST_REGISTERS = 255
#: Those of an SM, and how many a thread is allotted at a time.
_REGISTERS, _STEP = 65536, 8


class SM(NamedTuple):
    """Bytes of shared memory of an SM, and that a block takes beside its own; warps and blocks that it holds at most.

    ``tensor`` and ``ordinary`` are multiply-adds a clock: of 16-bit operands by ``mma.sync``, and in float32.
    """

    shared: int
    reserved: int
    warps: int
    blocks: int
    tensor: int
    ordinary: int


def sm(device: Device) -> SM:
    """That of a GPU, of which the compute capability and ``Device.on_chip`` are asked.

    From 8.0 on an SM has 1 KiB more than a block may have, and reserves as much for each. Rates are those of the
    whitepapers of GA100, GA102, AD102 and GB202; GeForce has half of that of tensor cores where sums are float32. That
    of ``mma.sync`` on 10.0 is not published, and is taken to be that of 8.0.
    """
    capability = device.capability or (0, 0)
    own = _KIB if capability >= (8, 0) else 0
    wide = capability[0] in (9, 10) or capability == (8, 0)
    warps, count = _HOLDS.get(capability, _LEAST)
    return SM(device.on_chip + own, own, warps, count, 1024 if wide else 512, 64 if capability <= (8, 0) else 128)


def blocks(kernel: str, tile: Tile, problem: Problem, sm: SM) -> int:
    """How many blocks an SM holds by shared memory, registers, warps and blocks; 0 if a block does not fit.

    Registers are those of a problem without a mask, dropout or a softcap, or as many as a thread may have.
    """
    each = shared(kernel, tile, problem)
    if each > sm.shared - sm.reserved:
        return 0
    taken = registers(kernel, tile, problem) or MOST_REGISTERS
    by_registers = _REGISTERS // (32 * tile.warps * (-(-taken // _STEP) * _STEP))
    return min(sm.shared // (each + sm.reserved), max(1, by_registers), sm.warps // tile.warps, sm.blocks)


def registers(kernel: str, tile: Tile, problem: Problem) -> int | None:
    """Registers of a thread; None for a tile that spills, or was not compiled.

    They follow from the rows of a warp and the columns of the tile, and are those of the next head dimension that was
    compiled.
    """
    own, by = (tile.keys, tile.queries) if kernel == "key_gradients" else (tile.queries, tile.keys)
    kind = "bf16" if on_tensor_cores(problem) else "fp32"
    found = _table().get((kernel, kind), ())
    for dim_qk, dim_v, taken in found:
        if problem.dim_qk <= dim_qk and problem.dim_v <= dim_v:
            return taken.get((own // tile.warps, by))
    return None


@functools.cache
def _table() -> dict[tuple[str, str], list[tuple[int, int, dict[tuple[int, int], int]]]]:
    """By kernel and type: head dimensions, the least first, and registers by rows and columns."""
    text = resources.files(__package__).joinpath("registers.json").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[tuple[int, int, dict[tuple[int, int], int]]]] = {}
    for name, row in json.loads(text)["registers"].items():
        kernel, kind, dim = name.split(" ")
        dim_qk, _, dim_v = dim.partition("/")
        shapes = {(int(tile.split("x")[0]), int(tile.split("x")[1])): taken for tile, taken in row.items()}
        found.setdefault((kernel, kind), []).append((int(dim_qk), int(dim_v or dim_qk), shapes))
    for each in found.values():
        each.sort(key=lambda row: row[:2])
    return found
