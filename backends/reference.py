"""``reference``: the contract as NumPy in float64, one head at a time, written to be read beside the formula.

S = scale * Q K^T;  S = c tanh(S / c) if a softcap c is given;  S = S - slope * distance;  S = S + float mask
P = softmax(S) over the visible keys, and a sink whose value is 0;  O = (P * Z) V,  Z = keep / (1 - p) for dropout
dV = (P * Z)^T dO;  dP = Z * (dO V^T);  dS = P * (dP - rowsum(P * dP) + dlse)
   where lse counts keys that are not here: P = exp(S - lse), and rowsum(dO * O) in place of rowsum(P * dP)
d mask = dS;  dS = dS * (1 - tanh^2);  dQ = scale * dS K;  dK = scale * dS^T Q
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from attnswitch.machine.backend import Backend, Config, Gradients, Inputs, Kernel, Precision
from attnswitch.machine.device import Device
from attnswitch.machine.one_by_one import OneByOne
from attnswitch.problem import Problem
from attnswitch.problem.philox import keep_mask

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


#: Bytes for each score of a head at the peak: S, P, Z and what makes them.
_SCORES = 60


class ReferenceBackend(Backend):
    """The executable specification: every feature, any size that fits in memory, no speed."""

    name: ClassVar[str] = "reference"
    library: ClassVar[str] = "numpy"
    varlen: ClassVar[bool] = True
    splits: ClassVar[bool] = True  # keys in pages are gathered, and each sequence is the formula, alone
    sinks: ClassVar[bool] = True
    alibi: ClassVar[bool] = True

    def reasons(self, problem: Problem, device: Device) -> Iterator[str]:
        """Everything on the CPU, but dropout without a seed."""
        if device.kind != "cpu":
            yield f"it runs on the CPU only, and the arrays are on {device.kind}; move them with .cpu()"
        if problem.dropout and not problem.seeded:
            yield f"dropout_p={problem.dropout} without a seed: it has no generator of its own; pass seed"

    def precision(self, problem: Problem, device: Device) -> Precision:
        """float64 throughout, whatever the storage type."""
        return Precision(accumulator="float64")

    def compile(self, problem: Problem, device: Device, config: Config) -> Kernel:
        """The kernel for ``problem``; one for each sequence of its own length."""
        return OneByOne(problem, ReferenceKernel) if problem.varlen else ReferenceKernel(problem)

    def extra_bytes(self, problem: Problem, device: Device) -> int:
        """Results in float64, and the scores of one head several times over."""
        p = problem
        results = p.batch * p.heads_q * p.seq_q * p.dim_v
        if p.grads:
            results += p.batch * (p.heads_q * p.seq_q * p.dim_qk + p.heads_kv * p.seq_k * (p.dim_qk + p.dim_v))
        mask = math.prod(p.mask_shape or ()) if "m" in p.grads else 0
        return 8 * (results + mask) + p.seq_q * p.seq_k * _SCORES


@dataclass(frozen=True, slots=True)
class _Head:
    """One head's forward quantities."""

    q: Float
    k: Float
    v: Float
    tanh: Float
    visible: Bool
    p: Float
    z: Float
    lse: Float


@dataclass(frozen=True)
class ReferenceKernel(Kernel):
    """Loops over batch and heads; each head is the formula. Batch entries are numbered from ``first``."""

    problem: Problem
    first: int = 0

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output and lse."""
        p = self.problem
        out = np.zeros((p.batch, p.heads_q, p.seq_q, p.dim_v))
        lse = np.full((p.batch, p.heads_q, p.seq_q), -np.inf)
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(p.batch, p.heads_q):
                head = self._head(inputs, b, h)
                out[b, h] = _product(head.p * head.z, head.v, head.visible)
                lse[b, h] = head.lse
            return out.astype(inputs.query.dtype), lse.astype(np.float64 if p.dtype == "float64" else np.float32)

    def backward(self, inputs: Inputs, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> Gradients:
        """Gradients from the formula.

        ``lse`` and ``out`` are computed again, without their rounding, and those given are used in the rows whose lse
        is not the inputs' own to the rounding of its type: there they are of more keys. Far from 0 (-1e9 throughout a
        row) that of float32 hides other keys, and a row of a part may be taken for a whole.
        """
        p = self.problem
        dq, dk, dv = (np.zeros(array.shape) for array in inputs[:3])
        dmask = np.zeros(p.mask_shape) if "m" in p.grads and p.mask_shape else None
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(p.batch, p.heads_q):
                head = self._head(inputs, b, h)
                do, visible = grad_out[b, h].astype(np.float64), head.visible
                dp = np.where(visible, head.z * (do @ head.v.T), 0.0)
                centre = np.sum(np.where(visible, head.p * dp, 0.0), axis=-1, keepdims=True)
                if out is not None and lse is not None:
                    eps = np.finfo(np.float64 if p.dtype == "float64" else np.float32).eps
                    head, part = _of_more(head, lse[b, h].astype(np.float64), float(eps))
                    centre = np.where(part, np.sum(do * out[b, h].astype(np.float64), axis=-1, keepdims=True), centre)
                if grad_lse is not None:
                    centre -= grad_lse[b, h].astype(np.float64)[:, None]
                ds = np.where(visible, head.p * (dp - centre), 0.0)
                if dmask is not None:
                    _add_broadcast(dmask, b, h, ds)
                ds *= 1.0 - head.tanh**2
                ds = np.where(visible, ds, 0.0)
                kv = h // p.group
                dq[b, h] = p.softmax_scale * _product(ds, head.k, visible)
                dk[b, kv] += p.softmax_scale * _product(ds.T, head.q, visible.T)
                dv[b, kv] += _product((head.p * head.z).T, do, visible.T)
            wanted = [
                grad.astype(array.dtype) if letter in p.grads and grad is not None else None
                for letter, grad, array in zip("qkvm", (dq, dk, dv, dmask), inputs[:4], strict=True)
            ]
        return Gradients(*wanted)

    def _head(self, inputs: Inputs, b: int, h: int) -> _Head:
        p = self.problem
        q = inputs.query[b, h].astype(np.float64)
        k, v = (array[b, h // p.group].astype(np.float64) for array in (inputs.key, inputs.value))
        length = p.seq_k if inputs.key_lengths is None else int(inputs.key_lengths[b])
        s = p.softmax_scale * (q @ k.T)
        tanh = np.tanh(s / p.softcap) if p.softcap else np.zeros_like(s)
        if p.softcap:
            s = p.softcap * tanh
        if inputs.alibi_slopes is not None:
            slope = float(inputs.alibi_slopes[b % len(inputs.alibi_slopes), h])
            s = s - slope * np.abs(self._centre(length) - np.arange(p.seq_k))
        visible = self._visible(length)
        if inputs.attn_mask is not None:
            mask = _broadcast(inputs.attn_mask, b, h, s.shape)
            if mask.dtype == np.bool_:
                visible = visible & mask
            else:
                visible = visible & (mask != -np.inf)
                s = s + mask.astype(np.float64)
        s = np.where(visible, s, -np.inf)
        sink = -np.inf if inputs.sinks is None else float(inputs.sinks[h])
        alive = visible.any(axis=-1, keepdims=True) | (sink > -np.inf)
        top = np.where(alive, np.max(s, axis=-1, keepdims=True, initial=sink), 0.0)
        weights = np.where(visible, np.exp(s - top), 0.0)
        total = np.sum(weights, axis=-1, keepdims=True) + np.exp(sink - top)
        z = np.ones_like(s)
        if p.dropout:
            keep = keep_mask(inputs.seed or 0, p.dropout, self.first + b, h, np.arange(p.seq_q), 0, p.seq_k)
            z = np.where(keep, 1.0 / (1.0 - p.dropout), 0.0) if p.dropout < 1.0 else np.zeros_like(s)
        lse = np.where(alive, top + np.log(total), -np.inf)[:, 0]
        weights = np.where(visible, weights / np.where(alive, total, 1.0), 0.0)  # 0 / NaN must not reach what is hidden
        return _Head(q, k, v, tanh, visible, weights, z, lse)

    def _centre(self, length: int) -> Any:
        """The key that each query stands at, (Lq, 1)."""
        p = self.problem
        return np.arange(p.seq_q)[:, None] + (length - p.seq_q if p.bottom_right else 0)

    def _visible(self, length: int) -> Bool:
        """Which keys (columns) each query (row) sees: causal, window and length together."""
        p = self.problem
        j, centre = np.arange(p.seq_k)[None, :], self._centre(length)
        visible = np.broadcast_to(j < length, (p.seq_q, p.seq_k))
        if p.causal:
            visible = visible & (j <= centre)
        left, right = p.window or (None, None)
        if left is not None:
            visible = visible & (j >= centre - left)
        if right is not None:
            visible = visible & (j <= centre + right)
        return visible


def _of_more(head: _Head, lse: Float, eps: float) -> tuple[_Head, Bool]:
    """``head`` with the weights that ``lse`` gives in rows where it is of more keys; and which rows these are, (Lq, 1).

    ``eps`` is that of the lse's type. A row that sees none of the keys here has no weights, whatever its lse.
    """
    apart = np.abs(lse - head.lse) > 4 * eps * np.maximum(1.0, np.abs(lse))
    part = (apart & np.isfinite(lse) & np.isfinite(head.lse))[:, None]
    if not part.any():
        return head, part
    p = np.where(part, head.p * np.exp(head.lse - lse)[:, None], head.p)
    return replace(head, p=np.where(head.visible, p, 0.0), lse=lse), part


def _broadcast(mask: Any, b: int, h: int, shape: tuple[int, ...]) -> Any:
    """The mask of one head, (Lq, Lk)."""
    b, h = b % mask.shape[0], h % mask.shape[1]
    return np.broadcast_to(mask[b, h], shape)


def _add_broadcast(dmask: Float, b: int, h: int, ds: Float) -> None:
    """Add one head's gradient to the mask's, summing over the axes along which the mask was broadcast."""
    target = dmask[b % dmask.shape[0], h % dmask.shape[1]]
    for axis in (0, 1):
        if target.shape[axis] == 1 != ds.shape[axis]:
            ds = ds.sum(axis=axis, keepdims=True)
    target += ds


def _product(weights: Float, rows: Float, visible: Bool) -> Float:
    """``weights @ rows`` in which hidden positions do not take part, not even as 0 * NaN."""
    if np.isfinite(rows).all():
        return weights @ rows
    out = np.zeros((weights.shape[0], rows.shape[1]))
    for i in range(len(out)):
        seen = visible[i]
        out[i] = weights[i, seen] @ rows[seen]
    return out
