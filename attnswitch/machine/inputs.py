"""The arrays of one call, as kernels are given them and give them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnswitch.arrays import Array

__all__ = ["Gradients", "GradientsWithSinks", "Inputs", "Offsets", "Order", "heads_last"]


class Offsets(NamedTuple):
    """Where sequences that lie one after another begin, and where the last one ends: (B + 1,) integers each."""

    query: Array
    key: Array


class Inputs(NamedTuple):
    """The arrays of one call, of the backend's library.

    Shapes: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), attn_mask broadcastable with four axes,
    key_lengths (B,). Of a problem with ``varlen`` B is 1 and L counts the rows of all sequences, which ``offsets`` tell
    apart. Kernels never write to any of them. ``seed`` is the caller's, or drawn for a backend with ``wants_seed``.

    sinks (Hq,) and alibi_slopes (1 or B, Hq) are float32, or float64 where that is the problem's dtype. Of a problem
    with ``page`` key and value are caches (P, Hkv, page, D or Dv), and row j of sequence b is row ``j % page`` of page
    ``block_table[b, j // page]``: (B, Lk / page) integers of 32 or 64 bits, which past the length may be any. Queries
    alone are told apart by ``offsets``, of which ``key`` then says nothing. Where the problem names a ``cache`` the
    caches are of that type, and row j stands for its elements times the scale of its page and head: key_scale and
    value_scale are (P, Hkv) in the type of sinks, and may have strides of 0. With a ``tree``, tree_mask are bytes
    (B, Lq, W), those of a row side by side, B being 1 where ``offsets`` tell queries apart: bit ``t % 8`` of byte
    ``t // 8`` says whether a query sees the key of query t of its sequence.
    """

    query: Array
    key: Array
    value: Array
    attn_mask: Array | None = None
    key_lengths: Array | None = None
    seed: int | None = None
    offsets: Offsets | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    block_table: Array | None = None
    key_scale: Array | None = None
    value_scale: Array | None = None
    tree_mask: Array | None = None

    def map(self, change: Callable[[Array], Array]) -> Inputs:
        """The same inputs with ``change`` applied to every array."""
        query, key, value, mask, lengths = (None if array is None else change(array) for array in self[:5])
        offsets = None if self.offsets is None else Offsets(*map(change, self.offsets))
        beside = (None if array is None else change(array) for array in self[7:])
        return Inputs(query, key, value, mask, lengths, self.seed, offsets, *beside)

    def flat(self) -> tuple[Any, ...]:
        """Its fields in their order, those of ``offsets`` among them."""
        return *self[:6], *(self.offsets or (None, None)), *self[7:]

    def again(self) -> Callable[..., Inputs]:
        """What makes inputs that lie as these, all of torch, of what ``flat`` has: tensors with axes in any order.

        The offsets of keys may be left out where they are those of queries.
        """
        lies = [None if n in _AS_THEY_ARE or x is None else (x.shape, x.stride()) for n, x in enumerate(self.flat())]

        def inputs(*given: Any) -> Inputs:
            query, key, value, mask, lengths, seed, begin, begin_k, *beside = (
                array if array is None or lie is None else array.as_strided(*lie)
                for array, lie in zip(given, lies, strict=True)
            )
            offsets = None if begin is None else Offsets(begin, begin if begin_k is None else begin_k)
            return Inputs(query, key, value, mask, lengths, seed, offsets, *beside)

        return inputs


#: Of what ``Inputs.flat`` has: no arrays, or such as are given as they are.
_AS_THEY_ARE = frozenset((4, 5, 6, 7, 8, 10))


def heads_last(result: Array, query: Array) -> Array:
    """(..., H, L, D) as (..., L, H, D), in memory of that order, so that a view joins the heads.

    Where the memory of ``query`` has heads before rows, that of the result has them too.
    """
    heads, rows = _steps(query)[-3:-1]
    outside = min(query.shape[-3:-1]) > 1 and heads >= rows
    lying = result if outside else result.swapaxes(-3, -2)
    if not _is_contiguous(lying):
        lying = lying.contiguous() if hasattr(lying, "contiguous") else lying.copy()
    return lying.swapaxes(-3, -2) if outside else lying


def _is_contiguous(array: Array) -> bool:
    return array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous  # type: ignore[no-any-return]


def _steps(array: Array) -> tuple[int, ...]:
    return array.stride() if hasattr(array, "stride") else array.strides  # type: ignore[no-any-return]


class Order(NamedTuple):
    """How a caller has the results of a kernel, (B, H, L, D) and (B, H, L)."""

    #: Whether L comes before H in the output.
    turned: bool = False
    #: Whether there is no B, which is 1.
    packed: bool = False

    def of(self, result: Array) -> Array:
        """A result as the caller's: a view."""
        whole = len(result.shape) == 4
        if self.packed:
            result = result.squeeze(0)  # of an element torch's backward would make zeros, and copy
        return result.swapaxes(-3, -2) if whole and self.turned else result

    def like(self, result: Array, query: Array) -> Array:
        """The same in memory as ``heads_last`` has it."""
        if len(result.shape) != 4 or not self.turned:
            return self.of(result)
        return heads_last(result.squeeze(0) if self.packed else result, query)

    def back(self, result: Array) -> Array:
        """What ``of`` returned as the kernel's: a view."""
        if self.turned and len(result.shape) + self.packed == 4:
            result = result.swapaxes(-3, -2)
        return result[None] if self.packed else result

    def sizes(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """A kernel's sizes of a result, or its strides, as the caller's."""
        *rest, heads, rows, dim = whole
        if len(whole) == 4 and self.turned:
            whole = *rest, rows, heads, dim
        return whole[1:] if self.packed else whole


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their operands; None where ``Problem.grads`` does not ask for one."""

    query: Array | None
    key: Array | None
    value: Array | None
    attn_mask: Array | None


class GradientsWithSinks(Gradients):
    """The same, and in ``sinks`` the gradient of the sinks (Hq,); it unpacks into the same four."""

    sinks: Array

    @classmethod
    def of(cls, grads: Gradients, sinks: Array) -> GradientsWithSinks:
        """``grads`` beside that of the sinks."""
        found = cls(*grads)
        found.sinks = sinks
        return found

    def _replace(self, **changes: Any) -> GradientsWithSinks:
        sinks = changes.pop("sinks", self.sinks)
        return self.of(super()._replace(**changes), sinks)
