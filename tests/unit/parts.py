"""Keys dealt among calls: the exact answer of the whole, and how far rounding lets merged parts be from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from attnswitch.arrays import passage
from attnswitch.machine import registry
from attnswitch.machine.backend import Precision
from attnswitch.machine.device import Device
from attnswitch.verify import Case
from attnswitch.verify.checks.compare import alike
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.launch.layouts import host
from attnswitch.verify.truth import oracle
from attnswitch.verify.truth.bounds import TINY, UNITS, bounds

__all__ = ["GRADIENTS", "ROLES", "Whole", "near", "placed"]

GRADIENTS = ("query", "key", "value")
ROLES = (*GRADIENTS, "grad_out", "grad_lse")
_KINDS: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def placed(values: Any, dtype: str, library: str, device: str = "cpu") -> Any:
    """float64 ``values`` as an array of ``library``."""
    array = passage(np.ascontiguousarray(values).astype(_KINDS[dtype]), "numpy", library)
    return array.to(device) if library == "torch" else array


def near(name: str, result: Any, wanted: Any, limit: Any) -> None:
    """A result is within ``limit`` of what is wanted."""
    found = host(result).astype(np.float64)
    assert found.shape == wanted.shape, name
    failure = alike("parts", name, found, wanted, limit, "more than rounding explains")
    assert failure is None, str(failure)


@dataclass(frozen=True)
class Whole:
    """A case that one call would answer, and its answer in float64. Parts of it are slices of keys, or of rows."""

    case: Case
    data: dict[str, Any]

    @staticmethod
    def of(case: Case) -> Whole:
        """With the data that the case says."""
        return Whole(case, operands(case))

    @functools.cached_property
    def answer(self) -> oracle.Answer:
        """All keys at once."""
        return oracle.answer(self.case, self.data)

    @property
    def lse_type(self) -> str:
        """What an lse is stored in."""
        return "float64" if self.case.dtype == "float64" else "float32"

    def arrays(self, device: str = "cpu") -> tuple[Any, ...]:
        """Query, key, value, and the gradients of output and lse, as the case's library has them."""
        kinds = (*(self.case.dtype,) * 4, self.lse_type)
        return tuple(
            placed(self.data[role], kind, self.case.library, device) for role, kind in zip(ROLES, kinds, strict=True)
        )

    def precision(self, backend: str, device: str = "cpu") -> Precision:
        """What ``backend`` declares for a case like this."""
        return registry.loaded(backend).precision(self.case.problem(), Device.parse(device))

    def check(
        self, results: dict[str, Any], precision: Precision, keys: Sequence[slice], rows: Sequence[slice]
    ) -> None:
        """Results against float64: merged from parts of ``keys``, gradients of keys summed over parts of ``rows``."""
        limits = self.limits(precision, keys, rows)
        for name, result in results.items():
            near(name, result, self.answer.values[name], limits[name])

    def limits(self, precision: Precision, keys: Sequence[slice], rows: Sequence[slice]) -> dict[str, Any]:
        """Bounds of one call, and what dealing keys adds to them.

        Output and lse: the bounds of the parts by their share, and the roundings of ``merge``. Gradients: P and D come
        from an output and an lse that are off by as much, and each part is stored before they are summed.
        """
        a, u = self.answer, UNITS[self.lse_type]
        store, tiny = UNITS[self.case.dtype], TINY[self.case.dtype]
        found = bounds(a, precision) | self._merged(precision, keys)
        with np.errstate(all="ignore"):
            lse = np.where(np.isfinite(a.lse), np.abs(a.lse), 0.0)
            # Which lse is a part's own is told but for 4 units in the last place.
            moved = np.expm1(found["lse"] + 8 * u * np.maximum(lse, 1.0))[..., None] * a.p
            slope = np.abs(a.dp - ((a.grad_out * a.values["out"]).sum(-1) - a.grad_lse)[..., None])
            centre = (np.abs(a.grad_out) * found["out"]).sum(-1)[..., None]
        scale = abs(self.case.softmax_scale)
        ds, dp = scale * (moved * slope + a.p * centre), moved.mT @ np.abs(a.grad_out)
        added = {
            "query": ds @ np.abs(a.k),
            "key": oracle.grouped(self.case, ds.mT @ np.abs(a.q)),
            "value": oracle.grouped(self.case, dp),
        }
        for name in GRADIENTS:
            error = found[name] + added[name]
            found[name] = error * (1 + 2 * store) + 2 * store * self._sizes(name, keys, rows) + 16 * tiny
        return found

    def _merged(self, precision: Precision, keys: Sequence[slice]) -> dict[str, Any]:
        a, u = self.answer, UNITS[self.lse_type]
        alive, roundings = a.visible.any(-1), (2 * len(keys) + 16) * u
        top, drift = np.where(alive, a.lse, 0.0), np.zeros(a.lse.shape)
        reach, size = np.zeros(a.values["out"].shape), np.zeros(a.values["out"].shape)
        for part in keys:
            answer = self._part(part)
            limit = bounds(answer, precision)
            share = np.exp(answer.lse - top)[..., None]
            reach += share * limit["out"]
            size += share * np.abs(answer.values["out"])
            drift = np.maximum(drift, limit["lse"])
        lse = np.where(alive, drift + roundings + 2 * u * np.abs(top), 0.0)
        store = UNITS[self.case.dtype]
        out = reach * (1 + 2 * store) + (np.expm1(drift + lse)[..., None] + roundings) * size
        out = out + store * np.abs(a.values["out"]) + TINY[self.case.dtype]
        return {"out": np.where(alive[..., None], out, 0.0), "lse": lse}

    def _part(self, keys: slice) -> oracle.Answer:
        """The answer of some keys alone."""
        data = self.data | {role: self.data[role][:, :, keys] for role in ("key", "value")}
        data.pop("attn_mask", None)
        case = self.case.replace(
            seq_k=data["key"].shape[2],
            causal=False,
            window=None,
            alignment="top_left",
            lengths=None,
            mask=None,
            grads="",
        )
        return oracle.answer(case, data, visible=self.answer.visible[..., keys])

    def _sizes(self, name: str, keys: Sequence[slice], rows: Sequence[slice]) -> Any:
        """Absolute gradients of the parts, summed: what storing each rounds."""
        a, scale = self.answer, abs(self.case.softmax_scale)
        if name == "query":
            return sum(scale * np.abs(a.ds[..., part] @ a.k[:, :, part]) for part in keys)
        left, right = (scale * a.ds, a.q) if name == "key" else (a.p, a.grad_out)
        return sum(np.abs(oracle.grouped(self.case, left[:, :, part].mT @ right[:, :, part])) for part in rows)
