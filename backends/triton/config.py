"""Tile sizes, warps, pipeline stages and splits of the Triton kernels: the one place where they are chosen.

Each choice names what it was measured against; the figures are bf16 on an H200 with Triton 3.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnswitch.machine.backend import Config
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ..own import arithmetic, packing

__all__ = [
    "MOST_COLUMNS",
    "Tile",
    "TritonConfig",
    "block",
    "configs",
    "packs",
    "panelled",
    "panels",
    "rows",
    "shared",
    "small",
    "splits",
    "width",
]

#: Columns of a head: at most, of one that fits a tile, and of a panel of wider ones.
MOST_COLUMNS, _WHOLE, _PANEL = 576, 256, 128
#: Shared memory of a block where the device does not say: what every GPU since sm_86 has.
_SHARED = 99 * 1024
#: At most what the barriers of a pipeline take (sm_120).
_BARRIERS = 64
#: Scores of a problem whose kernels take a GPU no longer than its host needs for one launch more, or two descriptors.
_FEW_SCORES = 2**23
#: Rows of a tile that query heads may share.
_PACKED = 128
#: Queries that stand for those of any sequence, where they must not decide.
_ANY_QUERIES = 128
#: Tiles of 64 keys, one after the other, that take a program as long as the launch that merges splits.
_MERGED = 8
#: Most programs that the keys of one tile of queries are split among.
MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries and of keys in a tile, warps of a program, and stages of its pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int
    #: Most registers of a thread, 0 for as many as the compiler likes: fewer let more programs share an SM.
    registers: int = 0
    #: Of kernels that are compiled for classes of head dimensions and no strides, and of features for those alone that
    #: are arrays or random numbers: mask, lengths, dropout.
    generic: bool = False

    def __str__(self) -> str:
        limit = f" r{self.registers}" if self.registers else ""
        kind = " generic" if self.generic else ""
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages}{limit}{kind}"


@dataclass(frozen=True, slots=True)
class TritonConfig(Config):
    """Tiles of the three kernels that cost: the forward, the gradients of key and value, the gradient of query."""

    forward: Tile
    key_gradients: Tile
    query_gradient: Tile
    #: Keys are split among this many programs; 1 is none.
    splits: int = 1

    def __str__(self) -> str:
        parts = (f"forward {self.forward}", f"keys {self.key_gradients}", f"queries {self.query_gradient}")
        return ", ".join((*parts, f"splits {self.splits}"))


def block(dim: int) -> int:
    """The head dimension as a kernel sees it: a power of two, and at least what a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def panelled(problem: Problem) -> bool:
    """Whether its heads are too wide for a tile, and taken in panels."""
    return max(problem.dim_qk, problem.dim_v) > _WHOLE


def panels(problem: Problem, dim: int) -> int:
    """How many panels a program makes one of, in an output of heads of ``dim``."""
    return -(-dim // _PANEL) if panelled(problem) else 1


def width(problem: Problem, dim: int) -> int:
    """Columns of a tile of heads of ``dim``, or of a panel of them."""
    return _PANEL if panelled(problem) else block(dim)


def packs(problem: Problem) -> bool:
    """Whether the query heads that share a key head lie in one tile.

    However many queries, where the bits of a sequence may not depend on how many others have.
    """
    if problem.splits and problem.varlen:
        return problem.group > 1
    return packing.packs(problem, _PACKED)


def rows(problem: Problem) -> int:
    """Rows of queries for each program head."""
    return problem.seq_q * (problem.group if packs(problem) else 1)


def small(problem: Problem, device: Device) -> bool:
    """Whether launches cost more than what they could save. The interpreter makes them all, to check them."""
    p = problem
    return device.kind != "cpu" and p.batch * p.heads_q * p.seq_q * p.seq_k < _FEW_SCORES


def configs(problem: Problem, device: Device) -> Iterator[TritonConfig]:
    """Generic kernels where they serve; the heuristic's choice; then every other combination that fits the device.

    Where the call says how keys are divided, the heuristic's choice alone, in which nothing of a batch has a say: the
    bits of a sequence are those that it has alone.
    """
    if problem.splits:
        queries = _ANY_QUERIES if problem.varlen else problem.seq_q
        yield _heuristic(problem.replace(batch=1, seq_q=queries, seq_k=problem.page), device)
        return
    if arithmetic.generic(problem, emulated=device.kind == "cpu"):
        yield _generic(problem, device)
    best = _heuristic(problem, device)
    yield best
    if device.kind == "cpu":
        return
    for tile in _tiles((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        if _fits(tile, problem, device, _forward_rows):
            fewest = splits(problem, device, tile)
            more = 1 < fewest <= min(MOST_SPLITS, -(-problem.seq_k // tile.keys)) // 2
            for count in (fewest, 2 * fewest) if more else (fewest,):
                other = replace(best, forward=_of_pages(tile, problem), splits=count)
                if other != best:
                    yield other
    if problem.grads:
        for tile in _tiles((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
            if tile != best.key_gradients and _fits(tile, problem, device, _key_gradient_rows):
                yield replace(best, key_gradients=tile)
            if tile != best.query_gradient and _fits(tile, problem, device, _query_gradient_rows):
                yield replace(best, query_gradient=tile)


def _generic(problem: Problem, device: Device) -> TritonConfig:
    """Small tiles, which compile sooner, and which many programs share."""
    if device.kind == "cpu":
        tile = Tile(16, 16, 4, 1, generic=True)
    elif problem.dtype == "float32":
        tile = Tile(16, 16, 4, 2, generic=True)
    else:
        tile = Tile(32, 32, 4 if arithmetic.dim_class(problem) <= 64 else 8, 2, generic=True)
    return TritonConfig(tile, tile, tile)


def _tiles(
    queries: tuple[int, ...], keys: tuple[int, ...], warps: tuple[int, ...], stages: tuple[int, ...]
) -> list[Tile]:
    return [Tile(*choice) for choice in itertools.product(queries, keys, warps, stages)]


def _heuristic(problem: Problem, device: Device) -> TritonConfig:
    if device.kind == "cpu":  # the interpreter: several tiles in lengths that it can do
        forward = Tile(32, 16, 4, 1)
        return TritonConfig(forward, Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), splits=splits(problem, device, forward))
    wide = max(width(problem, problem.dim_qk), width(problem, problem.dim_v))
    if problem.dtype == "float32":
        # IEEE products run on the ordinary units, out of registers: two stages of loads are a quarter faster than one.
        small = Tile(32, 32, 4, 2) if wide <= 64 else Tile(32, 32, 8, 1)
        # Gradients of wide heads spill: with 32 x 32 they take 1.7 times as long, and 19 s to compile instead of 8.
        gradients = Tile(16, 16, 4, 1) if wide > 128 else small
        chosen = TritonConfig(Tile(32, 32, 2, 1) if wide <= 64 else small, gradients, gradients)
    elif panelled(problem):  # eight warps, since four spill (compiled for sm_90, not measured)
        chosen = TritonConfig(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2))
    elif wide <= 64:
        # TFLOP/s of the forward, full and causal: 441, 390 with 64 x 128 at S 4096 against 415, 389 with 128 x 64.
        short = problem.positional and problem.seq_k <= 2048
        forward = Tile(64, 64, 4, 2) if short else Tile(64, 128, 4, 2)
        chosen = TritonConfig(forward, Tile(64, 64, 4, 3), Tile(128, 64, 8, 3))
    elif wide <= 128:
        # Two programs of 128 x 64 an SM: 542 TFLOP/s at S 4096 against 475 with 64 x 64; under a causal mask, whose
        # programs are short, 421 against 455, and the longer ones of S 16,384 again 517 against 458.
        short = problem.positional and problem.seq_k <= 8192
        forward = Tile(64, 64, 4, 3) if short else Tile(128, 64, 4, 2)
        # Of dK and dV, two tiles of 64 queries in flight for full attention; the second loop of a causal one has no
        # registers left for them, and three of 32 are faster (608 against 286 TFLOP/s at S 16,384). Sequences one after
        # another come without descriptors, and spill as much with 64 (compiled for sm_90, not measured).
        keys = Tile(32, 64, 4, 3) if problem.positional or problem.varlen else Tile(64, 64, 4, 2)
        chosen = TritonConfig(forward, keys, Tile(128, 64, 8, 3))
    else:
        # Products need 64 rows on Hopper's matrix units: 0.94 ms for dK and dV with 64 x 64 against 2.7 with 32 x 64.
        stages = 2 if (device.capability or (0, 0)) < (10, 0) else 1  # where products keep more in shared memory
        chosen = TritonConfig(Tile(128, 64, 8, 2), Tile(64, 64, 8, stages), Tile(128, 32, 8, 2))
    if (
        problem.dropout and problem.dtype != "float32" and wide <= 128 and not panelled(problem)
    ):  # Philox wants registers
        chosen = replace(chosen, forward=Tile(64, 64, 4, 3))  # 402 us against 812 with 128 x 64
    few = rows(problem)
    if few <= 64:  # four tiles of keys in flight stream at the memory's speed
        height = max(16, 1 << (max(few, 1) - 1).bit_length())
        tile = Tile(height, 32 if problem.dtype == "float32" else 64, 4, 4)
        if height == 16 and wide == 128 and problem.dtype != "float32":
            tile = Tile(height, 128, 4, 3)  # 135 us for 131,072 keys of 8 heads, where 64 x 4 takes 142
        chosen = replace(chosen, forward=tile)
    chosen = TritonConfig(
        _shrunk(chosen.forward, problem, device, _forward_rows),
        _shrunk(chosen.key_gradients, problem, device, _key_gradient_rows),
        _shrunk(chosen.query_gradient, problem, device, _query_gradient_rows),
    )
    chosen = replace(chosen, splits=splits(problem, device, chosen.forward))
    return replace(chosen, forward=_of_pages(chosen.forward, problem))


def _of_pages(tile: Tile, problem: Problem) -> Tile:
    """``tile`` with stages for as many keys on their way where they lie in pages.

    Triton (3.6 and 3.9) divides the stages between loads of which one, of the table, gives the address of the other.
    """
    return replace(tile, stages=2 * tile.stages - 1) if problem.page else tile


def splits(problem: Problem, device: Device, tile: Tile) -> int:
    """Among how many programs the keys of one tile of queries are split, so that every SM has work.

    One program an SM streams keys at 92 % of the memory's speed, two at 89 %. A split holds two tiles, or one of 128.
    Or as many as the call says.
    """
    if problem.splits:
        return problem.splits
    heads = problem.heads_q // (problem.group if packs(problem) else 1)
    programs = problem.batch * heads * -(-rows(problem) // tile.queries)
    if not programs or device.kind == "cpu":
        # The interpreter splits where it can, since that is what it is there to check.
        return 2 if device.kind == "cpu" and programs and problem.seq_q <= 4 and problem.seq_k > 2 * tile.keys else 1
    sms = device.sms or 64
    count = max(1, min(sms // programs, problem.seq_k // (2 * min(tile.keys, 64)), MOST_SPLITS))
    spared = (problem.seq_k - problem.seq_k // count) // 64
    return count if spared >= _MERGED else 1


# -- shared memory -----------------------------------------------------------------------------------------------------


def _forward_rows(tile: Tile) -> tuple[int, int]:
    return tile.queries, tile.keys  # of query alone


def _key_gradient_rows(tile: Tile) -> tuple[int, int]:
    return tile.keys, tile.queries


def _query_gradient_rows(tile: Tile) -> tuple[int, int]:
    return tile.queries, tile.keys


#: Rows of an operand that a kernel keeps in shared memory, and rows in each stage of its pipeline.
_Rows = Callable[[Tile], tuple[int, int]]


def _in_place(device: Device) -> bool:
    """Whether products read their operands where they lie in shared memory (wgmma, tcgen05), and not in registers."""
    return (9, 0) <= (device.capability or (0, 0)) < (12, 0)


def shared(problem: Problem, device: Device, kernel: str, tile: Tile) -> int:
    """Bytes of shared memory that a block of ``kernel`` takes: the terms that grow with the tile.

    Triton adds barriers, tiles of a mask and what layouts exchange, which no formula tells. For a problem without mask,
    lengths and dropout, of dimensions that are not padded, this is within a quarter of what was compiled; on Hopper, in
    types of 16 bits, within 4 %. Of heads in panels it is more than what was compiled, by up to a third.
    """
    size, dims = DTYPES[problem.dtype], (width(problem, problem.dim_qk), width(problem, problem.dim_v))
    stages = (tile.stages + 1) // 2 if problem.page else tile.stages
    if kernel == "forward":
        own, streamed, least = tile.queries * dims[0], tile.keys, max(dims)
    else:
        kept, streamed = (_key_gradient_rows if kernel == "key_gradients" else _query_gradient_rows)(tile)
        own, least = kept * sum(dims), sum(dims)
    grouped = _in_place(device) and problem.dtype != "float32"
    if grouped and (kernel != "forward" or tile.queries >= 64):  # products read what was loaded where it lies
        return (own + stages * streamed * sum(dims)) * size
    buffers = streamed * (sum(dims) * (stages - 1) if stages > 1 else least)
    return (own + buffers + tile.queries * tile.keys) * size


def _by_registers(problem: Problem, device: Device, rows: _Rows) -> bool:
    """Whether it is a forward whose shared memory ``_taken_by_registers`` tells; with dropout it varies."""
    return rows is _forward_rows and problem.dtype != "float32" and not problem.dropout and not _in_place(device)


def _taken_by_registers(tile: Tile, problem: Problem) -> int:
    """Bytes of a forward whose operands are in registers, at most: compiled for sm_80, sm_86, sm_89 and sm_120.

    The buffer of a tile is free once it is read, so that one fewer than there are stages are on their way.
    """
    size, dims = DTYPES[problem.dtype], (width(problem, problem.dim_qk), width(problem, problem.dim_v))
    masked, waiting = problem.element("attn_mask"), max(1, tile.stages - 1)
    # Tiles of a mask are on their way too, beside P; scores that are laid out as the mask is take 4 bytes.
    a_score = max(4, size + masked * waiting) if masked else size
    others = tile.queries * tile.keys * a_score + _BARRIERS
    if panelled(problem):  # panels of query are on their way as well, in a loop that loads nothing of a table of pages
        waiting = max(1, _of_pages(tile, problem).stages - 1)
        return waiting * (tile.queries + tile.keys) * _PANEL * size + others
    row = sum(dims) * size + (16 if problem.page else 0)  # the numbers of its page, one for keys and one for values
    return tile.queries * dims[0] * size + waiting * tile.keys * row + others


def _fits(tile: Tile, problem: Problem, device: Device, rows: _Rows) -> bool:
    room = device.shared_memory or _SHARED
    if _by_registers(problem, device, rows):
        return _taken_by_registers(tile, problem) <= room
    dims = width(problem, problem.dim_qk), width(problem, problem.dim_v)
    kept, streamed = rows(tile)
    row = sum(dims) * DTYPES[problem.dtype]
    own = tile.queries * dims[0] * DTYPES[problem.dtype] if rows is _forward_rows else kept * row
    a_score, masked = DTYPES[problem.dtype], problem.element("attn_mask")
    capability, waiting = device.capability or (0, 0), max(1, tile.stages - 1)
    # Tiles of a wider mask lie there as they come. Those of 4 bytes find room beside P's, but on Blackwell.
    if masked == 8 or (masked > a_score and capability >= (10, 0)):
        a_score = 2 * a_score + masked * waiting
    elif masked and capability >= (9, 0):  # those on their way, or scores that are laid out as the mask is
        a_score = max(4, masked * waiting)
    needed = own + max(1, tile.stages) * streamed * row + tile.queries * tile.keys * a_score
    if masked and capability < (9, 0):  # those on their way, beside one tile fewer than there are stages
        needed = max(needed, own + waiting * (streamed * row + tile.queries * tile.keys * masked))
    return needed <= room


def _shrunk(tile: Tile, problem: Problem, device: Device, rows: _Rows) -> Tile:
    """``tile`` with fewer stages, then fewer rows, until it fits the device's shared memory."""
    fewest = 2 if _by_registers(problem, device, rows) else 1  # two take no more than one there
    while not _fits(tile, problem, device, rows):
        if tile.stages > fewest:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 32:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.queries > 32:
            tile = replace(tile, queries=tile.queries // 2)
        else:
            return tile
    return tile
