"""``Call``: one call over ranks, and what this rank computes of it by calls of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from attnswitch.api import attention, attention_backward
from attnswitch.parallel.dealing import Dealing
from attnswitch.parallel.pieces import Band, Piece, packed, pieces
from attnswitch.varlen import attention_varlen, attention_varlen_backward

__all__ = ["Call"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What is asked of all ranks alike. Operands are (B, H, L, D), those of packed sequences (1, H, T, D)."""

    rank: int
    queries: Dealing
    keys: Dealing
    band: Band
    #: Keywords that every call of a part has as well: scale, softcap, deterministic, backend, policy.
    options: dict[str, Any]
    #: Offsets of packed sequences in the whole; none where there is a batch.
    cu_seqlens: tuple[int, ...] = ()
    #: Of the whole: (B|1, H|1, Lq|1, Lk|1) and (B,).
    beside: dict[str, Any] = field(default_factory=dict)

    def pieces(self, owner: int) -> list[Piece]:
        """What this rank's queries see of the keys of ``owner``."""
        mine, theirs = self.queries.held(self.rank), self.keys.held(owner)
        if self.cu_seqlens:
            return packed(mine, theirs, self.band, self.cu_seqlens)
        return pieces(mine, theirs, self.band, apart=bool(self.beside))

    def attend(self, piece: Piece, owner: int, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Output (B, H, rows, Dv) and lse of the piece, from all that this rank and ``owner`` hold."""
        said = {"return_lse": True, **self.said(piece, owner)}
        q, k, v = _part(query, piece.rows), _part(key, piece.keys), _part(value, piece.keys)
        if not piece.cu_seqlens:
            out, lse = attention(q, k, v, **said)
            return out, lse
        longest = _longest(piece.cu_seqlens)
        out, lse = attention_varlen(_rows(q), _rows(k), _rows(v), piece.cu_seqlens, max_seqlen_q=longest, **said)
        return out.swapaxes(0, 1)[None], lse[None]

    def differentiate(
        self, piece: Piece, owner: int, operands: Sequence[Any], results: Sequence[Any], upstream: Sequence[Any]
    ) -> Sequence[Any]:
        """Gradients of the piece's queries, keys and values, from output and lse of all keys and their gradients."""
        said = self.said(piece, owner)
        q, k, v = (_part(x, rows) for x, rows in zip(operands, (piece.rows, piece.keys, piece.keys), strict=True))
        out, lse, grad_out = (_part(x, piece.rows).contiguous() for x in (*results, upstream[0]))
        grad_lse = None if upstream[1] is None else _part(upstream[1], piece.rows).contiguous()
        if not piece.cu_seqlens:
            return attention_backward(grad_out, q, k, v, out=out, lse=lse, grad_lse=grad_lse, **said)[:3]
        grads = attention_varlen_backward(
            *(_rows(grad_out), _rows(q), _rows(k), _rows(v), piece.cu_seqlens),
            max_seqlen_q=_longest(piece.cu_seqlens),
            out=_rows(out),
            lse=lse[0],
            grad_lse=None if grad_lse is None else grad_lse[0],
            **said,
        )
        return [grad.swapaxes(0, 1)[None] for grad in grads[:3] if grad is not None]

    def said(self, piece: Piece, owner: int) -> dict[str, Any]:
        """The keywords of the piece's call."""
        said = {"is_causal": piece.causal, "window": piece.window, **self.options}
        if not self.beside:
            return said
        row, key = self._position(self.queries, self.rank, piece.rows), self._position(self.keys, owner, piece.keys)
        lengths, mask = self.beside.get("key_lengths"), self.beside.get("attn_mask")
        if lengths is not None:
            said["key_lengths"] = (lengths - key).clamp(0, len(piece.keys))
        if mask is not None:
            rows, keys = (
                slice(start, start + len(part)) if size > 1 else slice(None)
                for start, part, size in zip((row, key), piece[:2], mask.shape[-2:], strict=True)
            )
            said["attn_mask"] = mask[..., rows, keys]
        return said

    @staticmethod
    def _position(dealt: Dealing, rank: int, rows: range) -> int:
        """The position of the first of ``rows`` that ``rank`` holds."""
        before = 0
        for part in dealt.held(rank):
            if rows.start < before + len(part):
                return part.start + rows.start - before
            before += len(part)
        raise IndexError(rows.start)


def _part(array: Any, rows: range) -> Any:
    return array[:, :, rows.start : rows.stop]


def _rows(array: Any) -> Any:
    """(1, H, T, D) as (T, H, D)."""
    return array[0].swapaxes(0, 1)


def _longest(cu_seqlens: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(cu_seqlens))
