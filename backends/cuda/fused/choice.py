"""What the backward in one pass takes, why not, and its tiles, the first the choice."""

from __future__ import annotations

from collections.abc import Iterator

from attnswitch.machine.backend import Regime
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from ...own import arithmetic
from ..classes import per_class
from .tiles import DIMS, FusedTile, dim, shared

__all__ = ["REGIME", "against", "measured", "ranked"]

#: Queries, at least: fewer leave most of a tile empty.
_FEW = 64
#: Head dimensions at which GPUs of a compute capability were measured to be faster with it: there it is the choice, and
#: elsewhere ``attnswitch tune`` tries it.
MEASURED: dict[tuple[int, int], tuple[int, ...]] = {(9, 0): DIMS}
#: How long two blocks beside each other on an SM take, over one of twice the keys, on an H200; and one block alone.
_BESIDE, _ALONE = 1.09, 0.65
#: The share of the SMs that have a block, at least. The backward on an H200 in ms, and the portable one: 12 blocks, of
#: 24/6 heads, 5,504 x 128, D 64, 3.68 and 0.55; 64 of 8/1, 4,096, causal, 5.43 and 2.37; 64 of 8, 2,048 x 512, 0.35 and
#: 0.25; 128 of B 2, 16/2, 2,048, 2.75 and 3.58; 128 of 16/4, 2,048, D 128, causal, 2.29 and 2.50.
_BUSY = 2 / 3
#: Keys and queries of a tile, and blocks of an SM, by head dimension: of those whose registers nearly suffice.
_TILES = {
    32: ((128, 64), (128, 32)),
    64: ((128, 64), (64, 64, 2), (128, 32)),
    96: ((128, 64), (128, 32)),
    128: ((64, 64), (128, 32)),
}

#: What the verifier draws for it.
REGIME = Regime(
    ("float32",), ((64, 64), (128, 128), (96, 80), (32, 20), (60, 64)), (64, 128), queries=_FEW, aligned=True
)


def against(problem: Problem, device: Device) -> tuple[str, ...]:
    """Why it does not take ``problem`` on ``device``, one reason each; empty if it does."""
    reasons = _of_class(problem)
    if not problem.seq_k or problem.is_empty or problem.seq_q < _FEW:
        reasons += (f"{problem.seq_q} queries, {problem.seq_k} keys: most of its tiles would be empty",)
    if device.kind == "cuda" and device.capability is not None and device.capability < (8, 0):
        reasons += (f"{device}: its tiles are brought by copies of compute capability 8.0 and later",)
    if not reasons and not _fitting(problem, device):
        reasons = (f"{device}: its tiles do not fit shared memory",)
    return reasons


def measured(problem: Problem, device: Device) -> bool:
    """Whether it is the choice where it takes ``problem``.

    Not where a few blocks have long ways, which the portable kernels share among more (``portable.shares``).
    """
    if device.capability is None or dim(problem) not in MEASURED.get(device.capability, ()):
        return False
    return _blocks(ranked(problem, device)[0], problem) >= _BUSY * (device.sms or 64)


def _blocks(tile: FusedTile, problem: Problem) -> int:
    return problem.batch * problem.heads_kv * arithmetic.tiles(problem.seq_k, tile.keys)


def ranked(problem: Problem, device: Device) -> tuple[FusedTile, ...]:
    """The tiles that fit ``device``, the one that is soonest done first; in the emulator as they are listed."""
    fitting = _fitting(problem, device)
    if device.kind != "cuda":
        return fitting
    return tuple(sorted(fitting, key=lambda tile: _time(tile, problem, device)))


def _fitting(problem: Problem, device: Device) -> tuple[FusedTile, ...]:
    tiles = (FusedTile(*sizes) for sizes in _TILES[dim(problem)])
    return tuple(tile for tile in tiles if device.kind != "cuda" or shared(tile, problem) <= device.on_chip)


def _time(tile: FusedTile, problem: Problem, device: Device) -> float:
    """Rounds of blocks, times the keys of an SM."""
    rounds, left = divmod(_blocks(tile, problem), (device.sms or 64) * tile.resident)
    if tile.resident == 1:
        return float(rounds + (left > 0)) * tile.keys
    last = 0.0 if not left else _ALONE if left <= device.sms else _BESIDE
    return (rounds * _BESIDE + last) * tile.keys * tile.resident


@per_class
def _of_class(problem: Problem) -> tuple[str, ...]:
    return tuple(_features(problem))


def _features(p: Problem) -> Iterator[str]:
    if p.dtype != "float32":
        yield f"{p.dtype}: it multiplies float32"
    if set(p.grads) != set("qkv"):
        yield f"grad={p.grads}: it makes those of query, key and value together"
    if p.deterministic:
        yield "deterministic=True: its blocks add to dQ in any order"
    for form in ("varlen", "sinks", "alibi", "page"):
        if getattr(p, form):
            yield f"{form}: it knows positions and lengths alone"
    if p.mask is not None:
        yield "attn_mask: it has none"
    if arithmetic.capped(p):
        yield f"softcap={p.softcap:g}: it has none"
    if p.dropout:
        yield f"dropout_p={p.dropout:g}: it has none"
    if p.softmax_scale <= 0.0:
        yield f"scale={p.softmax_scale:g}: a positive one becomes part of its exponential"
    for name in ("dim_qk", "dim_v"):
        if (size := getattr(p, name)) > DIMS[-1] or size % 4:
            yield f"{name}={size}: it moves 4 columns at once, of {DIMS[-1]} at most"
    for name in ("query", "key", "value"):
        memory = getattr(p, name)
        if memory.strided or memory.align < 16:
            yield f"{name} lies so that copies of 16 bytes do not reach its rows"
