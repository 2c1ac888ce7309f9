"""Arrays of any library as facts, and their passage between libraries without a copy.

No array library is imported here: an array of a library can only exist once that library is in ``sys.modules``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnswitch.errors import InvalidProblem
from attnswitch.problem import CACHES, CONTIGUOUS, Memory
from attnswitch.transformed import is_wrapped

__all__ = [
    *("Array", "Facts", "Intercepted", "ROLES", "address", "cast", "check_alive", "check_dense"),
    *("dispatches", "facts", "is_unlike", "library_of", "numbers_as_array", "outline", "passage", "take", "take_all"),
]

#: The operands of a call, in their order.
ROLES = ("query", "key", "value", "attn_mask")

#: An array of some library. Only this module and the backends look inside.
Array = Any


class Facts(NamedTuple):
    """What is known of an array without reading its elements. Equal facts make equal problems.

    ``strides`` are bytes, ``offset`` is the address modulo 16, ``grad`` whether torch is asked for its gradient.
    """

    library: str
    device: tuple[str, int]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    grad: bool = False

    @property
    def by_dlpack(self) -> bool:
        """Whether the caller's library is known by DLPack alone."""
        return self.library not in ("numpy", "cupy", "torch")

    @property
    def taken_as(self) -> str:
        """The library whose array ``take`` gives."""
        return "torch" if self.by_dlpack else self.library

    @property
    def memory(self) -> Memory:
        """How it lies in memory, with what has no effect (strides of axes of length 1) left out."""
        shape, strides, bits = self.shape, self.strides, self.offset
        if len(strides) == 4:  # as most arrays lie, seen at a glance
            b, h, length, unit = strides
            if (
                not (bits | b | h | length) & 15
                and b > 0
                and h > 0
                and length > 0
                and unit == _ITEMSIZE.get(self.dtype)
            ):
                return CONTIGUOUS
        expanded = negative = False
        wide = bool(shape) and shape[-1] > 1
        unit = wide and strides[-1] == _ITEMSIZE.get(self.dtype)
        for size, stride in zip(shape[:-1] if unit else shape, strides, strict=False):
            if size > 1:
                bits |= stride
                expanded |= stride == 0
                negative |= stride < 0
        if unit and not bits & 15 and not expanded and not negative:
            return CONTIGUOUS
        return Memory(min(16, bits & -bits) if bits else 16, wide and not unit, expanded, negative)


_ITEMSIZE = {**dict.fromkeys(("bool", *CACHES), 1), "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
#: What carries the bits of types that NumPy and torch do not know of each other.
_CARRIED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def library_of(array: Array) -> str:
    """``"numpy"``, ``"torch"``, ``"cupy"``, ``"dlpack"`` for any other library that speaks it, or ``""``."""
    if (torch := sys.modules.get("torch")) and isinstance(array, torch.Tensor):
        return "torch"
    if (numpy := sys.modules.get("numpy")) and isinstance(array, numpy.ndarray):
        return "numpy"
    if (cupy := sys.modules.get("cupy")) and isinstance(array, cupy.ndarray):
        return "cupy"
    return "dlpack" if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") else ""


def take(array: Array, role: str) -> tuple[Array, Facts]:
    """``array``, whose part in the call is ``role``, with its facts.

    An array of a library that is known by DLPack alone is taken as a torch tensor over the same memory: torch has every
    dtype and device. Its facts still name the library. Raises ``InvalidProblem`` for what is not a dense array.
    """
    reader = _READERS.get(type(array))
    if reader is not None:
        return array, reader(array, role)
    library = library_of(array)
    if library == "dlpack":
        check_alive(array, role)
        tensor = passage(array, "dlpack", "torch")
        name = type(array).__module__.partition(".")[0].replace("jaxlib", "jax")
        return tensor, _torch_facts(tensor, role)._replace(library=name)
    return array, facts(array, role)


def take_all(operands: Sequence[Array]) -> tuple[Sequence[Array], tuple[Facts, ...]]:
    """``take`` of query, key, value and maybe attn_mask: the arrays, and the facts."""
    try:
        return operands, tuple([_READERS[type(array)](array, role) for array, role in zip(operands, ROLES)])  # noqa: B905
    except KeyError:  # a type that is met seldom, or for the first time
        arrays, facts = zip(*(take(array, role) for array, role in zip(operands, ROLES)), strict=True)  # noqa: B905
        return arrays, facts


#: What reads the facts of arrays of a type, for the types that are met most.
_READERS: dict[type, Callable[[Array, str], Facts]] = {}


def facts(array: Array, role: str) -> Facts:
    """Facts of an array of NumPy, CuPy or torch. Raises ``InvalidProblem`` for what is not a dense array."""
    library = library_of(array)
    if library == "torch":
        return _torch_facts(array, role)
    if library == "numpy":
        return _numpy_facts(array, role)
    if library == "cupy":
        where = "cuda", array.device.id
        return Facts(library, where, array.dtype.name, array.shape, array.strides, array.data.ptr % 16)
    raise InvalidProblem(
        f"{role} is a {type(array).__name__}: expected an array of NumPy, CuPy, torch, or another library with"
        " DLPack, holding numbers (a list becomes one by numpy.asarray; for a tracer of jax.jit or jax.grad there is"
        " attnswitch.integrations.jax.attention)"
    )


def check_alive(array: Array, role: str) -> None:
    """Raises ``InvalidProblem`` for an array of JAX whose memory was given away or deleted."""
    deleted = getattr(array, "is_deleted", None)
    if deleted is not None and deleted():
        raise InvalidProblem(
            f"{role} has been deleted, or donated to another call: pass an array that still has memory"
        )


def address(array: Array) -> int:
    """Where the first element of an array of NumPy, CuPy or torch is."""
    library = library_of(array)
    if library == "torch":
        return int(array.data_ptr())
    return int(array.data.ptr if library == "cupy" else array.__array_interface__["data"][0])


class Intercepted(Exception):
    """torch stands between a call and the memory of its tensors: a mode, a function transform, a tensor without any."""


#: Tensors of torch whose meaning is not in their elements.
_UNLIKE = {
    "CausalBias": "whose elements are never written: pass is_causal=True, with causal_alignment for lower right",
    "MaskedTensor": "whose mask would be lost: pass attn_mask or key_lengths",
    "UninitializedParameter": "which has no shape yet: run its module once",
    "UninitializedBuffer": "which has no shape yet: run its module once",
}


@functools.cache
def _torch_reader() -> Callable[[Array, str], Facts]:
    """What reads the facts of dense tensors of torch: every call reads three or four."""
    torch: Any = sys.modules["torch"]
    forward_ad, grad_enabled = torch.autograd.forward_ad, torch.is_grad_enabled

    def read(tensor: Array, role: str) -> Facts:
        try:
            start = tensor.data_ptr()
            kind, item = _KINDS[tensor.dtype]
            strides = tuple([stride * item for stride in tensor.stride()])
            grad = tensor.requires_grad and grad_enabled()
            # As a tuple: the class's own ``__new__`` takes longer than the rest of it.
            whole = "torch", _PLACES[tensor.device], kind, tuple(tensor.shape), strides, start & 15, grad
        except RuntimeError:  # nested, sparse, or wrapped: no sizes, or no memory
            _check_torch(tensor, role)
            raise
        if not start or forward_ad._current_level >= 0 or tensor.is_quantized:
            _check_torch(tensor, role)
            if not start and tensor.numel():
                raise InvalidProblem(f"{role} has no memory any more: something freed its storage")
        return tuple.__new__(Facts, whole)

    return read


def _check_torch(tensor: Array, role: str) -> None:
    """Raises ``InvalidProblem`` for what is not dense, ``Intercepted`` for what stands for other tensors."""
    check_dense(tensor, role)
    if tensor.is_meta or is_wrapped(tensor):
        raise Intercepted


def _torch_facts(tensor: Array, role: str) -> Facts:
    """Facts of a tensor of a type that is met seldom, or for the first time."""
    torch: Any = sys.modules["torch"]
    kind, read = type(tensor), _torch_reader()
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        _READERS[kind] = read
    else:
        _check_subclass(tensor, role)
    return read(tensor, role)


def check_dense(tensor: Array, role: str) -> None:
    """Raises ``InvalidProblem`` for what is no dense tensor of torch, where only torch can read the operands."""
    if library_of(tensor) != "torch":
        raise InvalidProblem(
            f"{role} is a {type(tensor).__name__} beside tensors that only torch can read (of a mode, on the meta"
            " device, of a subclass): pass all of torch"
        )
    if tensor.is_quantized:
        raise InvalidProblem(f"{role} is a quantized tensor: attention takes floating point; call .dequantize() first")
    if tensor.is_nested:
        raise InvalidProblem(
            f"{role} is a nested tensor: pass dense ones, or packed sequences to attention_varlen;"
            " scaled_dot_product_attention takes nested ones"
        )
    if tensor.layout is not sys.modules["torch"].strided:
        raise InvalidProblem(
            f"{role} is a {tensor.layout} tensor: attention takes dense tensors; call .to_dense() first"
        )


def outline(tensor: Array) -> Facts:
    """Facts of a torch tensor of which no address can be asked; it counts as aligned."""
    torch: Any = sys.modules["torch"]
    kind, item = _KINDS[tensor.dtype]
    strides = tuple([stride * item for stride in tensor.stride()])
    grad = tensor.requires_grad and torch.is_grad_enabled()
    return Facts("torch", _PLACES[tensor.device], kind, tuple(tensor.shape), strides, 0, grad)


class _Known(dict[Any, Any]):
    """What each key stands for, worked out when it is first asked for."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, self.read(key))


_PLACES = _Known(lambda device: (device.type, device.index or 0))
#: Name and bytes of an element.
_KINDS = _Known(lambda dtype: (str(dtype).removeprefix("torch."), dtype.itemsize))


def _check_subclass(tensor: Array, role: str) -> None:
    if is_unlike(tensor):
        name = type(tensor).__name__
        raise InvalidProblem(f"{role} is a {name}, {_UNLIKE[name]}")
    if dispatches(type(tensor)):
        raise Intercepted


def is_unlike(tensor: Array) -> bool:
    """Whether it is a tensor of torch whose meaning is not in its elements."""
    return type(tensor).__name__ in _UNLIKE and type(tensor).__module__.startswith("torch.")


def dispatches(kind: type) -> bool:
    """Whether tensors of this subclass of torch's look at what is done to them."""
    torch: Any = sys.modules["torch"]
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def _numpy_facts(array: Array, role: str) -> Facts:
    numpy: Any = sys.modules["numpy"]
    if isinstance(array, numpy.ma.MaskedArray):
        raise InvalidProblem(f"{role} is a NumPy masked array, whose mask would be lost: pass attn_mask or key_lengths")
    if not array.dtype.isnative:
        raise InvalidProblem(
            f"{role} has the byte order of another machine ({array.dtype.str}): call"
            f" {role}.astype({role}.dtype.newbyteorder('='))"
        )
    return Facts(
        "numpy", ("cpu", 0), array.dtype.name, array.shape, array.strides, array.__array_interface__["data"][0] % 16
    )


def passage(array: Array, source: str, target: str, like: Array = None) -> Array:
    """``array`` of library ``source`` as an array of library ``target`` over the same memory.

    ``like`` is an array of ``target`` and is needed where that is "dlpack": its namespace makes the result.
    """
    if source == target:
        return array
    change: Callable[[Array, Array], Array] = _PASSAGES[source, target]
    return change(array, like)


def _numpy_to_torch(array: Array, _: Array) -> Array:
    numpy: Any = importlib.import_module("numpy")
    torch: Any = importlib.import_module("torch")
    kind = array.dtype.name
    array = array.view(_CARRIED.get(kind, array.dtype))
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        # On axes of length 1 such strides mean nothing, and elsewhere the backend has refused them; torch takes none.
        plain = numpy.empty(array.shape, array.dtype).strides
        strides = (s if n > 1 else p for n, s, p in zip(array.shape, array.strides, plain, strict=True))
        array = numpy.lib.stride_tricks.as_strided(array, array.shape, tuple(strides), writeable=False)
    if not array.flags.writeable:  # torch has no read-only tensors and would warn; inputs are never written here
        array = numpy.asarray(_Writable(array))
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, kind)) if kind in _CARRIED else tensor


class _Writable:
    """The memory of a read-only array, offered as writable."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.owner = array


def _torch_to_numpy(tensor: Array, _: Array) -> Array:
    torch: Any = sys.modules["torch"]
    tensor = tensor.detach().resolve_conj().resolve_neg()
    kind = _KINDS[tensor.dtype][0]
    if carried := _CARRIED.get(kind):
        return tensor.view(getattr(torch, carried)).numpy().view(getattr(importlib.import_module("ml_dtypes"), kind))
    return tensor.numpy()


def _torch_to_cupy(tensor: Array, _: Array) -> Array:
    return importlib.import_module("cupy").from_dlpack(tensor.detach())


def _dlpack_to_torch(array: Array, _: Array) -> Array:
    torch = importlib.import_module("torch")
    try:
        return torch.from_dlpack(array)
    except (AttributeError, BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidProblem(
            f"an array of {type(array).__module__.partition('.')[0]} could not be read through DLPack: {error}"
        ) from error


def _torch_to_dlpack(tensor: Array, like: Array) -> Array:
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(tensor)
    library = importlib.import_module(type(like).__module__.partition(".")[0])
    if not hasattr(library, "from_dlpack"):
        raise InvalidProblem(
            f"query is a {type(like).__name__}, and {library.__name__} has no from_dlpack to make the result with: pass"
            " arrays of a library that reads DLPack, such as torch.from_dlpack(query)"
        )
    return library.from_dlpack(tensor)


_PASSAGES = {
    ("numpy", "torch"): _numpy_to_torch,
    ("torch", "numpy"): _torch_to_numpy,
    ("cupy", "torch"): _dlpack_to_torch,
    ("torch", "cupy"): _torch_to_cupy,
    ("dlpack", "torch"): _dlpack_to_torch,
    ("torch", "dlpack"): _torch_to_dlpack,
}


def cast(array: Array, dtype: Any) -> Array:
    """``array`` in another dtype of its library; written to be traced."""
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype)


def numbers_as_array(numbers: Any, library: str, device: tuple[str, int], dtype: str = "int64") -> Array:
    """Plain numbers (lengths, pages, slopes) as an array of ``library`` on ``device``."""
    numpy: Any = importlib.import_module("numpy")
    host = numpy.asarray(numbers, dtype=dtype)
    if library == "cupy":
        return importlib.import_module("cupy").asarray(host)
    if library == "torch":
        torch: Any = importlib.import_module("torch")
        kind, index = device
        return torch.from_numpy(host).to(f"{kind}:{index}" if kind == "cuda" else kind)
    return host
