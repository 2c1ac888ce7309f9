"""``Link``: what joins the ranks of a call, as a user writes it or as a data sheet has it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from attnswitch.bench.estimate import sheet
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.machine.device import Device
from attnswitch.names import shown

__all__ = ["Link", "link", "of_device"]

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)(B|b(?:it)?)(?:/s|ps)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Link:
    """GB/s (1e9 bytes) that a rank sends while it receives as much, and microseconds of each message beside."""

    gbps: float
    latency_us: float
    source: str

    def ms(self, sent: float, messages: int = 1) -> float:
        """Milliseconds of ``sent`` bytes in so many messages one after another; none where nothing is sent."""
        return sent / self.gbps / 1e6 + messages * self.latency_us / 1e3 if sent else 0.0


def link(rate: str, latency: str = "0us") -> Link:
    """``rate`` such as 450GB/s, 50GiB/s, or in bits 400Gb/s or 400Gbps, and ``latency`` such as 10us.

    Raises ``InvalidProblem`` for what is no rate or no time.
    """
    read = _RATE.fullmatch(rate.strip())
    if read is None:
        raise InvalidProblem(
            f"link {shown(rate)}: expected a rate of one direction, a number and its unit: bytes as in 450GB/s, 450GBps"
            " or 50GiB/s, or bits as in 400Gb/s, 400Gbps or 400Gbit/s, of K, M, G or T"
        )
    number, prefix, binary, unit = read.groups()
    each = (1024 if binary else 1000) ** _POWERS[prefix] / (1 if unit == "B" else 8)
    gbps = float(number) * each / 1e9
    if not 0.0 < gbps < math.inf:
        raise InvalidProblem(f"link {shown(rate)}: expected a finite rate above 0, or nothing would ever arrive")
    return Link(gbps, _us(latency), "as given")


def of_device(device: Device, ranks: int, latency: str = "0us") -> Link:
    """What joins ``ranks`` GPUs of this kind on one board, by the data sheet.

    Raises ``Unsupported`` where there is no such figure, or not for as many.
    """
    name, row = sheet(device)
    rate, most = row.get("link"), row.get("linked", 0)
    if rate is None:
        raise Unsupported(f"what joins the ranks on {device} is in no table here: say --link, such as --link 25GB/s")
    if ranks > most:
        raise Unsupported(
            f"NVLink joins {most} {name.upper()} on one board, not {ranks}: say what a rank sends to others, such as"
            " --link 50GB/s"
        )
    return Link(rate, _us(latency), f"NVLink, by the data sheet of the {name.upper()}; programs reach less")


def _us(text: str) -> float:
    """Microseconds."""
    read = _TIME.fullmatch(text.strip())
    if read is None:
        raise InvalidProblem(f"latency {shown(text)}: expected a time such as 10us or 0.1ms")
    us = float(read[1]) * _SECONDS[read[2]] * 1e6
    if not us < math.inf:
        raise InvalidProblem(f"latency {shown(text)}: expected a finite time")
    return us
