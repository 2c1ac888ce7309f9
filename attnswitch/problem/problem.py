"""``Problem``: one attention call described without its arrays.

A problem is frozen, hashable and validated once, for all backends. Its text form names it everywhere: on the
command line, in test ids, in saved cases. ``attnswitch.problem.notation`` holds the grammar of that text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from attnswitch.errors import InvalidProblem
from attnswitch.names import meant, one_of, shown

__all__ = ["CACHES", "DTYPES", "GRAD_OPERANDS", "MOST", "Alignment", "Mask", "Memory", "Problem", "Window"]

#: Storage types of query, key, value and output, with bytes per element.
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
#: Types of 8 bits that a cache in pages may be stored in; each element is multiplied by a scale of its page and head.
CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")
#: Types an additive mask may have besides ``bool``.
MASK_DTYPES = ("bool", *DTYPES)
#: The longest axis that any library's arrays have.
MOST = 2**63 - 1
#: Sizes and the least that each may be.
_LEAST = {"batch": 0, "heads_q": 1, "heads_kv": 1, "seq_q": 0, "seq_k": 0, "dim_qk": 1, "dim_v": 1}
#: The operands a gradient can be asked for: query, key, value, float attn_mask.
GRAD_OPERANDS = "qkvm"

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Memory:
    """How one operand lies in memory, as far as a kernel may care.

    ``align`` is the largest power of two, at most 16, that divides the address and every stride in bytes.
    """

    align: int = 16
    strided: bool = False  # the last axis does not have stride 1
    expanded: bool = False  # some axis longer than 1 has stride 0
    negative: bool = False  # some axis runs backwards

    def __post_init__(self) -> None:
        if self.align not in (1, 2, 4, 8, 16):
            raise InvalidProblem(f"align={shown(self.align)}: alignment is a power of two from 1 to 16 bytes")


CONTIGUOUS = Memory()


@dataclass(frozen=True, slots=True)
class Mask:
    """An ``attn_mask``: its dtype and which of the axes (b, h, q, k) it really spans.

    ``axes`` is a subset of ``"bhqk"`` in that order; the others have length 1 and broadcast.
    """

    dtype: str
    axes: str = "qk"

    def __post_init__(self) -> None:
        if self.dtype not in MASK_DTYPES:
            dtype, added = str(self.dtype)[:100], ", ".join(DTYPES)
            raise InvalidProblem(
                f"attn_mask of dtype {dtype}: a mask is bool (True = attend) or one of {added} (added)"
                f"{meant(self.dtype, MASK_DTYPES)}"
            )
        if self.axes != "".join(axis for axis in "bhqk" if axis in self.axes):
            raise InvalidProblem(f"mask axes {shown(self.axes)}: expected a subset of 'bhqk' in that order")

    @property
    def is_bool(self) -> bool:
        """Whether True means attend (rather than being added to the scores)."""
        return self.dtype == "bool"


class _Fields(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    dim_qk: int
    dim_v: int
    dtype: str
    causal: bool = False
    alignment: Alignment = "top_left"
    window: Window | None = None
    mask: Mask | None = None
    key_lengths: bool = False
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    seeded: bool = False
    lse: bool = False
    grads: str = ""
    deterministic: bool = False
    #: Sequences of their own lengths, one after another: see ``Problem``.
    varlen: bool = False
    #: One more key for every row, with a score of each head and value 0.
    sinks: bool = False
    #: A slope of each head times the distance from query to key is taken from the scores.
    alibi: bool = False
    #: Keys and values lie in pages of as many rows, which a table names; 0 where they lie one after another.
    page: int = 0
    #: Into how many parts the keys of a sequence are divided, whatever the batch; 0 where that may depend on it.
    splits: int = 0
    #: The type of 8 bits that the pages are stored in, one of ``CACHES``; "" where it is ``dtype``.
    cache: str = ""
    #: Of the keys of its own queries, in pages, a query sees those that its bits name.
    tree: bool = False
    query: Memory = CONTIGUOUS
    key: Memory = CONTIGUOUS
    value: Memory = CONTIGUOUS
    attn_mask: Memory = CONTIGUOUS
    #: NaN or inf was seen in query, key or value or, where something is hidden, what overflows. The CPU's value is read
    #: there alone, and nothing elsewhere unless ATTNSWITCH_CHECK_FINITE=always: reading costs a synchronisation.
    nonfinite: bool = False


class Problem(_Fields):
    """One attention call without its arrays.

    Shapes: query (batch, heads_q, seq_q, dim_qk), key (batch, heads_kv, seq_k, dim_qk),
    value (batch, heads_kv, seq_k, dim_v). Raises ``InvalidProblem`` for what no backend could mean.

    With ``varlen`` there are ``batch`` sequences of at most ``seq_q`` queries and ``seq_k`` keys, one after another
    without padding: query (T, heads_q, dim_qk), key and value alike (``attention_varlen``). Each is aligned by itself.

    With ``page`` key and value are caches (pages, page, heads_kv, dim) of which each sequence has at most ``seq_k``
    rows, a multiple of ``page``, and ``key_lengths`` of them hold something (``attention_paged``); ``varlen`` then says
    it of the queries alone. With ``cache`` they are stored in 8 bits, and float32 scales of each page and key head
    (P, heads_kv) say what an element stands for: itself times the scale. With ``tree`` bits say which of the keys of
    the queries themselves, the newest, each query sees; older ones are seen by all.

    It is a tuple, since every call with a length not met before makes one, in a fifth of a dataclass's time.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Problem:
        """A problem of the fields that are given, in their order or by name."""
        try:
            fields = _Fields.__new__(cls, *args, **kwargs)
        except TypeError:
            for name in kwargs:
                if name not in cls._fields:
                    raise InvalidProblem(f"a problem has no field {name!r}{meant(name, cls._fields)}") from None
            raise
        return fields._checked()

    @staticmethod
    def of(*fields: Any) -> Problem:
        """The same of all fields, in their order."""
        return Problem._make(fields)._checked()

    def _checked(self) -> Problem:
        """Itself in the one spelling for what it means, so that equal problems compare equal."""
        if self._plain():
            return self
        self._check_sizes()
        self._check_numbers()
        self._check_choices()
        return self._normal()

    def _plain(self) -> bool:
        """Whether there is nothing to check one by one: what most problems are, seen at a glance."""
        b, hq, hk, lq, lk = self.batch, self.heads_q, self.heads_kv, self.seq_q, self.seq_k
        return (
            type(b) is type(hq) is type(hk) is type(lq) is type(lk) is type(self.dim_qk) is type(self.dim_v) is int
            and 0 < b <= MOST
            and 0 < hk <= hq <= MOST
            and 0 < lq <= MOST
            and 0 < lk <= MOST
            and 0 < self.dim_qk <= MOST
            and 0 < self.dim_v <= MOST
            and hq % hk == 0
            and self.dtype in DTYPES
            and self.window is None
            and not (self.varlen or self.sinks or self.alibi or self.page or self.splits or self.cache or self.tree)
            and self.scale is None
            and self.alignment == "top_left"
            and type(self.softcap) is type(self.dropout) is float
            and self.softcap == self.dropout == 0.0
            and self.grads in ("", "qkv")
            and (self.mask is None or self.mask.axes == self._long(self.mask.axes))
        )

    def _long(self, axes: str) -> str:
        """Those of a mask's axes that are longer than 1."""
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seq_q, "k": self.seq_k}
        return "".join([axis for axis in axes if sizes[axis] != 1])

    def _normal(self) -> Problem:
        window, mask = self.window, self.mask
        if window is not None:  # no query is further from a key than all of both
            reach = self.seq_q + self.seq_k
            left, right = (None if side is None or side >= reach else side for side in window)
            window = None if left is right is None else (left, right)
        alignment = self.alignment if self.causal or window is not None or self.alibi else "top_left"
        if self.tree:  # whose queries are the newest keys
            alignment = "bottom_right"
        if mask is not None:
            mask = Mask(mask.dtype, self._long(mask.axes))
        return self._replace(window=window, mask=mask, alignment=alignment)

    def _check_sizes(self) -> None:
        for name, least in _LEAST.items():
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise InvalidProblem(f"{name}={shown(size)}: expected an integer of at least {least}")
            if size > MOST:
                raise InvalidProblem(f"{name}={shown(size)}: no array is as long; expected at most {MOST}")
        if self.heads_q % self.heads_kv:
            raise InvalidProblem(
                f"query has {self.heads_q} heads and key has {self.heads_kv}: the query heads must be a multiple of the"
                " key heads (grouped-query attention shares each key head among equally many query heads)"
            )

    def _check_numbers(self) -> None:
        for name in ("scale", "softcap", "dropout"):
            number = getattr(self, name)
            if not (number is None and name == "scale") and type(number) not in (float, int):
                raise InvalidProblem(f"{'dropout_p' if name == 'dropout' else name}={number!r}: expected a number")
            if isinstance(number, int) and abs(number) > MOST:
                raise InvalidProblem(f"{name} is an integer beyond 64 bits: no float that a kernel takes is as large")
        if self.scale is not None and not math.isfinite(self.scale):
            raise InvalidProblem(f"scale={self.scale}: expected a finite number, or None for 1/sqrt(D)")
        if not (math.isfinite(self.softcap) and self.softcap >= 0.0):
            raise InvalidProblem(f"softcap={self.softcap}: expected a finite number >= 0, 0 for none")
        if not 0.0 <= self.dropout <= 1.0:
            raise InvalidProblem(f"dropout_p={self.dropout}: expected a probability from 0 to 1")

    def _check_choices(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidProblem(f"dtype {str(self.dtype)[:100]}: {one_of(self.dtype, DTYPES)}")
        if self.alignment not in get_args(Alignment):
            raise InvalidProblem(
                f"causal_alignment={shown(self.alignment)}: {one_of(self.alignment, get_args(Alignment))}"
            )
        if self.window is not None and (not isinstance(self.window, tuple) or len(self.window) != 2):
            raise InvalidProblem(f"window={shown(self.window)}: expected (left, right), each a number of keys or None")
        for side in self.window or ():
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
                raise InvalidProblem(
                    f"window={shown(self.window)}: each side is a number of keys >= 0, or None for unlimited"
                    " (flash-attn's -1 is spelled None here)"
                )
        if self.grads != "".join(operand for operand in GRAD_OPERANDS if operand in self.grads):
            raise InvalidProblem(f"grads={shown(self.grads)}: expected a subset of {GRAD_OPERANDS!r} in that order")
        self._check_forms()
        if "m" in self.grads and not self.adds_mask:
            raise InvalidProblem("a gradient of attn_mask was asked for, but there is no float attn_mask")

    def _check_forms(self) -> None:
        page = self.page
        if isinstance(page, bool) or not isinstance(page, int) or page < 0:
            raise InvalidProblem(f"page={shown(page)}: expected the rows of a page, or 0 where there are no pages")
        if page:
            if self.mask is not None or self.grads or self.dropout:
                raise InvalidProblem(
                    f"page={shown(page)}: a paged cache takes no attn_mask and no dropout, and has no gradient"
                )
            if not self.key_lengths:
                raise InvalidProblem(f"page={shown(page)}: a paged cache has lengths (key_lengths)")
            if self.seq_k % page:
                raise InvalidProblem(
                    f"page={shown(page)}: a paged cache has room for whole pages, not for {self.seq_k} keys"
                )
        elif self.varlen and (self.mask is not None or self.key_lengths):
            raise InvalidProblem("varlen: sequences without padding take no attn_mask, and have lengths of their own")
        if isinstance(self.splits, bool) or not isinstance(self.splits, int) or self.splits < 0:
            raise InvalidProblem(f"splits={shown(self.splits)}: expected a number of parts, or 0 to leave it open")
        if self.splits and not page:
            raise InvalidProblem(
                f"splits={shown(self.splits)}: only the keys of a paged cache are divided as the call says"
            )
        if self.cache and (not page or self.cache not in CACHES):
            known = "only a cache in pages has a type of its own" if not page else one_of(self.cache, CACHES)
            raise InvalidProblem(f"cache={shown(self.cache)}: {known}")
        if self.tree and not page:
            raise InvalidProblem("tree: only queries of a cache in pages have a tree_mask; others take an attn_mask")

    @property
    def softmax_scale(self) -> float:
        """The factor on q . k: ``scale``, or 1/sqrt(D) where it was left out."""
        return 1.0 / math.sqrt(self.dim_qk) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def is_empty(self) -> bool:
        """Whether the output has no elements."""
        return self.batch == 0 or self.seq_q == 0

    @property
    def positional(self) -> bool:
        """Whether visibility depends on the position of the query (causal or window)."""
        return self.causal or self.window is not None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys a query sees before and after its own, causal included; None for all that there are."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def dense(self, **changes: object) -> Problem:
        """A copy of operands (B, H, L, D), neither one after another nor in pages, with ``changes`` besides."""
        return self.replace(varlen=False, page=0, splits=0, cache="", tree=False, **changes)

    def element(self, role: str) -> int:
        """Bytes of an element of query, key, value or attn_mask; of a mask that is not there, 0."""
        if role == "attn_mask":
            return 0 if self.mask is None else DTYPES.get(self.mask.dtype, 1)
        if self.cache and role != "query":
            return 1
        return DTYPES[self.dtype]

    @property
    def bottom_right(self) -> bool:
        """Whether positions count from the last query and key (else from the first)."""
        return self.alignment == "bottom_right"

    @property
    def plainly_causal(self) -> bool:
        """Whether causal alone hides by position, and as seen from the first query and key."""
        square = self.seq_q == self.seq_k and not self.key_lengths and not self.varlen
        aligned = not self.bottom_right or square
        return self.causal and self.window is None and aligned

    @property
    def sees_all(self) -> bool:
        """Whether causal has no effect: one query, aligned with the last key."""
        decode = self.seq_q == 1 and self.bottom_right and not self.varlen
        return self.causal and self.window is None and decode and (self.page > 0 or not self.key_lengths)

    @property
    def hides_by_position(self) -> bool:
        """Whether causal or window may hide something."""
        return self.positional and not self.sees_all

    @property
    def needs_mask(self) -> bool:
        """Whether a kernel that knows plain causal only needs a mask for it, of up to Lq x Lk elements."""
        return self.mask is not None or self.irregular

    @property
    def irregular(self) -> bool:
        """Whether positions or lengths hide what plain causal does not say."""
        if self.key_lengths or self.varlen or self.window is not None:
            return True
        return self.causal and not self.plainly_causal and not self.sees_all

    @property
    def adds_mask(self) -> bool:
        """Whether there is a float ``attn_mask``, which is added to the scores."""
        return self.mask is not None and not self.mask.is_bool

    @property
    def mask_shape(self) -> tuple[int, int, int, int] | None:
        """Shape of ``attn_mask`` as four axes, 1 where it broadcasts."""
        if self.mask is None:
            return None
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seq_q, "k": self.seq_k}
        b, h, q, k = (size if axis in self.mask.axes else 1 for axis, size in sizes.items())
        return b, h, q, k

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed, validated again."""
        return Problem(**{**self._asdict(), **changes})

    def __str__(self) -> str:
        from attnswitch.problem import notation

        return notation.format_problem(self)

    @staticmethod
    def parse(text: str) -> Problem:
        """Read a problem from its text form, e.g. ``b2.h16/4.s1024x4096.d128.bf16.causal-br``.

        The grammar is in ``attnswitch.problem.notation``. Raises ``InvalidProblem``, naming the part not understood.
        """
        from attnswitch.problem import notation

        return notation.parse_problem(text)
