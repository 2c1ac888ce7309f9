"""What one rank computes of a task: its rows of the whole, through the public calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnswitch.call import recording
from attnswitch.errors import Unsupported
from attnswitch.integrations.torch_distributed import ContextParallel
from attnswitch.machine.device import Device
from attnswitch.planning.planner import make_plan
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.drawing.data import operands
from attnswitch.verify.launch import sequences
from attnswitch.verify.launch.call import Placed, place_operands
from attnswitch.verify.launch.layouts import host
from attnswitch.verify.ranks.task import Answer, Task

__all__ = ["compute"]

_LETTERS = {"query": "q", "key": "k", "value": "v"}


def compute(task: Task, group: Any, device: str) -> Answer:
    """The part of ``task`` that is this rank's, or why it is refused. Whatever else is raised is a finding."""
    case = task.case
    placed = place_operands(case, operands(case), device)
    parallel = ContextParallel(group, task.method, task.order)
    with recording.record() as seen:
        try:
            results = _called(case, placed, parallel)
        except Unsupported as refusal:
            return Answer(refused=str(refusal).splitlines()[0])
    where = Device.parse(device)
    chosen = ((problem, make_plan(problem, where).backend) for problem in seen.problems)
    wide = np.float64 if case.dtype == "float64" else np.float32  # which hold what narrower types do
    hosted = {name: host(result).astype(wide) for name, result in results.items()}
    return Answer(hosted, tuple((problem, name) for problem, name in chosen if name))


def _called(case: Case, placed: Placed, parallel: ContextParallel) -> dict[str, Any]:
    axis = 0 if case.varlen else 2 if case.layout == "BHLD" else 1
    rows = sequences.offsets(case, "query")[-1] if case.varlen else 0

    def mine(whole: Any, dim: int) -> Any:
        if case.varlen:  # rows past the last sequence hold NaN
            whole = whole.narrow(dim, 0, rows)
        return parallel.shard(whole, dim)

    leaves = {role: mine(getattr(placed, role), axis) for role in _LETTERS}
    if case.sinks:
        leaves["sinks"] = placed.sinks.detach().clone()
    wanted = [role for role, letter in _LETTERS.items() if letter in case.grads]
    wanted += ["sinks"] if case.sinks and case.grads else []
    for role in wanted:
        leaves[role].requires_grad_()
    said: dict[str, Any] = {
        "is_causal": case.causal,
        "scale": case.scale,
        "causal_alignment": case.alignment,
        "window": case.window,
        "softcap": case.softcap,
        "deterministic": case.deterministic,
        "return_lse": True,
        "sinks": leaves.get("sinks"),
        "alibi_slopes": placed.alibi_slopes,
    }
    tensors = leaves["query"], leaves["key"], leaves["value"]
    if case.varlen:
        out, lse = parallel.attention_varlen(*tensors, placed.cu_seqlens_q, length=rows, **said)
    else:
        mask = placed.attn_mask
        if "m" in case.grads and mask is not None:
            mask = mask.detach().requires_grad_()
        beside = {"attn_mask": mask, "key_lengths": placed.key_lengths, "layout": case.layout}
        out, lse = parallel.attention(*tensors, length=(case.seq_q, case.seq_k), **beside, **said)
    found = {"out": out.detach(), "lse": lse.detach()}
    if wanted:
        outputs, upstream = [out], [mine(placed.grad_out, axis)]
        if case.lse:
            outputs, upstream = [out, lse], [*upstream, mine(placed.grad_lse, 1 if case.varlen else 2)]
        grads = torch.autograd.grad(outputs, [leaves[role] for role in wanted], upstream)
        found |= {f"grad {role}": grad for role, grad in zip(wanted, grads, strict=True)}
    return {name: _turned(case, name, result) for name, result in found.items()}


def _turned(case: Case, name: str, result: Any) -> Any:
    """A result as (B, H, rows, D) or (B, H, rows); packed sequences as one batch entry."""
    if name == "grad sinks":
        return result
    if case.varlen:
        return result[None] if name == "lse" else result.swapaxes(0, 1)[None]
    return result if name == "lse" or case.layout == "BHLD" else result.swapaxes(1, 2)
