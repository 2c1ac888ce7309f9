"""``attention`` in JAX, under ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

XLA calls back to the host, where a backend of the CPU computes on NumPy arrays. Operands and results are
copied on the way there and back, also between a GPU or TPU and the host, and the device waits meanwhile. Arrays of JAX
outside of its transformations need none of this: ``attnswitch.attention`` takes them as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from attnswitch import api, arrays
from attnswitch.arrays import Facts
from attnswitch.call import headwise, per_head
from attnswitch.call import options as read
from attnswitch.call.attend import attend
from attnswitch.call.backward import gradients, results
from attnswitch.call.describe import describe, lengths_beside
from attnswitch.call.options import Options, seed_of
from attnswitch.call.per_head import PerHead
from attnswitch.errors import InvalidProblem, Unsupported
from attnswitch.planning import policy as policies
from attnswitch.planning.policy import Policy
from attnswitch.problem import DTYPES, Problem

__all__ = ["attention"]


class _Operands(NamedTuple):
    """The arrays of a call; a mask has four axes, and slopes have two."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    key_lengths: Any
    seed: Any
    sinks: Any = None
    alibi_slopes: Any = None


#: A shape and a dtype, without an array.
_like: Any = jax.ShapeDtypeStruct
#: The axes that each has in a call; further ones in front are those of ``jax.vmap``.
_RANKS = _Operands(4, 4, 4, 4, 1, 0, 1, 2)
#: Where the gradients stand that letters ask for: those of ``Problem.grads``, and s of the sinks.
_PLACES = {
    letter: _Operands._fields.index(name) for letter, name in zip("qkvms", (*arrays.ROLES, "sinks"), strict=True)
}


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call says beside its arrays, fixed when it is traced."""

    options: Options
    seed: int | None
    backend: str | None
    policy: Policy


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    attn_mask: jax.Array | None = None,
    key_lengths: jax.Array | Sequence[int] | None = None,
    seed: jax.Array | int | None = None,
    sinks: jax.Array | Sequence[float] | None = None,
    alibi_slopes: jax.Array | Sequence[float] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
    **options: Any,
) -> Any:
    """``attnswitch.attention`` for programs of JAX.

    ``jax.vmap`` adds the mapped axis to the batch. It calls one by one with sinks or slopes, and with dropout, whose
    mask counts batch entries.

    Args:
        query: (B, Hq, Lq, D), or as ``layout`` says; float16, bfloat16, float32 or float64.
        key: (B, Hkv, Lk, D), of query's dtype.
        value: (B, Hkv, Lk, Dv), of query's dtype.
        attn_mask: bool or float, broadcastable to (B, Hq, Lq, Lk).
        key_lengths: (B,) integers. Traced ones are checked when they have values.
        seed: an integer, or an integer array without axes, which may be traced; dropout needs one.
        sinks: (Hq,) of any float dtype.
        alibi_slopes: (Hq,) or (B, Hq) of any float dtype. No gradient: one that is asked for is refused.
        backend: as for ``attnswitch.attention``, one that runs on the CPU.
        policy: as for ``attnswitch.attention``; that of ``using`` counts if it holds during the trace.
        **options: the other keywords of ``attnswitch.attention``, none of them traced.

    Returns:
        The output (B, Hq, Lq, Dv), or (output, lse). It has gradients for query, key, value, a float attn_mask and
        sinks. Its second derivatives are refused, and forward mode by JAX itself.

    Raises:
        InvalidProblem, Unsupported, BackendUnavailable: as ``attnswitch.attention``, and during the trace. What depends
            on values (lengths, a traced seed, NaN with a backend that refuses it) is JAX's error, with the sentence
            inside.
    """
    for name, option in options.items():
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(option)):
            raise InvalidProblem(
                f"{name} is traced by JAX: expected a plain value (jit's static_argnames makes it one)"
            )
    said = read.of_keywords(options, "attnswitch.integrations.jax.attention: there is", attention)
    if said.dropout_p and seed is None:
        raise InvalidProblem("dropout under JAX needs a seed, as a function of JAX has no state to draw one from")
    drawn = _checked_seed(seed) if isinstance(seed, jax.Array) else None
    call = _Call(said, None if drawn is not None else seed_of(seed), backend, policies.effective(policy))
    facts = [_facts(query, "query"), _facts(key, "key"), _facts(value, "value")]
    mask = None if attn_mask is None else _facts(attn_mask, "attn_mask")
    problem = describe((*facts, mask), said, lengths=key_lengths is not None, seeded=seed is not None)
    if attn_mask is not None:  # all four axes, so that those of vmap can be told from them
        attn_mask = jnp.reshape(attn_mask, (1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    if isinstance(key_lengths, Sequence) and any(isinstance(x, jax.core.Tracer) for x in key_lengths):
        key_lengths = jnp.stack(key_lengths)
    lengths = None if key_lengths is None else _lengths(key_lengths, facts[0], problem)
    heads = _per_head(PerHead(sinks, alibi_slopes), facts[0], problem)
    out, lse = _attend(call, _Operands(query, key, value, attn_mask, lengths, drawn, *heads))
    return (out, lse) if said.return_lse else out


# -- what is known during the trace ------------------------------------------------------------------------------------


def _facts(array: Any, role: str) -> Facts:
    """Of an array that XLA will hand over dense."""
    if not isinstance(array, jax.Array) and type(array).__name__ != "TypedNdArray":  # NumPy's, as jax.grad passes it
        raise InvalidProblem(f"{role} is no array of JAX but {type(array).__name__}: jax.numpy.asarray makes it one")
    if not isinstance(array, jax.core.Tracer):
        arrays.check_alive(array, role)
    shape, size = array.shape, getattr(array.dtype, "itemsize", 0)
    strides = tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Facts("jax", ("cpu", 0), str(array.dtype), shape, strides, 0)


def _checked_seed(seed: jax.Array) -> jax.Array:
    if _facts(seed, "seed").shape or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise InvalidProblem(
            f"seed is {seed.dtype}{list(seed.shape)}: expected an integer without axes, such as"
            ' jax.random.bits(key, (), "uint32")'
        )
    return seed


def _lengths(lengths: Any, query: Facts, problem: Problem) -> Any:
    """``key_lengths`` as an array; checked against 0..Lk where their values are known."""
    if isinstance(lengths, jax.core.Tracer):
        facts = _facts(lengths, "key_lengths")
        if facts.shape != (problem.batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise InvalidProblem(
                f"key_lengths is {facts.dtype}{list(facts.shape)}: expected integers ({problem.batch},),"
                " one length for each batch entry"
            )
        return lengths
    if isinstance(lengths, jax.Array):
        arrays.check_alive(lengths, "key_lengths")
        lengths = np.asarray(lengths)
    return lengths_beside(lengths, query._replace(library="numpy"), problem.seq_k).astype(np.int32)


def _per_head(said: PerHead, query: Facts, problem: Problem) -> PerHead:
    """Sinks and slopes as arrays, these with two axes; checked as far as their values are known."""
    found: dict[str, Any] = {}
    for role, given in said._asdict().items():
        if given is None:
            continue
        if isinstance(given, jax.core.Tracer):
            if (dtype := _facts(given, role).dtype) not in DTYPES:
                raise InvalidProblem(f"{role} has dtype {dtype}: expected one of {', '.join(DTYPES)}")
            found[role] = given
        else:
            if isinstance(given, jax.Array):
                arrays.check_alive(given, role)
                given = np.asarray(given)
            host = query._replace(library="numpy")
            per_head.read(PerHead(**{role: given}), host, problem.heads_q, problem.batch, autograd=False)
            found[role] = jnp.asarray(given)
    if "sinks" in found:
        per_head.check_sinks(found["sinks"].shape, problem.heads_q)
    if "alibi_slopes" in found:
        slopes = found["alibi_slopes"]
        per_head.check_slopes(slopes.shape, problem.heads_q, problem.batch)
        found["alibi_slopes"] = slopes.reshape(-1, problem.heads_q)
    return PerHead(**found)


def _planned(call: _Call, operands: _Operands, wanted: str) -> Problem:
    """The problem of such a call, for which there is a backend. Raises what ``attnswitch.plan`` raises."""
    facts = [None if x is None else _facts(x, role) for x, role in zip(operands[:4], arrays.ROLES, strict=True)]
    lengths, seeded = operands.key_lengths is not None, operands.seed is not None or call.seed is not None
    problem = describe(facts, call.options, lengths=lengths, seeded=seeded, grads=wanted)
    sinks, alibi = operands.sinks is not None, operands.alibi_slopes is not None
    if sinks or alibi:
        problem = problem.replace(sinks=sinks, alibi=alibi, alignment=call.options.causal_alignment)
    api.plan(problem, backend=call.backend, policy=call.policy)
    return problem


# -- what JAX differentiates -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, operands: _Operands) -> tuple[Any, Any]:
    """Output, and lse if the call asks for it."""
    out, lse = _results(call, operands, "")
    return out, lse if call.options.return_lse else None


def _attend_forward(call: _Call, operands: Any) -> tuple[Any, Any]:
    masked = operands.attn_mask is not None and operands.attn_mask.perturbed
    wanted = "qkvm" if masked else "qkv"
    if operands.alibi_slopes is not None and operands.alibi_slopes.perturbed:
        raise InvalidProblem(
            "alibi_slopes is differentiated, and its gradient would be lost: pass -slope * distance as a float"
            " attn_mask, which gets one, or jax.lax.stop_gradient(alibi_slopes)"
        )
    known = _Operands(*(None if x is None else x.value for x in operands))
    out, lse = _results(call, known, wanted)
    wanted += "s" * (operands.sinks is not None and operands.sinks.perturbed)
    # What is wanted is no array: it is in the structure.
    return (out, lse if call.options.return_lse else None), (known, out, lse, {wanted: None})


def _attend_backward(call: _Call, saved: Any, upstream: Any) -> tuple[Any]:
    known, out, lse, structure = saved
    (wanted,) = structure
    grad_out, grad_lse = (None if x is None or isinstance(x, SymbolicZero) else x for x in upstream)
    if grad_out is None:
        grad_out = jnp.zeros_like(out)
    places = [_PLACES[letter] for letter in wanted]
    like = tuple(_like(known[place].shape, known[place].dtype) for place in places)
    found = dict(
        zip(places, _called(_Backward(call, wanted), like, (known, out, lse, grad_out, grad_lse)), strict=True)
    )
    return (_Operands(*(found.get(place) for place in range(len(known)))),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _results(call: _Call, operands: _Operands, wanted: str) -> tuple[Any, Any]:
    """Output and lse; the lse is None where neither the call nor a backward, of what is ``wanted``, asks for it."""
    p = _planned(call, operands, wanted)
    lse = None
    if wanted or p.lse:
        lse = _like((p.batch, p.heads_q, p.seq_q), jnp.promote_types(p.dtype, jnp.float32))
    out = _like((*operands.query.shape[:-1], p.dim_v), operands.query.dtype)
    found: tuple[Any, Any] = _called(_Forward(call, wanted), (out, lse), (operands,))
    return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _called(function: _Forward | _Backward, like: Any, given: tuple[Any, ...]) -> Any:
    # A dropout mask counts batch entries: added to the batch, they would have others. Sinks are one for all of a batch.
    apart = function.call.options.dropout_p or _if_any(given[0].sinks, given[0].alibi_slopes) is not None
    method = "sequential" if apart else "expand_dims"
    return jax.pure_callback(function, like, *given, vmap_method=method)


@_called.defjvp
def _no_more(*_: Any) -> Any:
    """The derivative of a forward, or of a backward, that JAX differentiates already."""
    raise Unsupported(
        "second derivatives: attnswitch.integrations.jax gives first ones only; jax.nn.dot_product_attention has both"
    )


# -- on the host -------------------------------------------------------------------------------------------------------
# JAX compiles equal callbacks once. Here all is NumPy's: JAX within a callback can wait for itself forever.


@dataclass(frozen=True, slots=True)
class _Forward:
    """Output, and lse if it is asked for; ``wanted`` are the gradients that a backward will be asked for."""

    call: _Call
    wanted: str

    def __call__(self, operands: _Operands) -> list[Any]:
        call, leading = self.call, _leading(zip(operands, _RANKS, strict=True))
        query, key, value, mask, lengths, seed, *heads = _folded(operands, leading)
        how = lengths, call.seed if seed is None else seed_of(seed), call.options, call.backend, call.policy
        given = (query, key, value) if mask is None else (query, key, value, mask)
        found: Sequence[Any]
        beside = _if_any(*heads)
        if beside is not None and self.wanted:
            found = headwise.results(given, *how, self.wanted, beside)
        elif beside is not None:
            found = headwise.attend_by(query, key, value, mask, *how, beside)
            found = found if call.options.return_lse else (found,)
        elif self.wanted:
            found = results(given, *how, self.wanted)
        else:
            found = attend(query, key, value, mask, *how)[: 2 if call.options.return_lse else 1]
        return [_unfolded(x, operands, leading) for x in found]


@dataclass(frozen=True, slots=True)
class _Backward:
    """Gradients of the operands that are ``wanted``."""

    call: _Call
    wanted: str

    def __call__(self, operands: _Operands, out: Any, lse: Any, grad_out: Any, grad_lse: Any) -> list[Any]:
        call, rest = self.call, ((out, 4), (lse, 3), (grad_out, 4), (grad_lse, 3))
        leading = _leading((*zip(operands, _RANKS, strict=True), *rest))
        query, key, value, mask, lengths, seed, *heads = _folded(operands, leading)
        out, lse, grad_out, grad_lse = (_fold(x, rank, leading) for x, rank in rest)
        given = (query, key, value) if mask is None else (query, key, value, mask)
        how = lengths, call.seed if seed is None else seed_of(seed), call.options, call.backend, call.policy
        wanted = self.wanted.removesuffix("s")
        known: dict[str, Any] = {"out": out, "lse": lse, "grad_lse": grad_lse, "wanted": wanted}
        found: Any
        if (beside := _if_any(*heads)) is None:
            found = gradients(grad_out, given, *how, **known)
        else:
            of_sinks = wanted != self.wanted
            found = headwise.gradients(grad_out, given, *how, **known, heads=beside, sinks_grad=of_sinks)
        grads = [_unfolded(x, operands, leading) for x in found[: len(wanted)]]
        if "m" in self.wanted and operands.attn_mask.shape[-4] != grads[3].shape[-4]:
            wide = np.promote_types(grads[3].dtype, np.float32)
            grads[3] = grads[3].sum(axis=-4, keepdims=True, dtype=wide).astype(grads[3].dtype)
        return grads if wanted == self.wanted else [*grads, found.sinks]


def _if_any(sinks: Any, slopes: Any) -> PerHead | None:
    """As a call takes them, if it has any: one row of slopes is for all batch entries."""
    if sinks is None and slopes is None:
        return None
    return PerHead(sinks, slopes[0] if slopes is not None and len(slopes) == 1 else slopes)


def _leading(given: Iterable[tuple[Any, int]]) -> tuple[int, ...]:
    """The axes that ``jax.vmap`` put in front of those that each array has in a call: 1 where it is not mapped."""
    return np.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in given if x is not None))


def _folded(operands: _Operands, leading: tuple[int, ...]) -> list[Any]:
    """The operands of one call whose batch is the mapped axes with the batch."""
    mask = operands.attn_mask
    if leading and mask is not None:  # one for all stays so in memory
        mask = np.broadcast_to(mask, (*mask.shape[:-4], operands.query.shape[-4], *mask.shape[-3:]))
    return [_fold(x, rank, leading) for x, rank in zip(operands._replace(attn_mask=mask), _RANKS, strict=True)]


def _fold(array: Any, rank: int, leading: tuple[int, ...]) -> Any:
    if array is None:
        return None
    if not leading:
        return np.asarray(array)
    batch, *rest = array.shape[array.ndim - rank :]
    return np.broadcast_to(array, (*leading, batch, *rest)).reshape(math.prod(leading) * batch, *rest)


def _unfolded(array: Any, operands: _Operands, leading: tuple[int, ...]) -> Any:
    return array.reshape(*leading, operands.query.shape[-4], *array.shape[1:]) if leading else array
