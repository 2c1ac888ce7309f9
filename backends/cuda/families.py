"""Which family of kernels takes forward and backward of a problem: Hopper's where it can, else the portable one.

But tiny problems with anything besides, which share generic kernels of the portable family (``config.configs``).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace

from attnswitch.machine.backend import Regime
from attnswitch.machine.device import Device
from attnswitch.problem import DTYPES, Problem

from ..own import arithmetic
from ..own.regimes import DIMS, PRODUCTS, large
from .classes import per_class
from .fused.choice import REGIME as FUSED
from .hopper.tiles import LATENT, LATENT_DIMS, copies_mask, ordered
from .portable.tiles import FEWER, brief

__all__ = [
    "against_hopper",
    "against_hopper_backward",
    "against_latent",
    "beside_hopper",
    "is_hopper",
    "leaves_idle",
    "query_tiles",
    "regimes",
]

_HALF = ("bfloat16", "float16")
#: Lengths of tiles of Hopper's kernels, of queries and of keys.
_TILES = (128, 192, 64, 80, 112)
#: Rows of queries of the least tile of Hopper's forward.
_ROWS = 128
#: What a float holds in full precision, and thus a factor within an exponential.
_LEAST, _MOST = 2.0**-126, 2.0**127
#: Queries below which its tiles are mostly empty: 198 TFLOP/s with 32 of them, 147 by the portable kernels.
_FEW = 32
#: Head dimensions, beyond the first and up to the last, of which the backward is faster all the same: TRIED.md has 16
#: problems of 1 to 31 queries.
_FEW_DIMS = 32, 128
#: Keys from which on splitting them pays where so few of the SMs have a tile of queries, whatever else is asked for.
_LONG, _BUSY = 4096, 1 / 8
#: The same share where positions alone hide keys, by the widest head dimension, and of wider heads where the queries of
#: each fill half a tile; it shrinks with the keys that they see, down to so many (an H200; TRIED.md).
_BUSY_BARE, _BUSY_WIDE, _LEAST_SEEN = {64: 3 / 8, 96: 5 / 16, 128: 1 / 4}, 3 / 16, 2048
#: The head dimension up to which blocks may add to the gradient of the query in turn, and up to which a float mask is
#: added.
_WIDEST_ORDERED = _WIDEST_ADDED = _WIDEST_DROPPED = 128
_OPERANDS = ("query", "key", "value")
#: Columns of a head that all kernels but the one of wide heads have room for.
WIDEST = 256
#: Its usual head dimensions, and others of its classes; lengths of its tiles.
_WIDE_DIMS, _WIDE_TILES = ((576, 512), (512, 512), (320, 320), (64, 512), (512, 64)), (64, 128)
#: Rows of a page of which it takes several for a tile.
_PARTS = 16, 32
#: Products of a forward from which on the copy of a float mask pays, and those of each of its numbers: of a forward,
#: and of a training step, whose backward makes one too (fixtures/results/h200/copies.json). A copy takes the host 25
#: to 40 us, and as long again in the thread of torch's engine.
_COPIED, _COPIED_TRAINING = (3 * 2**30, 288), (5 * 2**30, 0)
#: How many times as long as Hopper's kernels the portable ones take with what those refuse, forward and training: an
#: H200, ``attnswitch bench run serving`` (fixtures/results/h200/bench-serving.json).
_SLOWER = {"page": (1.4, 1.6)}


def against_hopper(problem: Problem, device: Device) -> tuple[str, ...]:
    """Why Hopper's forward does not take ``problem`` on ``device``, one reason each; empty if it does."""
    if reason := _absent(device):
        return (reason,)
    features, memory = _of_class(problem)
    return (*features, *_sizes(problem, device), *memory, *_mask(problem, device))


@per_class
def _backward_features(p: Problem) -> tuple[str, ...]:
    return tuple(_backward(p))


def against_hopper_backward(problem: Problem, device: Device) -> tuple[str, ...]:
    """The same of its backward."""
    if reason := _absent(device):
        return (reason,)
    features, memory = _of_class(problem)
    few = _few(problem, 1 if _half_filled(problem) else _FEW)
    return (*features, *_backward_features(problem), *few, *memory, *_mask(problem, device))


def against_latent(problem: Problem, device: Device) -> tuple[str, ...]:
    """Why Hopper's forward of heads above ``WIDEST`` columns does not take ``problem`` on ``device``."""
    if reason := _absent(device):
        return (reason,)
    features, memory = _of_wide_class(problem)
    return (*features, *memory)


@per_class
def _of_wide_class(p: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(_wide(p)), tuple(_memory(p))


def _wide(p: Problem) -> Iterator[str]:
    if max(p.dim_qk, p.dim_v) <= WIDEST:
        yield f"heads of at most {WIDEST} columns: it is for wider ones"
    for name, most in zip(("dim_qk", "dim_v"), LATENT_DIMS[-1], strict=True):
        if (dim := getattr(p, name)) > most:
            yield f"{name}={dim}: it has room for {most}"
    if p.page % LATENT.keys and p.page not in _PARTS:
        yield f"page={p.page}: it loads pages of {_PARTS[0]} or {_PARTS[1]} rows, or of whole tiles of {LATENT.keys}"
    if p.cache:
        yield f"cache={p.cache}: it reads pages of query's dtype"
    if p.tree:
        yield "tree_mask: it hides keys by their position"
    if p.mask is not None:
        yield "attn_mask: it hides keys by their position"
    if p.dropout:
        yield f"dropout_p={p.dropout:g}: it has none"
    if p.grads:
        yield "gradients: it is a forward"
    yield from _products(p)


def beside_hopper(problem: Problem, device: Device) -> float:
    """How many times as long the portable kernels take ``problem`` as Hopper's do without its pages and so on.

    1 where Hopper's take neither.
    """
    forms = [slower[bool(problem.grads)] for form, slower in _SLOWER.items() if getattr(problem, form)]
    plain = problem.dense()
    if not forms or against_hopper(plain, device):
        return 1.0
    return max(forms)


def regimes(device: Device) -> tuple[Regime, ...]:
    """Hopper's problems, where there are its kernels, and those that are not tiny.

    In the emulator Hopper's, and those whose backward takes one pass.
    """
    hopper = Regime(_HALF, DIMS, _TILES, queries=_FEW, products=PRODUCTS, aligned=True, often=3)
    wide = Regime(_HALF, _WIDE_DIMS, _WIDE_TILES, aligned=True)
    if device.kind == "cpu":
        return (replace(hopper, products=0), FUSED)
    return (*((hopper, wide) if is_hopper(device) else ()), large(tuple(DTYPES)))


def is_hopper(device: Device) -> bool:
    """Whether its kernels are written for ``device``."""
    return device.kind == "cuda" and device.capability == (9, 0)


def _absent(device: Device) -> str | None:
    """Why ``device`` runs no kernel of the family; the emulator runs all."""
    if device.kind == "cpu":
        return None
    if not is_hopper(device):
        return f"{device}: it is written for compute capability 9.0"
    return _missing() if device.present else None


def _backward(p: Problem) -> Iterator[str]:
    if ordered(p) and (widest := max(p.dim_qk, p.dim_v)) > _WIDEST_ORDERED:
        yield f"deterministic=True with head dimension {widest}: its blocks add to dQ in turn up to {_WIDEST_ORDERED}"
    if "m" in p.grads:
        yield "the gradient of attn_mask: it makes those of query, key and value"
    if p.adds_mask and ordered(p):
        yield "deterministic=True with attn_mask: its blocks that add to dQ in turn add no mask"
    if p.adds_mask and (widest := max(p.dim_qk, p.dim_v)) > _WIDEST_ADDED:
        yield f"attn_mask with head dimension {widest}: it adds one up to {_WIDEST_ADDED}"
    if p.dropout and ordered(p):
        yield f"dropout_p={p.dropout:g} with deterministic=True: its blocks that add to dQ in turn drop no weights"
    if p.dropout and (widest := max(p.dim_qk, p.dim_v)) > _WIDEST_DROPPED:
        yield f"dropout_p={p.dropout:g} with head dimension {widest}: it drops weights up to {_WIDEST_DROPPED}"
    if p.dim_qk % 8:
        yield f"dim_qk={p.dim_qk}: it stores 8 columns at once"


@per_class
def _of_class(p: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(_features(p)), tuple(_memory(p))


def _features(p: Problem) -> Iterator[str]:
    if p.page:
        yield f"page={p.page}: it reads keys that lie one after another, not in pages"
    if p.mask is not None and p.adds_mask:
        if p.mask.dtype != p.dtype:
            yield f"attn_mask of {p.mask.dtype}: it adds one of the operands' type"
        if p.alibi:
            yield "attn_mask beside alibi_slopes: it adds one of them"
        if "k" not in p.mask.axes:
            yield "attn_mask is the same for all keys: it loads one with a number for each"
    yield from _products(p)


def _products(p: Problem) -> Iterator[str]:
    """What every kernel of the family asks for."""
    if p.dtype not in _HALF:
        yield f"{p.dtype}: it multiplies 16-bit types"
    if p.dim_v % 8:
        yield f"dim_v={p.dim_v}: it stores 8 columns at once"
    if arithmetic.capped(p):
        factor, cap = arithmetic.factors(p)
        if not (_LEAST < abs(factor) < _MOST and cap > _LEAST):
            yield f"scale={p.softmax_scale:g}, softcap={p.softcap:g}: their quotient is no float32 of full precision"
    elif not _LEAST < p.softmax_scale < _MOST:
        yield f"scale={p.softmax_scale:g}: a positive float32 of full precision becomes part of its exponential"


def _few(p: Problem, least: int = _FEW) -> Iterator[str]:
    if p.is_empty or not p.seq_k:
        yield "there is nothing to compute"
    elif p.seq_q < least:
        yield f"{p.seq_q} queries: most of its tiles would be empty"


def _half_filled(p: Problem) -> bool:
    """Whether the backward takes few queries too: what it does for each key is most of its work."""
    narrowest, widest = _FEW_DIMS
    return not ordered(p) and min(p.dim_qk, p.dim_v) > narrowest and max(p.dim_qk, p.dim_v) <= widest


def _sizes(p: Problem, device: Device) -> Iterator[str]:
    few = tuple(_few(p))
    yield from few
    if few:
        return
    if brief(p) and device.kind != "cpu":  # the emulator has nothing but such
        yield f"{p.seq_q} queries that see at most {FEWER} keys: smaller tiles load less"
    if leaves_idle(p, device):
        yield f"{query_tiles(p)} tiles of queries for {device.sms} SMs: it does not split keys"


def leaves_idle(problem: Problem, device: Device) -> bool:
    """Whether tiles of queries leave so many SMs without one that the keys are to be split."""
    p, tiles = problem, query_tiles(problem)
    if p.seq_k >= _LONG and tiles <= _BUSY * device.sms:
        return True
    seen = arithmetic.seen(p, _ROWS)
    if not arithmetic.bare(p) or seen < _LEAST_SEEN:
        return False
    wide = _BUSY_WIDE if 2 * p.seq_q <= _ROWS else 0.0
    busy = next((share for widest, share in _BUSY_BARE.items() if max(p.dim_qk, p.dim_v) <= widest), wide)
    return tiles <= min(1.0, seen / _LONG) * busy * device.sms


def query_tiles(p: Problem) -> int:
    """Tiles of queries of Hopper's forward."""
    return p.batch * p.heads_q * arithmetic.tiles(p.seq_q, _ROWS)


def _memory(p: Problem) -> Iterator[str]:
    for name in _OPERANDS:
        memory = getattr(p, name)
        if memory.strided or memory.expanded or memory.negative:
            how = "strided" if memory.strided else "expanded" if memory.expanded else "turned round"
            yield f"{name} is {how}: TMA reads rows of unit stride, and every other stride forwards"
        elif memory.align < 16:
            yield f"{name} is aligned to {memory.align} bytes: TMA reads from multiples of 16"


def _mask(p: Problem, device: Device) -> Iterator[str]:
    """One whose rows TMA does not read is copied, where that pays; the emulator copies each."""
    if not p.adds_mask:
        return
    if p.attn_mask.expanded:
        yield "attn_mask is expanded: TMA reads every stride but that of the rows forwards"
    elif copies_mask(p) and device.kind != "cpu":
        scores = p.batch * p.heads_q * p.seq_q * p.seq_k
        products, numbers = scores * (p.dim_qk + p.dim_v), math.prod(p.mask_shape or ())
        least, of_each = _COPIED_TRAINING if p.grads else _COPIED
        if products < max(least, of_each * numbers):
            yield "attn_mask lies in no rows of 16-byte steps, and a copy would take longer than it saves"


@functools.cache
def _missing() -> str | None:
    """What this machine lacks for it."""
    from .compiling import cubins, nvrtc

    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed; pip install attnswitch[cuda13], or attnswitch[cuda12] for CUDA 12"
    if cubins.obtainable("sm_90a"):
        return None
    return nvrtc.unavailable() or f"{nvrtc.full_name()} does not compile for sm_90a; install that of CUDA 12 or later"
