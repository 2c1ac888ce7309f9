"""``scaled_dot_product_attention`` as torch has it: operands of any rank that broadcast, autocast, nested tensors.

What ``attention`` takes as it is goes there at once. It is written to be traced by torch.compile.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from attnswitch import arrays
from attnswitch.arrays import Array
from attnswitch.call.entry import call
from attnswitch.errors import InvalidProblem
from attnswitch.planning.policy import Policy

__all__ = ["as_autocast", "scaled_dot_product_attention"]

#: The backend and the policy that a call names.
_Way = tuple[str | None, Policy | str | None]


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None = None,
    policy: Policy | str | None = None,
    function: Callable[..., Any] | None = None,
) -> Any:
    """What torch's function of that name returns. Raises what ``attention`` raises.

    ``function`` is what the program called, for tensors and modes that look at functions of torch's.
    """
    way = backend, policy
    said = dropout_p, is_causal, scale, enable_gqa
    if function is not None and _is_stand_in(query):
        import torch

        return _handed_over(torch, function, (query, key, value), attn_mask, *said)
    if _is_tensor(query):
        import torch

        if function is not None and _is_looked_at(torch, query, key, value, attn_mask):
            return _handed_over(torch, function, (query, key, value), attn_mask, *said)
        query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
        if query.is_nested:
            from attnswitch.call import nested

            return nested.attention(scaled_dot_product_attention, query, key, value, attn_mask, *said, *way)
        if type(attn_mask).__name__ == "CausalBias":
            if is_causal:
                raise InvalidProblem("is_causal=True beside a CausalBias, which is causal itself: pass one of the two")
            alignment = _alignment(query, key, attn_mask)
            return _of_any_rank(query, key, value, None, way, (dropout_p, True, scale), enable_gqa, alignment)
    numbers = dropout_p, is_causal, scale
    if _fits(query, key, value, attn_mask, enable_gqa):
        return _attention(query, key, value, attn_mask, way, *numbers, enable_gqa)
    return _of_any_rank(query, key, value, attn_mask, way, numbers, enable_gqa)


def _is_tensor(array: Any) -> bool:
    """Whether it is torch's, asked without ``sys.modules``, of which torch.compile would make guards."""
    if not hasattr(type(array), "is_cuda"):  # of the type: modes look at what is asked of a tensor
        return False
    import torch  # which is there by now

    return isinstance(array, torch.Tensor)


def _is_stand_in(array: Any) -> bool:
    """Whether it is no tensor, and answers torch's functions as one: a proxy of a symbolic trace."""
    return hasattr(type(array), "__torch_function__") and not hasattr(type(array), "is_cuda")


def _is_looked_at(torch: Any, query: Any, *others: Any) -> bool:
    """Whether a ``__torch_function__`` wants to see the call, of no kind of torch's own that is known here."""
    if not torch.overrides.has_torch_function((query, *others)) or torch.compiler.is_dynamo_compiling():
        return False
    with torch._C.DisableTorchFunction():
        return not query.is_nested and not any(map(arrays.is_unlike, (query, *others)))


def _handed_over(
    torch: Any,
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """The call as whoever looks at it answers it, which is told no more than the program said."""
    said = {} if attn_mask is None else {"attn_mask": attn_mask}
    numbers = ("dropout_p", dropout_p, 0.0), ("is_causal", is_causal, False), ("enable_gqa", enable_gqa, False)
    said |= {name: given for name, given, usual in (*numbers, ("scale", scale, None)) if given != usual}
    return torch.overrides.handle_torch_function(function, (*operands, attn_mask), *operands, **said)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    way: _Way,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool | None,
    alignment: str = "top_left",
) -> Any:
    numbers = dropout_p, is_causal, scale, enable_gqa
    rest = alignment, None, 0.0, False, "BHLD", False
    return call(query, key, value, attn_mask, None, None, *way, *numbers, *rest)


def _fits(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> bool:
    """Whether ``attention`` takes such shapes, or says what is wrong with them."""
    try:
        q, k, v = query.shape, key.shape, value.shape
        if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1]):
            return False
        if attn_mask is not None and len(attn_mask.shape) == 0:
            return False
        return q[1] > 0 and q[3] > 0 and v[3] > 0 and k[1] > 0 and (q[1] == k[1] or enable_gqa)
    except (AttributeError, RuntimeError, TypeError):  # no array, or one without a shape, which ``attention`` tells
        return True


def as_autocast(query: Any, *others: Any) -> tuple[Any, ...]:
    """Torch's query and what stands beside it, as autocast hands them to operators of its lower type."""
    import torch

    if not (torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):
        return query, *others
    device = query.device
    try:
        if not torch.is_autocast_enabled(device.type):
            return query, *others
    except RuntimeError:  # a device that has none: meta
        return query, *others
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(_cast(torch, x, device, dtype) for x in (query, *others))


def _cast(torch: Any, tensor: Any, device: Any, dtype: Any) -> Any:
    if (
        not isinstance(tensor, torch.Tensor)
        or not tensor.is_floating_point()
        or tensor.device.type != device.type
        or tensor.dtype is torch.float64
    ):
        return tensor
    return tensor.to(dtype)


# -- other ranks, and axes that broadcast ------------------------------------------------------------------------------


def _of_any_rank(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    way: _Way,
    numbers: tuple[float, bool, float | None],
    enable_gqa: bool,
    alignment: str = "top_left",
) -> Any:
    """Leading axes broadcast, and become batch and heads."""
    for role, operand in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if operand is not None:
            _check_reshapes(operand, role)
        if role != "attn_mask" and len(operand.shape) < 2:
            raise InvalidProblem(f"{role} has shape {tuple(operand.shape)}: expected at least two axes, (..., L, D)")
    if 0 in (*value.shape, query.shape[-2]):
        return _zeros(query, key, value, tuple(query.shape[:-1]))
    if enable_gqa:
        key, value = _heads_of_groups(query, key, value)
    leading = _broadcast([tuple(x.shape[:-2]) for x in (query, key, value)], grouped=enable_gqa)
    shared = (*leading[:-1], key.shape[-3]) if enable_gqa else leading
    length, columns = query.shape[-2], value.shape[-1]
    if 0 in leading:
        return _zeros(query, key, value, (*leading, length))
    if query.shape[-1] == key.shape[-1] == 0:  # every score is 0
        query, key = query.sum(-1)[..., None], key.sum(-1)[..., None]
        numbers = (*numbers[:2], 1.0)
    # One axis is heads, and all before it are batch.
    batch, heads = (math.prod(leading[:-1]), leading[-1]) if leading else (1, 1)
    q = _expanded(query, leading).reshape(batch, heads, *query.shape[-2:])
    k, v = (_expanded(x, shared).reshape(batch, shared[-1] if shared else 1, *x.shape[-2:]) for x in (key, value))
    mask = attn_mask
    if mask is not None and len(leading) == 1 and len(mask.shape) == 4 and mask.shape[0] == 1:
        mask = mask[0]  # torch sees a batch of one in three axes
    if mask is not None and len(mask.shape) == 0:
        mask = mask.reshape(1)
    elif mask is not None and len(mask.shape) > 2 and (len(leading) != 2 or len(mask.shape) > 4):
        mask = _expanded(mask, leading, "attn_mask").reshape(batch, heads, *mask.shape[-2:])
    out = _attention(q, k, v, mask, way, *numbers, True if enable_gqa else None, alignment)
    return out.reshape(*leading, length, columns)


def _heads_of_groups(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Key and value with as many heads: torch takes any two numbers that divide the query's."""
    if min(len(x.shape) for x in (query, key, value)) < 3:
        raise InvalidProblem("enable_gqa=True: expected query, key and value with an axis of heads, (..., H, L, D)")
    heads, of_key, of_value = (x.shape[-3] for x in (query, key, value))
    if not of_key or not of_value or heads % of_key or heads % of_value:
        raise InvalidProblem(f"{heads} query heads: the {of_key} of key and {of_value} of value must each divide them")
    if of_key == of_value:
        return key, value
    fewer, every = min(of_key, of_value), max(of_key, of_value)
    every = heads if every % fewer else every  # both divide heads
    return _repeated(key, every // of_key), _repeated(value, every // of_value)


def _repeated(array: Any, times: int) -> Any:
    """Each head so many times, one after the other."""
    heads = array.shape[-3]
    wide = _expanded(array[..., :, None, :, :], (*array.shape[:-2], times))
    return wide.reshape(*array.shape[:-3], heads * times, *array.shape[-2:])


def _broadcast(shapes: list[tuple[Any, ...]], *, grouped: bool) -> tuple[Any, ...]:
    """The leading axes of the result; with ``grouped`` heads are those of the query, the first of ``shapes``."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for axis, sizes in enumerate(zip(*padded, strict=True)):
        if grouped and axis == rank - 1:
            result.append(sizes[0])
            continue
        size = ([n for n in sizes if n != 1] or [1])[0]  # a list: torch.compile of 2.8 has no generators
        if any(n not in (1, size) for n in sizes):
            raise InvalidProblem(
                f"query, key and value have leading axes {shapes[0]}, {shapes[1]} and {shapes[2]}, which do not"
                " broadcast; unequal head counts need enable_gqa=True"
            )
        result.append(size)
    return tuple(result)


def _check_reshapes(operand: Any, role: str) -> None:
    """Raises ``InvalidProblem`` for what is no array, is gone, or cannot be given other axes."""
    if _is_tensor(operand):
        if str(operand.layout) != "torch.strided" or operand.is_nested:
            arrays.check_dense(operand, role)
        return
    library = arrays.library_of(operand)
    if not library:
        arrays.facts(operand, role)  # tells what is expected instead
    if library == "dlpack":
        arrays.check_alive(operand, role)
    if not hasattr(operand, "shape") or not hasattr(operand, "reshape"):
        raise InvalidProblem(
            f"{role} is a {type(operand).__name__}, which has no shape or no reshape: pass four axes of equal batch, or"
            " an array of a library that reshapes"
        )


def _expanded(array: Any, leading: tuple[Any, ...], role: str = "an operand") -> Any:
    """``array`` with these leading axes, each of its own as long or of length 1: a view."""
    shape = (*leading, *array.shape[-2:])
    if tuple(array.shape) == shape:
        return array
    try:
        return _spread(array, shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidProblem(f"{role} of shape {tuple(array.shape)} as {shape}: {error}") from None


def _spread(array: Any, shape: tuple[Any, ...]) -> Any:
    if hasattr(array, "expand"):
        return array.expand(shape)
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__().broadcast_to(array, shape)
    return sys.modules[type(array).__module__.partition(".")[0]].broadcast_to(array, shape)


def _zeros(query: Any, key: Any, value: Any, rows: tuple[Any, ...]) -> Any:
    """The result where there is nothing to weigh or nowhere to put it; it depends on all three as any other does."""
    nothing = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
    return _spread(nothing, (*rows, value.shape[-1])) + 0  # memory of its own, which a program may write to


# -- torch's own kinds of tensors --------------------------------------------------------------------------------------


def _alignment(query: Any, key: Any, bias: Any) -> str:
    """Where a causal mask begins that is not written out. A square one begins at the first query and key."""
    made, found = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if bias.variant.name != "LOWER_RIGHT" or made[0] == made[1]:
        return "top_left"
    if made != found:
        raise InvalidProblem(f"attn_mask is a CausalBias for {made} queries and keys, and there are {found}")
    return "bottom_right"
