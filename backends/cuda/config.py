"""Which tiles and splits the CUDA kernels get for a problem on a device, of those that the families' rooms rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from attnswitch.machine.backend import Config
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ..own import arithmetic
from .classes import per_class
from .families import against_hopper, against_hopper_backward, against_latent
from .fused import choice as fused_choice
from .fused.tiles import FusedTile
from .hopper import choice as hopper_choice
from .hopper.tiles import HopperGradients, HopperTile, LatentTile
from .portable import choice as portable_choice
from .portable import timed
from .portable.splits import schedule
from .portable.tiles import FEW, FEWER, Tile, brief, fits, mixed, on_tensor_cores, packs, rows, shrunk

__all__ = ["CudaConfig", "configs"]

#: Splits that are tried where sequences have lengths of their own, which the host does not know.
_PARTS = (1, 2, 3, 4, 5, 6, 8, 12)
#: The fewest rows that a warp of the ordinary units has.
_LEAST_ROWS = 4
#: Where there are no gradients.
_NONE = Tile(16, 16, 1, 1)
#: Where a few queries see a few keys.
_BRIEF = Tile(32, 32, 2, 2)


@dataclass(frozen=True, slots=True)
class CudaConfig(Config):
    """Tiles of the kernels that cost: the forward, and the gradients of key and value, of query, of a float mask.

    Where there is a ``backward``, Hopper's or that of one pass, it makes all gradients, and the portable ones are not
    launched.
    """

    forward: Tile | HopperTile | LatentTile
    key_gradients: Tile
    query_gradient: Tile
    mask_gradient: Tile
    #: Keys are split among this many blocks, unless the tile says that the GPU deals them; 1 is none.
    splits: int = 1
    #: Whether the gradients of key and value are made by one launch, or by one each for want of registers.
    key_and_value: bool = True
    backward: HopperGradients | FusedTile | None = None

    def __str__(self) -> str:
        if isinstance(self.forward, LatentTile):
            return f"forward {self.forward}" + ("" if self.forward.even else f", splits {self.splits}")
        if self.backward is not None:
            return f"forward {self.forward}, backward {self.backward}, splits {self.splits}"
        keys = f"keys {'' if self.key_and_value else 'apart '}{self.key_gradients}"
        parts = (f"forward {self.forward}", keys, f"queries {self.query_gradient}", f"mask {self.mask_gradient}")
        return ", ".join((*parts, f"splits {self.splits}"))


def configs(problem: Problem, device: Device) -> Iterator[CudaConfig]:
    """The first is the choice; the others are for tuning.

    Generic kernels where they serve; Hopper's where they take the problem; the portable family's first; then every
    other combination that fits the device.
    Where the problem says how keys are split there is one, which depends on neither batch nor lengths, as bits do.
    """
    if not against_latent(problem, device):
        yield from _latent(problem, device)
        return
    if device.kind == "cpu":
        yield _emulated(problem, device)
        return
    if problem.splits:
        yield _with(problem, device, _forwards(problem, device.on_chip)[0], problem.splits)
        return
    fused = _fused(problem, device)
    hopper = _hopper(problem, device)
    chosen = fused if fused and fused_choice.measured(problem, device) else hopper
    found = _ordinary(problem, device, chosen[0] if chosen else None)
    first = next(found)
    yield first
    others: tuple[HopperGradients | FusedTile, ...] = (*hopper, *fused)
    yield from (replace(first, backward=tile) for tile in others if tile != first.backward)
    yield from found


def _latent(problem: Problem, device: Device) -> Iterator[CudaConfig]:
    """Of heads too wide for all but one kernel: by how keys are split."""
    tile, best = hopper_choice.latent(problem, device), problem.splits or hopper_choice.latent_splits(problem, device)
    if tile.even:
        yield CudaConfig(tile, _NONE, _NONE, _NONE)
        tile = replace(tile, even=False)
    for splits in dict.fromkeys((best, *(() if problem.splits or device.kind == "cpu" else _PARTS))):
        yield CudaConfig(tile, _NONE, _NONE, _NONE, splits)


def _ordinary(problem: Problem, device: Device, backward: HopperGradients | FusedTile | None) -> Iterator[CudaConfig]:
    """All but the other tiles of the backward in one pass."""
    on_chip = device.on_chip
    if arithmetic.generic(problem):
        yield _generic(problem, on_chip)
    if not against_hopper(problem, device):
        for hopper in hopper_choice.ranked(problem, device):
            yield replace(_with(problem, device, hopper, 1), backward=backward)
    best = replace(_heuristic(problem, device), backward=backward)
    yield best
    if problem.page and rows(problem) <= FEW:
        yield from _divided(problem, on_chip, best)
    elif best.splits > 1:
        yield replace(best, splits=1)
    tall = (16, 32, 64, 128) if on_tensor_cores(problem) else (8, 16, 32, 64, 128)
    searched = [Tile(*choice) for choice in itertools.product(tall, (32, 64, 128), (1, 2, 4, 8), (1, 2, 3))]
    lengths = (16, 32, 64) if on_tensor_cores(problem) else (8, 16, 32)
    few = itertools.product(lengths, (2, 4, 8), (2, 3, 4)) if rows(problem) <= FEW else ()
    near = partial(portable_choice.ranked, problem=problem, device=device)
    forwards = near("forward") if rows(problem) > FEWER else []
    for tile in dict.fromkeys((*forwards, *searched, *(Tile(_height(problem), *choice, apart=True) for choice in few))):
        if tile != best.forward and _suits(tile, "forward", problem, on_chip):
            yield replace(best, forward=tile, splits=schedule(problem, device, tile)[1])
    if best.backward is not None:
        yield (best := replace(best, backward=None))
    if not problem.grads:
        return
    for tile in dict.fromkeys((*near("query_gradient"), *searched)):
        if tile != best.query_gradient and _suits(tile, "query_gradient", problem, on_chip):
            yield replace(best, query_gradient=tile)
    turned = (replace(tile, queries=tile.keys, keys=tile.queries) for tile in searched)
    for tile in dict.fromkeys((*near("key_gradients"), *turned)):
        if tile != best.key_gradients and _suits(tile, "key_gradients", problem, on_chip):
            yield replace(best, key_gradients=tile)
    for tile in near("mask_gradient") if "m" in problem.grads else ():
        if tile != best.mask_gradient:
            yield replace(best, mask_gradient=tile)


def _divided(problem: Problem, on_chip: int, best: CudaConfig) -> Iterator[CudaConfig]:
    """Every number of splits, by the tiles that may be first, and by one of more warps and fewer stages."""
    tiles = _forwards(problem, on_chip)
    more = replace(tiles[0], warps=12, stages=2)
    for tile, parts in itertools.product((*tiles, more), _PARTS):
        config = replace(best, forward=tile, splits=parts)
        if config != best and fits(tile, "forward", problem, on_chip):
            yield config


def _hopper(problem: Problem, device: Device) -> tuple[HopperGradients, ...]:
    """The tiles of Hopper's backward, if it takes the problem, the fastest first."""
    if not problem.grads or against_hopper_backward(problem, device):
        return ()
    return tuple(hopper_choice.ranked_gradients(problem, device))


def _fused(problem: Problem, device: Device) -> tuple[FusedTile, ...]:
    """The tiles of the backward in one pass, if it takes the problem."""
    if not problem.grads or fused_choice.against(problem, device):
        return ()
    return fused_choice.ranked(problem, device)


def _suits(tile: Tile, kernel: str, problem: Problem, on_chip: int) -> bool:
    """Whether a warp gets whole rows, and few enough for its registers, and the tile fits shared memory."""
    own = tile.keys if kernel == "key_gradients" else tile.queries
    each, left_over = divmod(own, tile.warps // tile.teams)
    least, most = (16, 32) if on_tensor_cores(problem) else (4, 32)
    return not left_over and least <= each <= most and each % least == 0 and fits(tile, kernel, problem, on_chip)


def _emulated(problem: Problem, device: Device) -> CudaConfig:
    """Small tiles, several to a length that an emulation can do, and between them every shape of warp and pipeline.

    Hopper's kernels and those of one pass take turns with the portable ones, so that all are checked.
    """
    generic = arithmetic.generic(problem, emulated=True) and not problem.splits
    kind = partial(Tile, generic=generic)
    forward: Tile | HopperTile = kind(32, 16, 2, 2)
    if rows(problem) <= FEW and not generic and not mixed(problem):
        in_sections = problem.cache and problem.page % 32 == 16  # so that a tile has several pages
        keys = 32 if in_sections else 16
        forward = Tile(_height(problem), keys, 3, 2, apart=True)
    # Split where it can be, since that is what is to be checked.
    splits = 3 if not generic and rows(problem) <= 64 and problem.seq_k > 2 * forward.keys else 1
    splits = problem.splits or splits
    if problem.seq_q % 2 and not against_hopper(problem, device):
        ranked = hopper_choice.ranked(problem, device)
        forward, splits = ranked[problem.seq_k % len(ranked)], 1
    fused = _fused(problem, device)
    at_once: tuple[HopperGradients | FusedTile | None, ...] = _hopper(problem, device)
    if not at_once:
        at_once = (fused[problem.seq_q % len(fused)] if fused else None,)
    return CudaConfig(
        forward,
        key_gradients=kind(16, 32, 2, 3),
        query_gradient=kind(32, 32, 1, 1),
        mask_gradient=kind(32, 16, 2, 1),
        backward=at_once[0] if problem.seq_k % 2 else None,
        splits=splits,
        key_and_value=max(problem.dim_qk, problem.dim_v) <= 64,
    )


@per_class
def _generic(problem: Problem, on_chip: int) -> CudaConfig:
    """Small tiles, which many blocks share, and which leave registers for every feature."""
    wide = max(problem.dim_qk, problem.dim_v)
    if problem.dtype == "float64":
        tile = Tile(16, 16, 4, 1)
    elif problem.dtype == "float32":
        tile = Tile(32, 32, 4, 1)
    else:
        tile = Tile(64, 32 if wide <= 128 else 16, 4, 2)
    tile = replace(tile, generic=True)
    turned = replace(tile, queries=16 if wide > 64 else tile.keys, keys=tile.queries)
    return CudaConfig(
        shrunk(tile, "forward", problem, on_chip),
        shrunk(turned, "key_gradients", problem, on_chip),
        shrunk(tile, "query_gradient", problem, on_chip),
        shrunk(replace(tile, stages=1), "mask_gradient", problem, on_chip),
        key_and_value=wide <= 128,
    )


def _heuristic(problem: Problem, device: Device) -> CudaConfig:
    if timed.taken(problem, device):
        return _with(problem, device, *timed.soonest(problem, device))
    forwards = _forwards(problem, device.on_chip)
    if rows(problem) > FEWER:
        forwards = tuple(portable_choice.ranked("forward", problem, device)[:1]) or forwards
    _, splits, tile = min([(*schedule(problem, device, tile), tile) for tile in forwards], key=itemgetter(0))
    return _with(problem, device, tile, splits)


def _with(problem: Problem, device: Device, forward: Tile | HopperTile, splits: int) -> CudaConfig:
    """The config with that forward, and the tiles of gradients that all of its class have, or that are reckoned."""
    config = _of_class(problem, device.on_chip, forward, splits)
    if not problem.grads or not portable_choice.taken(problem, device):
        return config
    first = partial(_first, problem=problem, device=device)
    return replace(
        config,
        key_gradients=first("key_gradients", config.key_gradients),
        query_gradient=first("query_gradient", config.query_gradient),
        mask_gradient=first("mask_gradient", config.mask_gradient),
    )


def _first(kernel: str, otherwise: Tile, problem: Problem, device: Device) -> Tile:
    """The best of the reckoned tiles, or another where none fits."""
    return next(iter(portable_choice.ranked(kernel, problem, device)), otherwise)


@per_class
def _of_class(problem: Problem, on_chip: int, forward: Tile | HopperTile, splits: int) -> CudaConfig:
    return CudaConfig(forward, *_gradients(problem, on_chip), splits, _together(problem))


def _forwards(problem: Problem, on_chip: int) -> tuple[Tile, ...]:
    """The tiles that the portable forward may have at first."""
    if brief(problem):  # which asks for keys, of which a class knows nothing
        return (shrunk(_BRIEF, "forward", problem, on_chip),)
    return _forwards_of_class(problem, on_chip)


@per_class
def _forwards_of_class(problem: Problem, on_chip: int) -> tuple[Tile, ...]:
    wide = max(problem.dim_qk, problem.dim_v)
    few = FEWER if mixed(problem) else rows(problem)
    if few <= FEW:
        return _streaming(problem, on_chip)
    if few <= FEWER:
        # Blocks of few warps, several to an SM, with tiles of keys in flight.
        height = 1 << (few - 1).bit_length()
        # What is stored in 8 bits is widened by the warps of a block, of which an SM then has more.
        keys = 64 if on_tensor_cores(problem) and not problem.cache else 32
        tile = Tile(height, keys, height // 16, 3)
        # In float32 the fewer stages, the more blocks an SM has, and the more can split keys.
        staged = () if problem.dtype != "float32" else (tile, replace(tile, stages=2), replace(tile, stages=1))
        if fitting := tuple(tile for tile in staged if fits(tile, "forward", problem, on_chip)):
            return fitting
    elif packs(problem) and problem.dtype != "float64":
        # 29 queries of 16/4 heads against 15,429 keys, D 96, B 58: 0.86 ms, and 1.79 each head alone; in float32, 11 of
        # 40/5 against 2,721, D 128, B 26: 0.80, and 1.23 (an H200).
        tile = Tile(64, 64, 4, 2, 2) if on_tensor_cores(problem) else Tile(64, 32, 4, 3)
    elif problem.dtype == "float64":
        tile = Tile(64, 32, 4, 1) if wide <= 128 else Tile(32, 32, 4, 1)
    elif problem.dtype == "float32":
        tile = Tile(128, 64, 4, 1, 2) if wide <= 64 else Tile(64, 32, 4, 1, 2)
    elif wide <= 128:
        tile = Tile(128, 64 if wide <= 64 else 32, 4, 2, 2)
    else:
        tile = Tile(64, 64, 4, 1, 2)
    return (shrunk(tile, "forward", problem, on_chip),)


def _height(problem: Problem) -> int:
    """Rows of a tile that has all of a few: a matrix instruction's, or, on the ordinary units, those that there are."""
    if on_tensor_cores(problem):
        return FEW
    return min(FEW, max(_LEAST_ROWS, 1 << (rows(problem) - 1).bit_length()))


@per_class
def _gradients(problem: Problem, on_chip: int) -> tuple[Tile, Tile, Tile]:
    """The tiles of the gradients of key and value, of query, and of a mask."""
    wide = max(problem.dim_qk, problem.dim_v)
    if problem.dtype == "float64":
        query = Tile(32, 32, 4, 1) if wide <= 128 else Tile(16, 16, 4, 1)
    elif problem.dtype == "float32":
        query = Tile(64, 64, 4, 1, 2) if wide <= 64 else Tile(64, 32, 4, 1, 2)
    elif wide <= 64:
        query = Tile(128, 32, 4, 2, 2)
    elif wide <= 128:
        query = Tile(64, 64, 4, 2, 2)
    else:
        query = Tile(64, 32, 4, 2)
    keys = replace(query, queries=query.keys, keys=query.queries)
    if on_tensor_cores(problem) and 64 < wide <= 128:
        keys = Tile(32, 64, 4, 2, 2)
    mask = Tile(64, 32, 4, 1) if on_tensor_cores(problem) or wide <= 64 else Tile(32, 32, 4, 1)
    return (
        shrunk(keys, "key_gradients", problem, on_chip),
        shrunk(query, "query_gradient", problem, on_chip),
        shrunk(mask, "mask_gradient", problem, on_chip),
    )


def _together(problem: Problem) -> bool:
    """Whether the gradients of key and value are made by one launch."""
    return max(problem.dim_qk, problem.dim_v) <= (64 if problem.dtype == "float64" else 128)


def _streaming(problem: Problem, on_chip: int) -> tuple[Tile, ...]:
    """The tiles of a few rows, warps apart: eight of them or four; or as many as fit, where tiles are short."""
    size = problem.element("key") if on_tensor_cores(problem) else DTYPES[problem.dtype]  # as shared memory has them
    height, row = _height(problem), (problem.dim_qk + problem.dim_v) * size
    counts: tuple[tuple[int, ...], ...] = ((8, 4), (2,))
    keys = 32 if row <= 256 else 16
    if not on_tensor_cores(problem) and row > 512:
        keys, counts = 8, ((8,), (6,), (4,), (2,))
    # Rows of 8 bits are short: more of them are on their way for as many bytes, where all have room for that.
    for several, stages in itertools.product(counts, (5, 4, 3, 2) if problem.cache else (3, 2)):
        tiles = [Tile(height, keys, warps, stages, apart=True) for warps in several]
        fitting = tuple(tile for tile in tiles if fits(tile, "forward", problem, on_chip))
        if fitting and (stages <= 3 or len(fitting) == len(tiles)):
            return fitting
    return (shrunk(Tile(height, keys, 1, 3), "forward", problem, on_chip),)
