"""``Table``: what was fitted to measured times, and the times that follow from it for any problem."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from attnswitch.machine.device import Device
from attnswitch.planning.forecast.features import Peaks, features, host_features, roofline
from attnswitch.problem import Problem

__all__ = ["Table", "together"]

#: The norm by which host and device add up. Both vary from call to call, and a call waits for the later one: where both
#: parts were about as long, problems that nothing was fitted to took a fifth longer than the longer one.
_NORM = 3.0


def together(of_host: Any, of_device: Any) -> Any:
    """How long calls take whose parts these are; the host's alone where of the device's nothing is known (NaN)."""
    both = (of_host**_NORM + of_device**_NORM) ** (1 / _NORM)
    return np.where(np.isnan(of_device), of_host, both)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What ``fixtures/fit_forecast.py`` fitted to N problems, with F features and H of the host, for B backends.

    ``points`` (N, F): features times ``scales`` (F,). ``weights`` (N + 1, B): what each point adds to the logarithm of
    time over roofline, and the mean; NaN where too little is known. ``host`` (H, B): what each feature of the host adds
    to the logarithm of milliseconds. ``peaks`` are of the GPUs ``devices``, which have ``sms`` SMs.
    """

    backends: tuple[str, ...]
    scales: Any
    points: Any
    weights: Any
    host: Any
    devices: tuple[str, ...]
    peaks: tuple[Peaks, ...]
    sms: int
    date: str

    @staticmethod
    def read(name: str) -> Table:
        """The table that travels with the package under ``name``."""
        with resources.files("attnswitch.planning.forecast").joinpath(name).open("rb") as file, np.load(file) as read:
            arrays = {key: read[key] for key in read.files}
        names = {key: tuple(map(str, arrays.pop(key))) for key in ("backends", "devices")}
        peaks = tuple((float(half), float(single), float(gbps)) for half, single, gbps in arrays.pop("peaks"))
        return Table(**names, peaks=peaks, sms=int(arrays.pop("sms")), date=str(arrays.pop("date")), **arrays)

    def times(self, problem: Problem, device: Device) -> dict[str, float]:
        """Milliseconds by backend."""
        near = np.exp(-np.sqrt(np.square(self.points - self.point(problem, device)).sum(1)))
        ideal = sum(roofline(problem, self.peaks_of(device)))
        of_device = np.exp(np.append(near, 1.0) @ self.weights) * ideal
        of_host = np.exp(np.array(host_features(problem)) @ self.host)
        return dict(zip(self.backends, together(of_host, of_device).tolist(), strict=True))

    def point(self, problem: Problem, device: Device) -> Any:
        """Where ``problem`` is among ``points``."""
        return np.array(features(problem, self.peaks_of(device), device.sms or self.sms)) * self.scales

    def peaks_of(self, device: Device) -> Peaks:
        """Of ``device``; of one that was not measured, those of the first by its number of SMs."""
        for name, peaks in zip(self.devices, self.peaks, strict=True):
            if name in device.name:
                return peaks
        share = (device.sms or self.sms) / self.sms
        half, single, gbps = self.peaks[0]
        return half * share, single * share, gbps
