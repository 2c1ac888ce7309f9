"""Bytes, times and rates as the tables of costs have them."""

from __future__ import annotations

__all__ = ["of_bytes", "of_ms", "of_tflops"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def of_ms(ms: float | None) -> str:
    """Milliseconds; microseconds below one, and a dash for none."""
    return "-" if ms is None else f"{ms:.4g} ms" if ms >= 1 else f"{1e3 * ms:.4g} us"


def of_bytes(count: float) -> str:
    """Bytes in the unit of 1,024's power that leaves the fewest digits."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def of_tflops(tflops: float) -> str:
    """TFLOP/s; GFLOP/s below one."""
    return f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.4g} GFLOP/s"
