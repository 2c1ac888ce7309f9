"""``attention`` of DTensors: every process computes the heads and the part of the batch that it has.

A mesh axis along which query is sharded by batch or by heads stays so, if it divides those of key and value as well.
Along any other, operands are gathered first and every process of it computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from attnswitch import arrays
from attnswitch.call import options as read
from attnswitch.call.operators.calls import as_floats
from attnswitch.call.options import Options
from attnswitch.errors import InvalidProblem, Unsupported

__all__ = ["everywhere", "parts"]

_BATCH, _HEADS, _WHOLE = "batch", "heads", "whole"


def parts(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    seed: int | None,
    backend: str | None,
    policy: Any,
    *given: Any,
    alibi_slopes: Any = None,
) -> tuple[tuple[Any, ...], Any, Callable[[Any], Any]]:
    """The call that this process makes, the slopes of ALiBi beside it, and what makes DTensors of its results.

    Raises ``InvalidProblem`` for operands that are not on one mesh, ``Unsupported`` for dropout without a seed.
    """
    # In a graph the call that is made of the parts is what checks them.
    options = Options(*given) if torch.compiler.is_dynamo_compiling() else read.of_call(*given)
    if options.dropout_p and seed is None:
        raise Unsupported(f"dropout_p={options.dropout_p} of DTensors: processes would draw their own; pass a seed")
    operands = dict(zip(arrays.ROLES, (query, key, value, attn_mask), strict=False))
    if isinstance(query, DTensor) and alibi_slopes is not None and not isinstance(alibi_slopes, DTensor):
        alibi_slopes = everywhere(as_floats(alibi_slopes, "alibi_slopes", query), query.device_mesh)
    operands |= {"key_lengths": key_lengths, "alibi_slopes": alibi_slopes}
    mesh = _mesh(operands)
    for role in arrays.ROLES[:3]:
        if operands[role].dim() != 4:
            raise InvalidProblem(
                f"{role} has shape {tuple(operands[role].shape)}: expected four axes, {', '.join(options.layout)}"
            )
    heads = 1 if options.layout == "BHLD" else 2
    split = _split(query, key, heads, options)

    def of(axis: dict[str, int]) -> list[Placement]:
        return [Shard(axis[name]) if name in axis else Replicate() for name in split]

    def local(operand: Any, axis: dict[str, int]) -> Any:
        if not isinstance(operand, DTensor):
            return operand
        placed = of(axis)
        # What several processes read has the sum of their gradients.
        summed = [
            Partial() if name != _WHOLE and name not in axis else x for name, x in zip(split, placed, strict=True)
        ]
        return operand.redistribute(mesh, placed).to_local(grad_placements=summed)

    rows = {_BATCH: 0, _HEADS: heads}
    shape = () if attn_mask is None else attn_mask.shape
    broadcast = {_BATCH: len(shape) - 4, _HEADS: len(shape) - 3}
    of_mask = {name: axis for name, axis in broadcast.items() if axis >= 0 and shape[axis] > 1}
    here = (
        *(local(operand, rows) for operand in (query, key, value)),
        local(attn_mask, of_mask),
        local(key_lengths, {_BATCH: 0}),
    )

    def whole(found: Any) -> Any:
        if options.return_lse:
            out, lse = found
            return _joined(out, mesh, of(rows)), _joined(lse, mesh, of({_BATCH: 0, _HEADS: 1}))
        return _joined(found, mesh, of(rows))

    # Slopes are (Hq,), or (B, Hq).
    of_each = {_HEADS: 0} if alibi_slopes is None or alibi_slopes.dim() == 1 else {_BATCH: 0, _HEADS: 1}
    return (*here, seed, backend, policy, *given), local(alibi_slopes, of_each), whole


def everywhere(tensor: Any, mesh: Any) -> Any:
    """A DTensor of which every process has all: what is given of each head beside others."""
    return _joined(tensor, mesh, [Replicate()] * mesh.ndim)


def _joined(part: Any, mesh: Any, placed: list[Placement]) -> Any:
    return DTensor.from_local(part, mesh, placed, run_check=False)


def _mesh(operands: dict[str, Any]) -> Any:
    """The mesh that all operands are on."""
    known = {role: x for role, x in operands.items() if x is not None}
    meshes = [x.device_mesh for x in known.values() if isinstance(x, DTensor)]
    for role, x in known.items():
        if not isinstance(x, DTensor):
            tensor = role if hasattr(x, "is_cuda") else f"torch.tensor({role})"
            raise InvalidProblem(f"{role} is no DTensor, and others are: pass distribute_tensor({tensor}, mesh)")
        if x.device_mesh != meshes[0]:
            raise InvalidProblem(f"{role} is on {x.device_mesh}, and others are on {meshes[0]}: redistribute it")
    return meshes[0]


def _split(query: Any, key: Any, heads: int, options: Options) -> list[str]:
    """What each axis of the mesh divides. Dropout is a function of the whole's positions, and divides nothing."""
    left = {_BATCH: [query.shape[0]], _HEADS: [query.shape[heads], key.shape[heads]]}
    axes, split = {0: _BATCH, heads: _HEADS}, []
    for at, placement in enumerate(query.placements):
        size = query.device_mesh.size(at)
        name = axes.get(placement.dim, _WHOLE) if type(placement) is Shard and not options.dropout_p else _WHOLE
        if name != _WHOLE and any(length % size for length in left[name]):
            name = _WHOLE
        if name != _WHOLE:
            left[name] = [length // size for length in left[name]]
        split.append(name)
    return split
