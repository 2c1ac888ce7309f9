"""Context parallelism over ``torch.distributed``: attention of sequences whose rows are dealt among ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import distributed as dist

from attnswitch.call.options import text_of
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.names import one_of
from attnswitch.parallel import METHODS, Method, asking
from attnswitch.parallel.dealing import ORDERS, USUAL, Dealing, Order
from attnswitch.parallel.way import attend
from attnswitch.planning.policy import Policy
from attnswitch.problem import Alignment, Window

__all__ = ["ContextParallel", "context_parallel"]

#: Words in names of the two methods.
_ALSO: dict[str, Method] = {"ulysses": "all-to-all", "a2a": "all-to-all", **{method: method for method in METHODS}}


def context_parallel(group: Any = None, *, method: Method = "ring", order: Order | None = None) -> ContextParallel:
    """Attention of sequences whose rows are dealt among the ranks of ``group``.

        cp = context_parallel()
        query, key, value = (cp.shard(x, dim=2) for x in (query, key, value))
        out = cp.attention(query, key, value, is_causal=True)

    Args:
        group: a process group or a mesh of one axis; all ranks if None.
        method: "ring": keys and values go from rank to rank, while each computes with what it has; any number of
            heads. "all-to-all": ranks trade rows for heads and back (Ulysses); query heads divide by the ranks.
        order: which rows a rank holds, "zigzag" (the usual of a ring: causal work is even) or "contiguous" (the usual
            of all-to-all); see ``ContextParallel.shard``.

    Raises:
        InvalidProblem: there is no such method or order, or this process is not in ``group``.
        Unsupported: torch.distributed is not there, or not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise Unsupported("context_parallel: torch.distributed is not initialised; call init_process_group first")
    for name, said, known in (("method", method, METHODS), ("order", order, (None, *ORDERS))):
        if said not in known:
            named = [one for one in known if one is not None]
            also = _method(said) if name == "method" else None
            likely = also or (said if isinstance(said, str) else "")
            raise InvalidProblem(f"{name}={text_of(said)}: {one_of(likely, named)}")
    return ContextParallel(_group(group), method, USUAL[method] if order is None else order)


def _method(said: Any) -> Method | None:
    """The method that is meant by a name which it, or what it is part of, has elsewhere."""
    text = said.lower() if isinstance(said, str) else ""
    return next((method for word, method in _ALSO.items() if word in text), None)


def _group(given: Any) -> Any:
    """The process group that is meant, of which this process is a rank. Raises ``InvalidProblem``."""
    if getattr(given, "ndim", 1) != 1:
        raise InvalidProblem(f"group={given}: expected a mesh of one axis, such as mesh['cp']")
    group = given.get_group() if hasattr(given, "get_group") else dist.group.WORLD if given is None else given
    try:
        rank = dist.get_rank(group)
    except (RuntimeError, TypeError, ValueError):
        method = _method(given)
        hint = f"; say method={method!r}" if method else ""
        raise InvalidProblem(f"group={text_of(given)}: expected a process group, or a mesh of one axis{hint}") from None
    if rank < 0:
        raise InvalidProblem("context_parallel: this process is not a rank of the group")
    return group


class ContextParallel:
    """``attention`` over the ranks of a group; see ``context_parallel``.

    All ranks make the same calls with the same options, forward and backward. Each gets the output of its own rows and
    the gradients of what it holds. Gradients of sinks are what a rank computes of them, and summed over ranks by the
    caller, as those of weights are.

    An error may be of one rank alone, such as memory that it lacks. Others do not go on with what is wrong: they have
    NaN where its share is missing, or they wait for it, until the process group gives up.
    """

    def __init__(self, group: Any, method: Method, order: Order) -> None:
        self.group, self.method, self.order = group, method, order
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._cut: dict[int, int] = {}  # by the rows that this rank got: of how many ``shard`` cut them last

    def __repr__(self) -> str:
        return f"<ContextParallel {self.method}, {self.order}, rank {self.rank} of {self.ranks}>"

    def dealing(self, length: int) -> Dealing:
        """Which rows of a sequence of ``length`` each rank holds. Raises ``InvalidProblem``."""
        return Dealing(_number(length), self.ranks, self.order)

    def positions(self, length: int, device: Any = None) -> torch.Tensor:
        """Positions in the whole of the rows that this rank holds, (rows,) int64: for rotary embeddings, say."""
        held = [torch.arange(part.start, part.stop, device=device) for part in self.dealing(length).held(self.rank)]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *held])

    def shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows along ``dim`` that this rank holds, of a tensor that has all of them: a copy, with its gradient."""
        mine = tensor.index_select(dim, self.positions(tensor.shape[dim], tensor.device))
        if not torch.compiler.is_compiling():
            self._cut[mine.shape[dim]] = tensor.shape[dim]
        return mine

    def unshard(self, tensor: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """All rows along ``dim``, in their order, of what each rank holds; all ranks call it. It has no gradient.

        ``length`` is that of the whole; left out, every rank holds as many rows. Raises ``InvalidProblem`` where this
        rank holds others.
        """
        dealt = self.dealing(tensor.shape[dim] * self.ranks if length is None else length)
        if length is None:
            self._check_even(dealt)
        asking.check_rows("tensor", tensor.shape[dim], dealt, self.rank)
        most = max(map(dealt.rows, range(self.ranks)))
        rows = tensor.detach().movedim(dim, 0)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(gathered, padded, group=self.group)
        whole = rows.new_empty(dealt.length, *rows.shape[1:])
        for rank, part in enumerate(gathered):
            at = 0
            for held in dealt.held(rank):
                whole[held.start : held.stop] = part[at : at + len(held)]
                at += len(held)
        return whole.movedim(0, dim)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        length: int | tuple[int, int] | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool | None = None,
        causal_alignment: Alignment = "top_left",
        window: Window | None = None,
        softcap: float = 0.0,
        key_lengths: torch.Tensor | Sequence[int] | None = None,
        return_lse: bool = False,
        layout: str = "BHLD",
        deterministic: bool = False,
        sinks: torch.Tensor | Sequence[float] | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        backend: str | None = None,
        policy: Policy | str | None = None,
        **unknown: Never,
    ) -> Any:
        """``attnswitch.attention`` of the whole sequence; operands and results are this rank's rows.

        Args:
            query: (B, Hq, rows, D), as ``shard`` deals them.
            key: (B, Hkv, rows, D).
            value: (B, Hkv, rows, Dv).
            length: rows of the whole, or those of the queries and those of the keys. Left out, every rank holds as
                many.
            attn_mask: of the whole, broadcastable to (B, Hq, Lq, Lk), the same on every rank. No gradient.
            is_causal: as for ``attnswitch.attention``, by positions in the whole, like all that follows.
            scale: see is_causal.
            enable_gqa: see is_causal.
            causal_alignment: see is_causal.
            window: see is_causal.
            softcap: see is_causal.
            key_lengths: see is_causal; (B,) lengths in the whole, the same on every rank.
            return_lse: see is_causal; (B, Hq, rows).
            layout: see is_causal.
            deterministic: see is_causal.
            sinks: see is_causal.
            alibi_slopes: see is_causal; of method "all-to-all" alone.
            dropout_p: refused unless 0: the mask is a function of the whole.
            seed: has no use without dropout.
            backend: see is_causal.
            policy: see is_causal.
            **unknown: refused, with the name that may have been meant.

        Returns:
            The output (B, Hq, rows, Dv), or (output, lse), differentiable once.

        Raises:
            InvalidProblem: the arguments make no sense together, or operands are not the rows of this rank.
            Unsupported: what no part of a sequence can honour, or no backend takes.
        """
        options = asking.options(
            unknown, self.attention, dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, softcap,
            return_lse, layout, deterministic,
        )  # fmt: skip
        asked = asking.batch(
            (query, key, value), self._lengths(length), options, self.dealing, self.rank,
            attn_mask=attn_mask, key_lengths=key_lengths, sinks=sinks, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        if length is None:
            self._check_even(asked.queries, asked.keys)
        return attend(asked, self.method, self.group, backend, policy)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor | Sequence[int],
        *,
        length: int | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool | None = None,
        causal_alignment: Alignment = "top_left",
        window: Window | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
        deterministic: bool = False,
        sinks: torch.Tensor | Sequence[float] | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        backend: str | None = None,
        policy: Policy | str | None = None,
        **unknown: Never,
    ) -> Any:
        """``attnswitch.attention_varlen`` of packed sequences whose rows are dealt among the ranks, all as one.

        Args:
            query: (rows, Hq, D), as ``shard`` deals the (T, Hq, D) of all sequences.
            key: (rows, Hkv, D).
            value: (rows, Hkv, Dv).
            cu_seqlens_q: (B + 1,) where each sequence begins in the whole, the same on every rank, for queries and keys
                alike. The host reads it; on a GPU it waits for that.
            length: T, the rows of all; left out, every rank holds as many.
            is_causal: as for ``attention``, like all that follows.
            scale: see is_causal.
            enable_gqa: see is_causal.
            causal_alignment: see is_causal.
            window: see is_causal.
            softcap: see is_causal.
            return_lse: see is_causal; (Hq, rows).
            deterministic: see is_causal.
            sinks: see is_causal.
            alibi_slopes: see is_causal; (Hq,), or (B, Hq) for B sequences.
            dropout_p: see is_causal.
            seed: see is_causal.
            backend: see is_causal.
            policy: see is_causal.
            **unknown: see is_causal.

        Returns:
            The output (rows, Hq, Dv), or (output, lse). Rows past the last sequence have output 0 and lse -inf.

        Raises what ``attention`` raises.
        """
        options = asking.options(
            unknown, self.attention_varlen, dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, softcap,
            return_lse, "BHLD", deterministic,
        )  # fmt: skip
        asked = asking.sequences(
            (query, key, value), self._lengths(length), options, self.dealing, self.rank,
            cu_seqlens=cu_seqlens_q, sinks=sinks, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        if length is None:
            self._check_even(asked.queries)
        return attend(asked, self.method, self.group, backend, policy)

    def _lengths(self, length: Any) -> tuple[int, int] | None:
        """Those of the whole's queries and keys, where they are said."""
        if length is None:
            return None
        both = tuple(length) if isinstance(length, (tuple, list)) else (length, length)
        if len(both) != 2:
            raise InvalidProblem(f"length={text_of(length)}: expected a number of rows, or those of queries and keys")
        return _number(both[0]), _number(both[1])

    def _check_even(self, *dealt: Dealing) -> None:
        """Raises ``InvalidProblem`` where ``shard`` cut rows of a whole that is not the one of a length left out.

        Ranks do not hold such a whole evenly, so that each of them says so.
        """
        for one in dealt:
            rows = one.rows(self.rank)
            whole = self._cut.get(rows, one.length)
            if whole != one.length:
                raise InvalidProblem(
                    f"length is left out, and rank {self.rank} holds {rows} of the {whole} rows that shard() cut last:"
                    f" {self.ranks} ranks do not hold them evenly; pass length={whole}"
                )


def _number(length: Any) -> int:
    if isinstance(length, int) and not isinstance(length, bool):
        return length
    try:
        if not isinstance(length, bool):
            return operator.index(length)
    except TypeError:
        pass
    raise InvalidProblem(f"length={text_of(length)}: expected a number of rows")
