"""Where the project's own kernels are others than those that tiny problems share."""

from __future__ import annotations

from attnswitch.machine.backend import Regime

from . import arithmetic

__all__ = ["DIMS", "PRODUCTS", "large"]

#: Multiplications that no tiny problem has.
PRODUCTS = arithmetic.TINY_PRODUCTS + 1
#: Usual head dimensions, of query and key and of value; and such as lie between the classes of kernels.
_USUAL = ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80))
DIMS = (*_USUAL, (96, 96), (40, 40), (72, 72), (160, 160), (128, 64), (64, 96), (136, 136))
_TILES = (64, 128, 32)


def large(dtypes: tuple[str, ...]) -> Regime:
    """Problems of ``dtypes`` that have kernels compiled for what they are."""
    return Regime(dtypes, _USUAL, _TILES, products=PRODUCTS)
