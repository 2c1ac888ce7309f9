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
from attnswitch.verify.truth.parts import limits

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
        """Bounds of one call, and what dealing keys adds to them."""
        lengths = (self.case.seq_k, keys), (self.case.seq_q, rows)
        parts = [[np.isin(np.arange(n), np.arange(n)[part])[None] for part in of] for n, of in lengths]
        return limits(self.answer, self.data, precision, *parts)
