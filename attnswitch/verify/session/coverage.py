"""The situations in which attention kernels have been wrong, recognised in a case: what a run has and has not met."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnswitch.verify.drawing.case import Case

__all__ = ["TRIGGERS", "triggers"]

#: In the field's words, with what a case must be.
TRIGGERS: dict[str, Callable[[Case], bool]] = {
    "keys % 128 == 0": lambda c: c.seq_k % 128 == 0 and c.seq_k > 0,
    "keys % 128 == 1": lambda c: c.seq_k % 128 == 1 and c.seq_k > 1,
    "keys % 128 == 127": lambda c: c.seq_k % 128 == 127,
    "keys % 64 == 1": lambda c: c.seq_k % 64 == 1 and c.seq_k > 1,
    "keys % 32 == 1": lambda c: c.seq_k % 32 == 1 and c.seq_k > 1,
    "queries % 128 == 0": lambda c: c.seq_q % 128 == 0 and c.seq_q > 0,
    "queries % 128 == 1": lambda c: c.seq_q % 128 == 1 and c.seq_q > 1,
    "queries % 64 == 63": lambda c: c.seq_q % 64 == 63,
    "one query (decoding)": lambda c: c.seq_q == 1,
    "one key": lambda c: c.seq_k == 1,
    "no query, key or batch": lambda c: 0 in (c.batch, c.seq_q, c.seq_k),
    "more queries than keys": lambda c: c.seq_q > c.seq_k,
    "keys over 1,024": lambda c: c.seq_k > 1024,
    "keys over 8,192": lambda c: c.seq_k > 8192,
    "keys over 65,536": lambda c: c.seq_k > 65536,
    "head dimension not a power of two": lambda c: c.dim_qk & (c.dim_qk - 1) != 0,
    "head dimension under 16": lambda c: c.dim_qk < 16,
    "head dimension not a multiple of 8": lambda c: c.dim_qk % 8 != 0 or c.dim_v % 8 != 0,
    "head dimension over 128": lambda c: max(c.dim_qk, c.dim_v) > 128,
    "head dimension over 256": lambda c: max(c.dim_qk, c.dim_v) > 256,
    "unequal head dimensions": lambda c: c.dim_qk != c.dim_v,
    "grouped heads": lambda c: c.group > 1 and c.heads_kv > 1,
    "one shared key head": lambda c: c.group > 1 and c.heads_kv == 1,
    "causal": lambda c: c.causal,
    "causal, unequal lengths": lambda c: c.causal and c.seq_q != c.seq_k,
    "bottom-right alignment": lambda c: c.alignment == "bottom_right",
    "window": lambda c: c.window is not None,
    "window with causal": lambda c: c.window is not None and c.causal,
    "key lengths": lambda c: c.lengths is not None and not (c.varlen or c.page),
    "sequences without padding": lambda c: c.varlen and not c.page,
    "cache in pages": lambda c: c.page > 0,
    "cache in pages, one query": lambda c: c.page > 0 and c.seq_q == 1,
    "cache in pages, 8 bits": lambda c: c.cache != "",
    "cache in pages, tree of queries": lambda c: c.tree != "",
    "cache in pages, values within the keys": lambda c: c.latent,
    "cache in pages, packed queries": lambda c: c.page > 0 and c.varlen,
    "keys in parts, merged": lambda c: c.parts > 0,
    "keys in parts, merged, with gradients": lambda c: c.parts > 0 and bool(c.grads),
    "a sequence without queries": lambda c: 0 in (c.query_lengths or ()),
    "a key length of 0": lambda c: c.lengths is not None and 0 in c.lengths,
    "bool mask": lambda c: c.mask is not None and c.mask.dtype == "bool",
    "float mask": lambda c: c.mask is not None and c.mask.dtype != "bool",
    "float mask of another type": lambda c: c.mask is not None and c.mask.dtype not in ("bool", c.dtype),
    "broadcast mask": lambda c: c.mask is not None and c.mask.axes != "bhqk",
    "mask with dead rows": lambda c: c.mask is not None and c.mask.kind in ("dead-rows", "none"),
    "mask of large negative numbers": lambda c: c.mask is not None and c.mask.kind.startswith(("finite", "minus")),
    "mask gradient": lambda c: "m" in c.grads,
    "sinks": lambda c: bool(c.sinks),
    "sinks with gradients": lambda c: bool(c.sinks and c.grads),
    "sinks with a cache in pages": lambda c: bool(c.sinks and c.page),
    "sinks of -inf and far from the scores": lambda c: c.sinks == "extreme",
    "ALiBi": lambda c: bool(c.alibi),
    "ALiBi with a cache in pages": lambda c: bool(c.alibi and c.page),
    "ALiBi, bottom-right alignment": lambda c: bool(c.alibi) and c.alignment == "bottom_right",
    "softcap": lambda c: c.softcap > 0,
    "scale of 0 or less": lambda c: c.scale is not None and c.scale <= 0,
    "dropout with a seed": lambda c: c.dropout > 0 and not c.unseeded,
    "dropout without a seed": lambda c: c.unseeded,
    "all gradients": lambda c: {"q", "k", "v"} <= set(c.grads),
    "some gradients": lambda c: bool(c.grads) and not {"q", "k", "v"} <= set(c.grads),
    "lse with gradients": lambda c: c.lse and bool(c.grads),
    "deterministic": lambda c: c.deterministic,
    "NaN and inf": lambda c: c.poison,
    "layout BLHD": lambda c: c.layout == "BLHD",
    "operands not contiguous": lambda c: c.placing.query != "contiguous" or c.placing.key != "contiguous",
    "unaligned operand": lambda c: "offset" in (c.placing.query, c.placing.key, c.placing.value),
    "upstream gradient not contiguous": lambda c: bool(c.grads) and c.placing.grad_out != "contiguous",
    "expanded operand (stride 0)": lambda c: any(
        x.startswith("expanded") for x in (c.placing.query, c.placing.key, c.placing.value)
    ),
    "meaningless strides": lambda c: "garbage" in (c.placing.query, c.placing.key, c.placing.value),
    "large scores": lambda c: c.data in ("large", "activations"),
    "all scores far below 0": lambda c: c.data == "negative",
    "maximum that rises from tile to tile": lambda c: c.data == "rising",
}


def triggers(case: Case) -> Iterator[str]:
    """The situations that ``case`` is."""
    for name, holds in TRIGGERS.items():
        if holds(case):
            yield name
