"""``Variant``: one kernel with all that it is compiled for."""

from __future__ import annotations

from typing import NamedTuple

from attnswitch.problem.philox import ROUNDS

__all__ = ["Variant"]

#: Types of arrays as the sources call them.
_STORAGE = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}


class Variant(NamedTuple):
    """A kernel, the type of its arrays, its tile, and its flags by name.

    ``rows`` and ``columns`` are of a tile of scores, ``dim`` and ``dim_v`` of an operand in shared memory. ``teams`` of
    warps share tiles of keys. ``generic`` kernels read most flags from their arguments (``src/portable/generic.cuh``);
    ``varlen`` ones find sequences that lie one after another (``src/sequences.cuh``); of ``eight`` key and value are
    stored in 8 bits (``src/portable/stored.cuh``).
    """

    kernel: str
    dtype: str
    rows: int = 0
    columns: int = 0
    dim: int = 0
    dim_v: int = 0
    warps: int = 4
    stages: int = 1
    resident: int = 1
    shared: int = 0
    flags: tuple[tuple[str, int], ...] = ()
    family: str = "portable"
    teams: int = 1
    generic: bool = False
    varlen: bool = False
    eight: bool = False

    @property
    def source(self) -> str:
        """The file of the kernel, below ``src``."""
        return f"{self.family}/{self.kernel}.cu"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def sizes(self) -> dict[str, str | int]:
        """The macros that sizes and types depend on."""
        return {
            "STORAGE": _STORAGE[self.dtype],
            "TENSOR": int(self.dtype in ("float16", "bfloat16")),
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_D": self.dim,
            "BLOCK_DV": self.dim_v,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
            "TEAMS": self.teams,
            "GENERIC": int(self.generic),
            "VARLEN": int(self.varlen),
            "SHARED_BYTES": self.shared,
            "PHILOX_ROUNDS": ROUNDS,
            **({"EIGHT": 1} if self.eight else {}),  # which nearly no kernel has, so that the others do not name it
        }

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.columns} d{self.dim}/{self.dim_v} w{self.warps} s{self.stages}"
        kind = [name for name in ("generic", "varlen", "eight") if getattr(self, name)]
        return " ".join([self.kernel, self.dtype, tile, *kind, *(f"{name}={value}" for name, value in self.flags)])
