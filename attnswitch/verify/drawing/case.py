"""``Case``: one problem with a recipe for its data. Small, frozen, and the whole of what a replay needs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.problem import Alignment, Mask, Problem, Window

__all__ = ["DENSE_WORK", "Case", "MaskRecipe", "Placing"]

#: Cases of more work than this are answered in part.
DENSE_WORK = 2**23
#: Parts of the keys at the most, each of which is a call.
_PARTS = 64


@dataclass(frozen=True, slots=True)
class MaskRecipe:
    """An ``attn_mask``: dtype, the axes of (b, h, q, k) it spans, the rank it is passed with, and what it holds."""

    dtype: str = "bool"
    axes: str = "qk"
    rank: int = 4
    kind: str = "random"


@dataclass(frozen=True, slots=True)
class Placing:
    """How each operand lies in memory; the kinds are in ``attnswitch.verify.drawing.placings``."""

    query: str = "contiguous"
    key: str = "contiguous"
    value: str = "contiguous"
    attn_mask: str = "contiguous"
    grad_out: str = "contiguous"

    def replace(self, **changes: str) -> Placing:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call with its data recipe. Sizes are ``Problem``'s, with heads_q = heads_kv * group."""

    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    seq_q: int = 1
    seq_k: int = 1
    dim_qk: int = 8
    dim_v: int = 8
    dtype: str = "float32"
    causal: bool = False
    alignment: Alignment = "top_left"
    window: Window | None = None
    #: Keys of each batch entry. With ``query_lengths`` the call is ``attention_varlen``, of sequences of these lengths.
    lengths: tuple[int, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    #: Rows of a page: the call is ``attention_paged``, with ``lengths`` in tables of ``seq_k`` rows, aligned to the
    #: bottom right, with queries one after another if there are ``query_lengths``. ``splits`` is its num_splits.
    #: ``cache`` is the type of its pages where they are stored in 8 bits, and ``scales`` how they are scaled; the kinds
    #: are in ``attnswitch.verify.drawing.stored``. ``tree`` is what its tree_mask holds, "" where there is none; the
    #: kinds are in ``attnswitch.verify.drawing.trees``.
    page: int = 0
    splits: int = 0
    cache: str = ""
    scales: str = ""
    tree: str = ""
    #: Whether the values of a cache are the first columns of its keys, in the same memory: DeepSeek's latent heads.
    latent: bool = False
    #: Parts of the keys, 0 for none: each is a call, whose results are merged, and gradients are by those of the whole.
    parts: int = 0
    mask: MaskRecipe | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    dropout_seed: int | None = None
    #: What sinks and alibi_slopes hold, "" where there are none; the kinds are in ``attnswitch.verify.drawing.data``.
    sinks: str = ""
    alibi: str = ""
    lse: bool = False
    #: Of query, key, value and mask; where there are any, the sinks have one besides.
    grads: str = ""
    library: str = "torch"
    layout: str = "BHLD"
    placing: Placing = Placing()
    #: Distribution of query, key and value; the kinds are in ``attnswitch.verify.drawing.data``.
    data: str = "normal"
    data_seed: int = 0
    #: NaN and inf among the keys and values, visible to some queries and hidden from others.
    poison: bool = False
    deterministic: bool = False
    #: The property tried on it beside those that every case is held to; the names are in ``attnswitch.verify.checks``.
    check: str = "reference"

    @property
    def heads_q(self) -> int:
        """Query heads."""
        return self.heads_kv * self.group

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores."""
        return 1.0 / math.sqrt(self.dim_qk) if self.scale is None else self.scale

    @property
    def varlen(self) -> bool:
        """Whether sequences lie one after another, without padding."""
        return self.query_lengths is not None

    @property
    def mergeable(self) -> bool:
        """Whether parts of the keys tell what all do: ALiBi and dropout count positions among all keys."""
        return not (self.varlen or self.page or self.dropout or self.alibi or self.poison)

    def heads_dtype(self, kind: str) -> str:
        """The dtype of sinks or alibi_slopes of a kind: that of query, or what kernels take."""
        return self.dtype if self.dtype == "float64" or kind in ("normal", "geometric") else "float32"

    @property
    def unseeded(self) -> bool:
        """Whether the backend draws the dropout mask itself, for want of a seed."""
        return bool(self.dropout) and self.dropout_seed is None

    @property
    def hides_by_position(self) -> bool:
        """Whether causal, a window or key lengths hide keys by where they stand."""
        return self.causal or self.window is not None or self.lengths is not None

    @property
    def hides(self) -> bool:
        """Whether anything hides keys: by where they stand, or a mask."""
        return self.hides_by_position or self.mask is not None

    @property
    def work(self) -> int:
        """Batch * heads * Lq * Lk * the larger head dimension: what one matrix product costs."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k * max(self.dim_qk, self.dim_v, 32)

    @property
    def operand_bytes(self) -> int:
        """Bytes of query, key, value, upstream gradients and mask as float64, which the references start from."""
        dims, (b, h, lq, lk) = self.dim_qk + self.dim_v, self.scores
        mask = math.prod(self.problem().mask_shape or (0,))
        return 8 * (b * h * lq * (dims + 1) + b * self.heads_kv * lk * dims + mask)

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(B, Hq, Lq, Lk)."""
        return self.batch, self.heads_q, self.seq_q, self.seq_k

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def problem(self) -> Problem:
        """The problem without its memory facts: what a reader needs to know the case by."""
        return Problem(
            batch=self.batch,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            seq_q=self.seq_q,
            seq_k=self.seq_k,
            dim_qk=self.dim_qk,
            dim_v=self.dim_v,
            dtype=self.dtype,
            causal=self.causal,
            alignment="bottom_right" if self.page else self.alignment,
            window=self.window,
            mask=None if self.mask is None else Mask(self.mask.dtype, self.mask.axes),
            key_lengths=self.lengths is not None and (self.page > 0 or not self.varlen),
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout,
            seeded=self.dropout_seed is not None,
            lse=self.lse,
            grads=self.grads,
            deterministic=self.deterministic,
            varlen=self.varlen,
            page=self.page,
            splits=self.splits,
            cache=self.cache,
            tree=bool(self.tree),
            sinks=bool(self.sinks),
            alibi=bool(self.alibi),
        )

    @staticmethod
    def of(problem: Problem) -> Case:
        """A case of ``problem`` with the plainest data: N(0,1), a random mask, lengths that are evenly spread."""
        p = problem
        queries, keys = (tuple(n * (p.batch - b) // p.batch for b in range(p.batch)) for n in (p.seq_q, p.seq_k))
        return Case(
            batch=p.batch,
            heads_kv=p.heads_kv,
            group=p.group,
            seq_q=p.seq_q,
            seq_k=p.seq_k,
            dim_qk=p.dim_qk,
            dim_v=p.dim_v,
            dtype=p.dtype,
            causal=p.causal,
            alignment="bottom_right" if p.page else p.alignment,
            window=p.window,
            lengths=keys if p.key_lengths or p.varlen else None,
            query_lengths=queries if p.varlen else None,
            page=p.page,
            splits=p.splits,
            cache=p.cache,
            scales="page" if p.cache else "",
            tree="ancestors" if p.tree else "",
            mask=None if p.mask is None else MaskRecipe(p.mask.dtype, p.mask.axes),
            scale=p.scale,
            softcap=p.softcap,
            dropout=p.dropout,
            dropout_seed=1 if p.seeded else None,
            sinks="normal" if p.sinks else "",
            alibi="geometric" if p.alibi else "",
            lse=p.lse,
            grads=p.grads,
            data_seed=1,
            deterministic=p.deterministic,
        )

    def __str__(self) -> str:
        """Problem, data, and whatever differs from the plainest placing."""
        parts = [str(self.problem()), f"{self.library} arrays", f"{self.data} data (seed {self.data_seed})"]
        if self.page:
            queries = "" if self.query_lengths is None else f" and {list(self.query_lengths)} queries"
            parts.append(f"cache_lengths {list(self.lengths or ())}{queries}")
            parts += [f"scales by {self.scales}"] if self.cache else []
            parts += [f"tree of {self.tree}"] if self.tree else []
            parts += ["values within the keys"] if self.latent else []
        elif self.query_lengths is not None:
            parts.append(f"sequences of {list(self.query_lengths)} queries and {list(self.lengths or ())} keys")
        elif self.lengths is not None:
            parts.append(f"key_lengths {list(self.lengths)}")
        if self.mask is not None:
            parts.append(f"mask {self.mask.kind}, rank {self.mask.rank}")
        parts += [f"{kind} {name}" for name, kind in (("sinks", self.sinks), ("alibi", self.alibi)) if kind]
        parts += [f"keys in {self.parts} parts"] if self.parts else []
        if self.poison:
            parts.append("poisoned")
        if self.check != "reference":
            parts.append(f"checked for {self.check}")
        if self.layout != "BHLD":
            parts.append(self.layout)
        placed = {role: kind for role, kind in asdict(self.placing).items() if kind != "contiguous"}
        parts += [f"{role} {kind}" for role, kind in placed.items()]
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain data, in which every field is written: a saved case must not change with a default."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @staticmethod
    def from_json(data: dict[str, Any]) -> Case:
        """The case that ``to_json`` wrote. Raises ``InvalidProblem`` for what is not one."""
        case = reading.made(Case, data, "case")
        case.problem()
        case._check_lengths()
        case._check_parts()
        rank, axes = (4, "") if case.mask is None else (case.mask.rank, case.mask.axes)
        if not (1 <= rank <= 4 and set(axes) <= set("bhqk"[-rank:])):
            raise InvalidProblem(f"case.mask has axes {axes!r}: no mask of rank {rank} has them all")
        return case

    def _check_lengths(self) -> None:
        """Raise ``InvalidProblem`` for lengths that sequences of this batch and these sizes cannot have."""
        for name, most in (("lengths", self.seq_k), ("query_lengths", self.seq_q)):
            lengths = getattr(self, name)
            if lengths is None:
                continue
            if len(lengths) != self.batch:
                raise InvalidProblem(f"case.{name} has {len(lengths)} entries: expected one for each of {self.batch}")
            if wrong := [length for length in lengths if not 0 <= length <= most]:
                raise InvalidProblem(f"case.{name} has {wrong[0]}: expected lengths from 0 to {most}")
        if self.varlen and self.lengths is None:
            raise InvalidProblem("case.query_lengths is without lengths: expected those of the keys as well")
        if self.page and self.alignment != "bottom_right":
            raise InvalidProblem("case.alignment: queries of a cache in pages are aligned to the bottom right")
        if self.latent and not (self.page and self.dim_v <= self.dim_qk):
            raise InvalidProblem("case.latent: expected pages, and keys of at least as many columns as values")

    def _check_parts(self) -> None:
        """Raise ``InvalidProblem`` for parts that are too many, or whose results do not tell the whole's."""
        if not 0 <= self.parts <= _PARTS:
            raise InvalidProblem(f"case.parts is {self.parts}: expected 0 to {_PARTS}")
        if self.parts and not (self.mergeable and self.lse):
            raise InvalidProblem("case.parts: expected a dense call with lse, without dropout, alibi and poison")
        if self.parts and self.work > DENSE_WORK:
            raise InvalidProblem(f"case.parts: expected a case of at most {DENSE_WORK:,} products, answered whole")
