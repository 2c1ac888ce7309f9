"""Definitions of FlashInfer-Bench as requirements: its operators on attention, with the sizes of their fixed axes.

gqa_paged and gqa_ragged name heads, head dimension and page; mla_paged is attention of one key head, whose keys are the
latent and the rotary part together and whose values are the latent. The reference that a definition has is not run.
"""

from __future__ import annotations

from typing import Any

from attnswitch import reading
from attnswitch.errors import InvalidProblem
from attnswitch.names import one_of, shown
from attnswitch.verify.demands.requirement import Requirement

__all__ = ["requirement"]

_OPERATORS = ("gqa_paged", "gqa_ragged", "mla_paged")
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_CACHES = {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2", "int8": "int8"}


def requirement(found: Any) -> Requirement:
    """What the JSON document ``found`` requires. Raises ``InvalidProblem`` for what is not understood."""
    wanted = {"name": str, "op_type": str, "axes": dict[str, Any], "inputs": dict[str, Any], "outputs": dict[str, Any]}
    values = reading.table(found, wanted)
    operator, axes, inputs = values["op_type"], values["axes"], values["inputs"]
    if operator not in _OPERATORS:
        raise InvalidProblem(f"op_type is {shown(operator)}: {one_of(operator, _OPERATORS)}")
    latent, packed = operator == "mla_paged", "qo_indptr" in inputs
    words = [f"H={_size(axes, 'num_qo_heads')}"]
    if latent:
        value, rotary = _size(axes, "head_dim_ckv"), _size(axes, "head_dim_kpe")
        words += ["Hkv=1", f"D={value + rotary}", f"Dv={value}"]
    else:
        words += [f"Hkv={_size(axes, 'num_kv_heads')}", f"D={_size(axes, 'head_dim')}"]
    if latent or _size(axes, "num_kv_heads") != _size(axes, "num_qo_heads"):
        words.append("gqa")
    words += [f"page={_size(axes, 'page_size')}"] if operator != "gqa_ragged" else []
    words += ["varlen"] if packed or operator == "gqa_ragged" else ["Lq=1"]
    words += ["causal-br!"] if "causal" in values["name"].split("_") else []
    words += [word for word, has in (("lse", "lse" in values["outputs"]), ("scale", "sm_scale" in inputs)) if has]
    return Requirement.parse(",".join(words + _types(inputs, latent)))


def _types(inputs: dict[str, Any], latent: bool) -> list[str]:
    """The dtype of query, and that of a cache stored in 8 bits."""
    query = _dtype(inputs, "q_nope" if latent else "q")
    keys = next((_dtype(inputs, name) for name in ("ckv_cache", "k_cache", "k") if name in inputs), query)
    if query not in _DTYPES:
        raise InvalidProblem(f"inputs of dtype {shown(query)}: {one_of(query, _DTYPES)}")
    if keys != query and keys not in _CACHES:
        raise InvalidProblem(f"keys of dtype {shown(keys)}: expected {query}, as query has, or {', '.join(_CACHES)}")
    return [f"dtype={_DTYPES[query]}", *([f"cache={_CACHES[keys]}!"] if keys != query else [])]


def _dtype(inputs: dict[str, Any], name: str) -> str:
    if name not in inputs:
        raise InvalidProblem(f"inputs has no field {name!r}")
    dtype: str = reading.table(inputs[name], {"dtype": str}, f"inputs.{name}")["dtype"]
    return dtype


def _size(axes: dict[str, Any], name: str) -> int:
    """The size of a fixed axis."""
    if name not in axes:
        raise InvalidProblem(f"axes has no field {name!r}")
    axis = reading.table(axes[name], {"type": str, "value": int | None}, f"axes.{name}")
    if axis["value"] is None:
        raise InvalidProblem(f"axes.{name} is {shown(axis['type'])}: expected a const with a value")
    size: int = axis["value"]
    return size
