"""One case as one call: its operands placed as an application would hold them, and the public functions called."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import attnswitch
from attnswitch.call import finite
from attnswitch.planning.planner import make_plan
from attnswitch.verify.drawing import stored
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.placings import FENCED
from attnswitch.verify.launch import pages, parts, sequences, trees
from attnswitch.verify.launch.layouts import Storage, host, passed, place

__all__ = [
    "Placed",
    "Returned",
    "allocated",
    "call",
    "expected",
    "finite_check",
    "hosted",
    "malformed",
    "missing",
    "place_operands",
]

_TENSORS = ("out", "grad query", "grad key", "grad value")
#: Those that a caller may have with tokens before heads.
_OPERANDS = ("query", "key", "value", "grad_out")

#: Runs a function in some surroundings: a stream, an autocast region. The plain one just calls it.
Around = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """The arrays of a case as the caller holds them, and the memory that each lies in.

    Of sequences without padding these are (T, H, D), grad_lse is (H, T), and there are offsets in place of lengths. Of
    a cache in pages key and value are (P, page, H, D), and the lengths are those of the cache.
    """

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    key_lengths: Any
    grad_out: Any
    grad_lse: Any
    storage: dict[str, Storage] = field(default_factory=dict)
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    block_table: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    key_scale: Any = None
    value_scale: Any = None
    tree_mask: Any = None
    #: The numbers that ``block_table`` and ``tree_mask`` had, in NumPy.
    table: Any = None
    bits: Any = None


@dataclass(frozen=True, slots=True)
class Returned:
    """What the calls returned, by name, in (B, H, L, D) order, and the backend that made it."""

    results: dict[str, Any]
    chosen: str


def place_operands(case: Case, data: dict[str, Any], device: str) -> Placed:
    """The operands of ``case`` as arrays of its library."""
    storage: dict[str, Storage] = {}
    table, caches = pages.dealt(case, data) if case.page else (None, {})
    plain = _plain(case)

    def put(role: str, dtype: str, placing: str) -> Any:
        values = data[role]
        if role in caches:
            values, placing = caches[role], pages.placing(placing, case.scales)
        elif case.varlen:  # rows that repeat within a sequence do not from one to the next
            values, placing = sequences.joined(case, role, values), placing.replace("expanded-rows", "contiguous")
        turned = role in _OPERANDS and (case.layout == "BLHD" or case.varlen or case.page > 0)
        placed, storage[role] = place(values, dtype, placing, case.library, device, turned=turned)
        return placed

    kinds = {"key": case.cache or case.dtype, "value": case.cache or case.dtype}
    made = {
        role: put(role, kinds.get(role, case.dtype), getattr(case.placing, role))
        for role in _OPERANDS
        if not (case.latent and role == "value")  # which lies within the keys
    }
    grad_lse = put("grad_lse", "float64" if case.dtype == "float64" else "float32", plain)
    heads = {}
    for role, kind in (("sinks", case.sinks), ("alibi_slopes", case.alibi)):
        if kind:
            numbers = data[role][0] if data[role].shape[0] == 1 and role == "alibi_slopes" else data[role]
            heads[role], storage[role] = place(numbers, case.heads_dtype(kind), plain, case.library, device)
    for role in ("key_scale", "value_scale"):
        if role in caches:
            dtype = "float64" if case.dtype == "float64" else "float32"
            scales = stored.passed(case.scales, caches[role])
            heads[role], storage[role] = place(scales, dtype, plain, case.library, device)
    if table is not None:
        if case.latent:
            made["value"] = made["key"][..., : case.dim_v]
        packed = ("query", "grad_out") if case.varlen else ()
        made = {role: x[0].swapaxes(0, 1) if role in packed else x.swapaxes(1, 2) for role, x in made.items()}
        cu_q = _integers(case, sequences.offsets(case, "query"), device) if case.varlen else None
        beside = None, _integers(case, case.lengths or (), device), made["grad_out"], grad_lse, storage, cu_q, None
        heads["table"] = table
        if case.tree:
            heads["bits"] = trees.bits(case, data["attn_mask"])
            heads["tree_mask"] = passed(case.library, heads["bits"].copy(), device, plain)
        return Placed(made["query"], made["key"], made["value"], *beside, _integers(case, table, device), **heads)
    if case.varlen:
        made = {role: array[0].swapaxes(0, 1) for role, array in made.items()}
        cu_q, cu_k = (_integers(case, sequences.offsets(case, role), device) for role in ("query", "key"))
        operands = made["query"], made["key"], made["value"]
        return Placed(*operands, None, None, made["grad_out"], grad_lse[0], storage, cu_q, cu_k, **heads)
    if case.layout == "BLHD":
        made = {role: array.swapaxes(1, 2) for role, array in made.items()}
    mask = None
    if case.mask is not None:
        mask = put("attn_mask", case.mask.dtype, case.placing.attn_mask)
        mask = mask[(0,) * (4 - case.mask.rank)] if case.mask.rank < 4 else mask
    lengths = None if case.lengths is None else _integers(case, case.lengths, device)
    operands = made["query"], made["key"], made["value"]
    return Placed(*operands, mask, lengths, made["grad_out"], grad_lse, storage, **heads)


def _plain(case: Case) -> str:
    """How arrays lie of which a case does not say it: beside memory's ends where its operands do."""
    return case.placing.query if case.placing.query in FENCED else "contiguous"


def _integers(case: Case, numbers: Sequence[int], device: str) -> Any:
    """Lengths, offsets or a table as an array of one of the integer types that callers use, and that they fit."""
    made = np.array(numbers, dtype=np.int64)
    small = made.min(initial=0) >= 0 and made.max(initial=0) < 256
    fits = ("int32", "int64", "int16", "uint8") if small else ("int32", "int64")
    made = made.astype(fits[case.data_seed % len(fits)])
    return passed(case.library, made, device, _plain(case))


def expected(case: Case) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every result that the calls return, in (B, H, L, D) order."""
    b, h, lq, lk = case.scores
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"out": ((b, h, lq, case.dim_v), case.dtype)}
    if case.lse:
        shapes["lse"] = ((b, h, lq), "float64" if case.dtype == "float64" else "float32")
    every = case.library != "torch"  # attention_backward gives all three
    for letter, name, shape in (
        ("q", "query", (b, h, lq, case.dim_qk)),
        ("k", "key", (b, case.heads_kv, lk, case.dim_qk)),
        ("v", "value", (b, case.heads_kv, lk, case.dim_v)),
    ):
        if letter in case.grads or (every and case.grads):
            shapes[f"grad {name}"] = (shape, case.dtype)
    if "m" in case.grads and case.mask is not None:
        sizes = zip("bhqk"[4 - case.mask.rank :], case.scores[4 - case.mask.rank :], strict=True)
        shapes["grad attn_mask"] = (tuple(n if axis in case.mask.axes else 1 for axis, n in sizes), case.mask.dtype)
    if case.sinks and case.grads:
        shapes["grad sinks"] = ((h,), case.heads_dtype(case.sinks))
    return shapes


def allocated(case: Case) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every result as it is made."""
    found = expected(case)
    if case.varlen:
        found = {
            name: (((shape[1], sequences.rows(case, name), *shape[3:]) if len(shape) > 1 else shape), dtype)
            for name, (shape, dtype) in found.items()
        }
    return found


def missing(case: Case, results: dict[str, Any]) -> str:
    """Which results the calls did not return, or returned unasked; empty if they are the ones."""
    odd = sorted(expected(case).keys() ^ results.keys())
    return f"results {odd} are missing or were not asked for" if odd else ""


def malformed(case: Case, results: dict[str, Any]) -> str:
    """What is missing, too much, or of another shape in what the calls returned; empty if nothing is."""
    if odd := missing(case, results):
        return odd
    wanted = expected(case)
    shapes = {name: tuple(getattr(result, "shape", ())) for name, result in results.items()}
    wrong = [
        f"{name} has shape {shapes[name]}, expected {wanted[name][0]}"
        for name in wanted
        if shapes[name] != wanted[name][0]
    ]
    return "; ".join(wrong)


def call(
    case: Case,
    placed: Placed,
    backend: str | None,
    around: Around = lambda run: run(),
    synchronize: bool = True,
) -> Returned:
    """Attention and its gradients on ``placed``; ``backend`` None lets the dispatcher choose.

    A GPU has finished when it returns, unless ``synchronize`` says otherwise. Raises whatever the backend raises,
    ``Unsupported`` and ``BackendUnavailable`` among it.
    """
    way = _in_parts if case.parts else _autograd if case.library == "torch" else _explicit
    returned: Returned = around(lambda: way(case, placed, backend))
    if synchronize and case.library != "numpy" and (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if case.varlen:
        whole = {
            name: result if name == "grad sinks" else sequences.padded(case, name, result)
            for name, result in returned.results.items()
        }
        return Returned(whole, returned.chosen)
    if case.layout == "BLHD" or case.page:
        turned = {n: r.swapaxes(1, 2) if n in _TENSORS else r for n, r in returned.results.items()}
        return Returned(turned, returned.chosen)
    return returned


def _options(case: Case, placed: Placed) -> dict[str, Any]:
    heads = {"sinks": placed.sinks, "alibi_slopes": placed.alibi_slopes}
    if case.page:
        return heads | {
            "block_table": placed.block_table,
            "cache_lengths": placed.key_lengths,
            "cu_seqlens_q": placed.cu_seqlens_q,
            "max_seqlen_q": case.seq_q if case.varlen else None,
            "is_causal": case.causal,
            "scale": case.scale,
            "window": case.window,
            "softcap": case.softcap,
            "num_splits": case.splits or None,
            "tree_mask": placed.tree_mask,
            "key_scale": placed.key_scale,
            "value_scale": placed.value_scale,
            "deterministic": case.deterministic,
        }
    options = heads | {
        "dropout_p": case.dropout,
        "is_causal": case.causal,
        "scale": case.scale,
        "causal_alignment": case.alignment,
        "window": case.window,
        "softcap": case.softcap,
        "seed": case.dropout_seed,
        "deterministic": case.deterministic,
    }
    if case.varlen:
        longest = {"max_seqlen_q": case.seq_q, "max_seqlen_k": case.seq_k}
        return options | longest | {"cu_seqlens_q": placed.cu_seqlens_q, "cu_seqlens_k": placed.cu_seqlens_k}
    return options | {"attn_mask": placed.attn_mask, "key_lengths": placed.key_lengths, "layout": case.layout}


def _in_parts(case: Case, placed: Placed, backend: str | None) -> Returned:
    return Returned(*parts.called(case, placed, _options(case, placed), backend))


def _explicit(case: Case, placed: Placed, backend: str | None) -> Returned:
    """Through ``attention_backward``, for libraries without autograd."""
    options = _options(case, placed)
    operands = (placed.query, placed.key, placed.value)
    attend: Callable[..., Any] = attnswitch.attention
    differentiate: Callable[..., Any] = attnswitch.attention_backward
    if case.page:
        attend = attnswitch.attention_paged
    elif case.varlen:
        attend, differentiate = attnswitch.attention_varlen, attnswitch.attention_varlen_backward
    chosen = backend
    if chosen is None:
        plan = attnswitch.plan(*operands, **options, return_lse=case.lse)
        chosen = str(plan.backend)
        if case.grads:  # whose choice may be another: one backend is to answer for all results
            stepping = make_plan(plan.problem.replace(grads=case.grads), plan.device)
            backend = chosen = stepping.backend or chosen
    out = attend(*operands, **options, return_lse=case.lse, backend=backend)
    results: dict[str, Any] = {"out": out[0], "lse": out[1]} if case.lse else {"out": out}
    if case.grads:
        if "m" in case.grads:
            options["mask_grad"] = True
        grad_lse = placed.grad_lse if case.lse else None
        beside = {"grad_lse": grad_lse, "sinks_grad": bool(case.sinks), "backend": backend}
        grads = differentiate(placed.grad_out, *operands, **options, **beside)
        results |= {f"grad {name}": grad for name, grad in grads._asdict().items() if grad is not None}
        if case.sinks:
            results["grad sinks"] = grads.sinks
    return Returned(results, chosen)


def _autograd(case: Case, placed: Placed, backend: str | None) -> Returned:
    torch: Any = importlib.import_module("torch")
    if case.unseeded:  # torch's own generator draws
        torch.manual_seed(case.data_seed)
    named = {"query": placed.query, "key": placed.key, "value": placed.value, "attn_mask": placed.attn_mask}
    wanted = [name for letter, name in zip("qkvm", named, strict=True) if letter in case.grads]
    named["sinks"] = placed.sinks
    wanted += ["sinks"] if case.sinks and case.grads else []
    leaves: dict[str, Any] = {name: tensor.detach() if tensor is not None else None for name, tensor in named.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    options = _options(case, placed) | {"sinks": leaves["sinks"]}
    operands = (leaves["query"], leaves["key"], leaves["value"])
    attend: Callable[..., Any] = attnswitch.attention_varlen
    if case.page:
        attend = attnswitch.attention_paged
    elif not case.varlen:
        options |= {"attn_mask": leaves["attn_mask"]}
        attend = attnswitch.attention
    chosen = backend or str(attnswitch.plan(*operands, **options, return_lse=case.lse).backend)
    out = attend(*operands, **options, return_lse=case.lse, backend=backend)
    outputs = list(out) if case.lse else [out]
    results: dict[str, Any] = dict(zip(("out", "lse"), outputs, strict=False))
    if wanted:
        upstream = [placed.grad_out, placed.grad_lse][: len(outputs)]
        differentiable = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
        grads = torch.autograd.grad(
            [o for o, _ in differentiable], [leaves[name] for name in wanted], [g for _, g in differentiable]
        )
        results |= {f"grad {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return Returned({name: result.detach() for name, result in results.items()}, chosen)


def hosted(results: dict[str, Any]) -> dict[str, Any]:
    """Results as float64 in NumPy."""
    with np.errstate(all="ignore"):
        return {name: host(result).astype(np.float64) for name, result in results.items()}


@contextlib.contextmanager
def finite_check(always: bool) -> Iterator[None]:
    """Have NaN and inf looked for on a GPU too: poison is refused only where it is seen."""
    with finite.checking("always") if always else contextlib.nullcontext():
        yield
