"""Tensor descriptors, by which GPUs since Hopper load and store a tile without a register for each address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .config import block, small

__all__ = ["describer", "suits"]


def suits(p: Problem, device: Device, *arrays: Any, dealt: bool = False) -> bool:
    """Whether ``device`` is to load the arrays by tensor descriptors: that saves the registers of addresses.

    A descriptor takes the host longer than a small problem takes the GPU. It wants rows of unit stride, every other
    stride in steps of 16 bytes, and to be ``dealt`` (see ``describer``) a length in steps of 4; axes of stride 0 are
    left to pointers. So are sequences one after another: a descriptor ends where the array does, and they end before.
    And pages: a tile may be made of many.
    """
    if p.varlen or p.page or (device.capability or (0, 0)) < (9, 0) or small(p, device):
        return False
    return all(_describable(array) and (not dealt or array.shape[2] % 4 == 0) for array in arrays)


def _describable(array: Any) -> bool:
    if array.data_ptr() % 16 or (array.stride(3) != 1 and array.shape[3] != 1):
        return False
    size = array.element_size()
    return all(
        length == 1 or (stride > 0 and stride * size % 16 == 0 and stride * size < 2**38)
        for length, stride in zip(array.shape[:3], array.stride()[:3], strict=True)
    )


def describer(like: Any, rows: int, *, dealt: bool = False) -> Callable[[Any], Any]:
    """What makes the descriptor of an array that lies as ``like``, all of it, to load ``rows`` rows of one head.

    ``dealt`` as ``columns`` in tile.py.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    b, h, length, dim = like.shape
    step = 16 // like.element_size()
    width = -(-dim // step) * step
    by_b, by_h, by_l = (width if n == 1 else at for n, at in zip(like.shape[:3], like.stride()[:3], strict=True))
    if dealt:
        shape, strides = [b, h, 4, length // 4, dim], [by_b, by_h, by_l, 4 * by_l, 1]
        tile = [1, 1, 4, rows // 4, block(dim)]
    else:
        shape, strides, tile = [b, h, length, dim], [by_b, by_h, by_l, 1], [1, 1, rows, block(dim)]
    facts = dict(vars(TensorDescriptor(like, shape, strides, tile)))  # which it checks, and not again for each call
    del facts["base"]  # nothing here keeps an array alive

    def described(array: Any) -> Any:
        made = object.__new__(TensorDescriptor)
        vars(made).update(facts, base=array)
        return made

    return described
