"""What the forecast sees of a problem, as numbers. A change here asks for a table made anew."""

from __future__ import annotations

import math

from attnswitch.problem import DTYPES, Problem, cost

__all__ = ["FEATURES", "HOST", "features", "host_features", "roofline"]

#: Peaks of a device: TFLOP/s of 16-bit types, and of float32; GB/s.
Peaks = tuple[float, float, float]

#: Work and bytes of a training step over those of its forward.
_STEP, _STEP_BYTES = 3.5, 3.0
#: Rows of queries in a tile, and the most waves of such tiles that make a difference.
_TILE, _WAVES = 128, 8.0
#: Columns of a panel: kernels pad head dimensions to whole ones.
_PANEL = 64

#: Bytes that the fastest copies move: rows of a mask that are no multiple of them are loaded otherwise.
_COPIED = 16

#: Names of what ``features`` returns.
FEATURES = (
    *("batch_heads", "seq_q", "seq_k", "dim", "dim_v", "padding", "group", "waves", "intensity", "visible", "bias"),
    *("float32", "float16", "few", "causal", "bottom_right", "window", "lengths", "ragged"),
    *(
        "bool_rows",
        "bool_full",
        "float_rows",
        "float_full",
        "unaligned",
        "softcap",
        "dropout",
        "grads",
        "deterministic",
    ),
)
#: Names of what ``host_features`` returns.
HOST = (
    *("one", "grads", "lengths", "lengths_grads", "mask", "mask_grads", "float_mask", "irregular", "dropout"),
    *("dropout_grads", "softcap", "group", "float32", "few", "deterministic", "plain", "plain_grads"),
)


def roofline(p: Problem, peaks: Peaks) -> tuple[float, float]:
    """Milliseconds that the operations and the bytes of a call take at the device's peaks; what is hidden is free."""
    half, single, gbps = peaks
    peak = half if DTYPES[p.dtype] == 2 else single
    pairs = cost.rows(p) * p.seq_k * max(cost.visible(p), 1e-4)
    work = 2.0 * pairs * (p.dim_qk + p.dim_v) * (_STEP if p.grads else 1.0)
    moved = cost.least_bytes(p) * (_STEP_BYTES if p.grads else 1.0)
    return work / peak / 1e9 + 1e-9, moved / gbps / 1e6 + 1e-9


def features(p: Problem, peaks: Peaks, sms: int) -> tuple[float, ...]:
    """Numbers of which equal ones mean problems that are equally hard; sizes as doublings."""
    work, moved = roofline(p, peaks)
    mask, axes = p.mask, "" if p.mask is None else p.mask.axes
    is_bool = mask is not None and mask.is_bool
    full = "q" in axes
    dim = max(p.dim_qk, p.dim_v)
    padded = -(-dim // _PANEL) * _PANEL
    waves = p.batch * p.heads_q * -(-p.seq_q // _TILE) / (sms or 1)
    return (
        _log(p.batch * p.heads_q),
        _log(p.seq_q),
        _log(p.seq_k),
        _log(p.dim_qk),
        _log(p.dim_v),
        _log(padded / dim),
        _log(p.group),
        _log(min(waves, _WAVES)),
        _log(work / moved),
        -_log(max(cost.visible(p), 1e-4)),
        _log(1.0 + _bias_bytes(p) / max(cost.least_bytes(p), 1)),
        float(DTYPES[p.dtype] > 2),
        float(p.dtype == "float16"),
        float(p.seq_q == 1),
        float(p.causal),
        float(p.bottom_right and not p.sees_all),
        float(p.window is not None),
        float(p.key_lengths),
        float(p.seq_k % _TILE != 0),
        float(is_bool and not full),
        float(is_bool and full),
        float(mask is not None and not is_bool and not full),
        float(mask is not None and not is_bool and full),
        float(mask is not None and full and p.seq_k * p.element("attn_mask") % _COPIED != 0),
        float(p.softcap > 0),
        float(p.dropout > 0),
        float(bool(p.grads)),
        float(p.deterministic),
    )


def host_features(p: Problem) -> tuple[float, ...]:
    """What a call says that the host pays for."""
    grads, mask = bool(p.grads), p.mask is not None
    plain = not (p.needs_mask or p.dropout or p.softcap)
    said = (
        *(True, grads, p.key_lengths, p.key_lengths and grads, mask, mask and grads),
        *(p.adds_mask, p.irregular and not p.key_lengths, p.dropout > 0),
        *(p.dropout > 0 and grads, p.softcap > 0, p.group > 1, DTYPES[p.dtype] > 2, p.seq_q == 1, p.deterministic),
        *(plain, plain and grads),
    )
    return tuple(map(float, said))


def _bias_bytes(p: Problem) -> int:
    """Of the one mask that torch's operators are given for all that hides."""
    return cost.hiding_elements(p) * DTYPES[p.dtype] if p.needs_mask else 0


def _log(ratio: float) -> float:
    return math.log2(ratio) if ratio > 0 else 0.0
