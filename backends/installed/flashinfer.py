"""``flashinfer``: one request by ``single_prefill_with_kv_cache``, and a token of each sequence over a paged cache.

Its lse has base 2. It compiles its kernels where no package of them is installed, which takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from attnswitch.machine.backend import Inputs, Standing
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

from .base import Attend, InstalledBackend, called, of_rows, rows_of
from .package import Package
from .takes import Takes, sided

__all__ = ["FlashInferBackend"]

#: Bytes of its workspace, as its documentation has it.
_WORKSPACE = 128 * 2**20


class FlashInferBackend(InstalledBackend):
    """The package flashinfer-python, without gradients."""

    name: ClassVar[str] = "flashinfer"
    paged: ClassVar[bool] = True
    package: ClassVar[Package] = Package("flashinfer-python", "pip install 'flashinfer-python>=0.7.2'", "0.7.2")
    takes: ClassVar[Takes] = Takes(
        "single_prefill_with_kv_cache",
        dims=(64, 128, 256),
        window=True,
        softcap=True,
        any_scale=False,
        grads=False,
        lse=True,
    )

    def standing(self, device: Device) -> Standing:
        """A kernel that is not there takes minutes to compile."""
        return Standing.ASKED

    def limits(self, problem: Problem, device: Device) -> Iterator[str]:
        """One request, or one token of each sequence in pages; windows that end at the query itself."""
        p = problem
        left, right = sided(p, None)
        if p.page and p.seq_q != 1:
            yield f"{p.seq_q} queries over a paged cache: BatchDecodeWithPagedKVCacheWrapper is called for one each"
        if p.varlen:
            yield "varlen: queries of unlike numbers are left out"
        if not p.page and p.batch != 1:
            yield f"batch {p.batch}: single_prefill_with_kv_cache takes one request"
        if right not in (None, 0) or (left is not None and right is None):
            yield f"window={p.window}: its windows end at the query itself, with is_causal"
        if not p.page and (left is not None or right is not None) and p.seq_q > p.seq_k:
            yield f"{p.seq_q} queries, {p.seq_k} keys: what rows that see nothing get is not said"

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """Its workspace."""
        return super().extra_bytes(problem, device) + _WORKSPACE

    def attend(self, problem: Problem, device: Device) -> Attend:
        """The single call, or a wrapper that is planned in each call, since lengths change at every token."""
        if problem.page:
            return _paged(problem)
        (single,) = called("flashinfer", "single_prefill_with_kv_cache")
        p = problem
        left, right = sided(p, None)

        def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
            found = single(
                rows_of(inputs.query).contiguous(),
                rows_of(inputs.key).contiguous(),
                rows_of(inputs.value).contiguous(),
                causal=right == 0,
                kv_layout="NHD",
                sm_scale=p.softmax_scale,
                window_left=-1 if left is None else left,
                logits_soft_cap=p.softcap or None,
                return_lse=stated,
            )
            out, lse = found if stated else (found, None)
            return of_rows(out), _natural(lse, of_rows)

        return attend


def _paged(problem: Problem) -> Attend:
    p = problem
    (wrapper,) = called("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    left, _ = sided(p, None)

    def attend(inputs: Inputs, stated: bool) -> tuple[Any, Any]:
        import torch

        pages, indices, last = _tables(p, inputs)
        # Of each call its own: calls on two streams may run side by side.
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=inputs.query.device)
        decode = wrapper(workspace, kv_layout="HND", use_tensor_cores=True)
        kind = getattr(torch, p.dtype)
        decode.plan(
            pages,
            indices,
            last,
            p.heads_q,
            p.heads_kv,
            p.dim_qk,
            p.page,
            window_left=-1 if left is None else left,
            logits_soft_cap=p.softcap or None,
            q_data_type=kind,
            kv_data_type=kind,
            sm_scale=p.softmax_scale,
        )
        found = decode.run(inputs.query[:, :, 0].contiguous(), (inputs.key, inputs.value), return_lse=stated)
        out, lse = found if stated else (found, None)
        dead = (inputs.key_lengths.to(out.device) == 0)[:, None]  # type: ignore[union-attr]
        out = out.masked_fill(dead[..., None], 0.0)[:, :, None]
        return out, _natural(lse, lambda x: x.masked_fill(dead, -math.inf)[:, :, None])

    return attend


def _tables(problem: Problem, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Where the pages of each sequence begin (B + 1,), the pages, and the rows of each last one (B,): int32."""
    import torch

    device = inputs.query.device
    lengths = inputs.key_lengths.to(device, torch.int32)  # type: ignore[union-attr]
    counts = (lengths + problem.page - 1) // problem.page
    begins = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    begins[1:] = counts.cumsum(0)
    table = inputs.block_table.to(device, torch.int32)  # type: ignore[union-attr]
    used = torch.arange(table.shape[1], device=device) < counts[:, None]
    last = torch.where(counts > 0, lengths - (counts - 1) * problem.page, 0)
    return begins, table[used], last.to(torch.int32)


def _natural(lse: Any, laid: Any) -> Any:
    """An lse of base 2 as one of base e, laid out."""
    return None if lse is None else laid(lse * math.log(2.0))
