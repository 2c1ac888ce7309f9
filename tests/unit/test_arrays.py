"""Arrays of several libraries: read without a copy, never written, answered in kind."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

import attnswitch
from attnswitch import Gradients, Problem
from attnswitch.arrays import library_of, passage
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Config, Inputs, Kernel, Precision
from attnswitch.machine.device import Device

jax: Any = importlib.import_module("jax") if importlib.util.find_spec("jax") else None
CPU = ("sdpa-flash", "sdpa-math", "tiled", "reference")


class Duck:
    """The least that attention needs of a library: DLPack, and a namespace to make and permute arrays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._tensor.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __array_namespace__(self, **_: Any) -> type[Duck]:
        return Duck

    @classmethod
    def from_dlpack(cls, array: Any, **_: Any) -> Duck:
        return cls(torch.utils.dlpack.from_dlpack(array))

    @classmethod
    def permute_dims(cls, array: Duck, axes: tuple[int, ...]) -> Duck:
        return cls(array._tensor.permute(axes))

    @classmethod
    def reshape(cls, array: Duck, shape: tuple[int, ...]) -> Duck:
        return cls(array._tensor.reshape(shape))


class Library(NamedTuple):
    """How to make an array of a library from NumPy, read it back, and find it in memory."""

    kind: type
    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    address: Callable[[Any], int]


def tensor(x: Any) -> torch.Tensor:
    half = x.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if half else torch.from_numpy(x)


def address(x: Any) -> int:
    return int(x.data_ptr() if isinstance(x, torch.Tensor) else x.__array_interface__["data"][0])


def numbers(x: torch.Tensor) -> Any:
    return x.detach().to(torch.float64).numpy()


def doubles(x: Any) -> Any:
    return np.asarray(x, np.float64)


LIBRARIES = {
    "numpy": Library(np.ndarray, lambda x: x, doubles, address),
    "torch": Library(torch.Tensor, tensor, numbers, address),
    "duck": Library(Duck, lambda x: Duck(tensor(x)), lambda x: numbers(x._tensor), lambda x: address(x._tensor)),
}
if jax is not None:
    on_cpu = functools.partial(jax.numpy.asarray, device=jax.devices("cpu")[0])  # whatever else there is
    LIBRARIES["jax"] = Library(jax.Array, on_cpu, doubles, lambda x: int(x.unsafe_buffer_pointer()))
without_jax = pytest.mark.skipif(jax is None, reason="jax is not installed")
NAMES = ["numpy", "torch", "duck", pytest.param("jax", marks=without_jax)]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}

rng = np.random.default_rng(1)
Q, K, V, G = (rng.standard_normal(s) for s in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 4, 3, 8)))
EXACT = attnswitch.attention(Q, K, V, backend="reference")


def dtype_of(x: Any) -> str:
    return str((x._tensor if isinstance(x, Duck) else x).dtype).removeprefix("torch.")


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_of_the_callers_library_and_dtype(name: str, dtype: str, backend: str) -> None:
    library, digits = LIBRARIES[name], {"float16": 4e-3, "bfloat16": 4e-2}.get(dtype, 1e-6)
    if (name, dtype) == ("jax", "float64"):
        dtype = "float32"  # without its x64 mode jax has no float64
    q, k, v, g = (library.make(x.astype(DTYPES[dtype])) for x in (Q, K, V, G))
    out = attnswitch.attention(q, k, v, backend=backend)
    assert isinstance(out, library.kind)
    assert dtype_of(out) == dtype
    np.testing.assert_allclose(library.read(out), EXACT, rtol=0, atol=digits)
    if backend != "sdpa-math":  # which refuses
        _, lse = attnswitch.attention(q, k, v, return_lse=True, backend=backend)
        assert isinstance(lse, library.kind)
        assert dtype_of(lse) == ("float64" if dtype == "float64" else "float32")
    grads = attnswitch.attention_backward(g, q, k, v, backend=backend)
    for grad, operand in zip(grads[:3], (q, k, v), strict=True):
        assert isinstance(grad, library.kind)
        assert dtype_of(grad) == dtype
        assert library.read(grad).shape == library.read(operand).shape


def test_a_device_without_numbers() -> None:
    q, k = torch.empty(2, 4, 3, 8, device="meta"), torch.empty(2, 2, 5, 8, device="meta")
    out = attnswitch.attention(q, k, k)
    assert (out.device.type, out.shape, out.dtype) == ("meta", q.shape, q.dtype)


# -- the way to a backend ----------------------------------------------------------------------------------------------


class Spy(Backend):
    """Another backend, which keeps the inputs that it was given."""

    name: ClassVar[str] = "spy"
    library: ClassVar[str] = "numpy"
    autograd: ClassVar[bool] = False
    behind: ClassVar[str] = "tiled"
    seen: ClassVar[list[Inputs]] = []

    def __init__(self) -> None:
        self.backend = registry.loaded(self.behind)

    def reasons(self, problem: Problem, device: Device) -> Any:
        return self.backend.supports(problem, device)

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        return self.backend.configs(problem, device)

    def precision(self, problem: Problem, device: Device) -> Precision:
        return self.backend.precision(problem, device)

    def compile(self, problem: Problem, device: Device, config: Any) -> Kernel:
        return SpyKernel(self, self.backend.compile(problem, device, config))

    def forward(self, kernel: Kernel, inputs: Inputs) -> tuple[Any, Any]:
        self.seen.append(inputs)
        return kernel.forward(inputs)


class SpyKernel(Kernel):
    def __init__(self, spy: Spy, kernel: Kernel) -> None:
        self.spy, self.kernel = spy, kernel

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        return self.spy.forward(self.kernel, inputs)

    def backward(self, *arguments: Any) -> Gradients:
        return self.kernel.backward(*arguments)


class TorchSpy(Spy):
    library: ClassVar[str] = "torch"
    autograd: ClassVar[bool] = True
    behind: ClassVar[str] = "sdpa-math"


class BothSpy(Spy):
    """One that takes the arrays of two libraries as they are, and gives back the same."""

    library: ClassVar[str] = "torch"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "numpy")

    def forward(self, kernel: Kernel, inputs: Inputs) -> tuple[Any, Any]:
        self.seen.append(inputs)
        library = library_of(inputs.query)
        results = kernel.forward(inputs.map(lambda array: passage(array, library, "numpy")))
        out, lse = (passage(result, "numpy", library) for result in results)
        return out, lse


@pytest.fixture(params=["Spy", "TorchSpy"])
def seen(request: pytest.FixtureRequest, register: Callable[[str, str], None]) -> list[Inputs]:
    register("spy", f"{__name__}:{request.param}")
    Spy.seen.clear()
    return Spy.seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_no_copy_on_the_way(name: str, dtype: str, seen: list[Inputs]) -> None:
    library = LIBRARIES[name]
    arrays = [library.make(x.astype(DTYPES[dtype])) for x in (Q, K, V)]
    mask = library.make(rng.random((1, 1, 3, 5)) > 0.2)
    attnswitch.attention(*arrays, attn_mask=mask, backend="spy")
    assert [address(x) for x in seen[0][:4]] == [library.address(x) for x in (*arrays, mask)]


def test_a_backend_of_two_libraries_is_given_either_as_it_is(register: Callable[[str, str], None]) -> None:
    register("spy", f"{__name__}:BothSpy")
    Spy.seen.clear()
    for name in ("numpy", "torch"):
        library = LIBRARIES[name]
        arrays = [library.make(x.astype(np.float32)) for x in (Q, K, V)]
        out = attnswitch.attention(*arrays, backend="spy")
        assert [given is array for given, array in zip(Spy.seen[-1][:3], arrays, strict=True)] == [True] * 3
        assert isinstance(out, library.kind)
    both = registry.loaded("spy")
    assert [both.native(library) for library in ("numpy", "torch", "cupy")] == ["numpy", "torch", "torch"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_masks_of_every_rank_and_lengths(name: str, rank: int) -> None:
    library = LIBRARIES[name]
    mask = (rng.random((2, 4, 3, 5)) > 0.4)[(0,) * (4 - rank)]
    arrays = [library.make(x.astype(np.float32)) for x in (Q, K, V)]
    exact = attnswitch.attention(Q, K, V, attn_mask=mask, key_lengths=[3, 5], backend="reference")
    for lengths in ([3, 5], library.make(np.array([3, 5], np.int32))):
        out = attnswitch.attention(*arrays, attn_mask=library.make(mask), key_lengths=lengths)
        np.testing.assert_allclose(library.read(out), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_gradients_of_masks_of_every_rank(name: str, rank: int) -> None:
    library = LIBRARIES[name]
    mask = rng.standard_normal((2, 1, 3, 5)[4 - rank :]).astype(np.float32)
    operands = [library.make(x.astype(np.float32)) for x in (G, Q, K, V)]
    grads = attnswitch.attention_backward(*operands, attn_mask=library.make(mask), mask_grad=True)
    exact: Any = attnswitch.attention_backward(G, Q, K, V, attn_mask=mask, mask_grad=True, backend="reference")
    np.testing.assert_allclose(library.read(grads.attn_mask), exact.attn_mask, rtol=0, atol=1e-5)
    assert library.read(grads.attn_mask).shape == mask.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_read_only_and_expanded_arrays_are_not_copied(dtype: str, seen: list[Inputs]) -> None:
    q = Q.astype(DTYPES[dtype])
    q.flags.writeable = False
    k = np.broadcast_to(K.astype(DTYPES[dtype])[:, :1], K.shape)
    attnswitch.attention(q, k, k, key_lengths=np.broadcast_to(4, (2,)), backend="spy")
    assert [address(x) for x in seen[0][:3]] == [address(q), address(k), address(k)]
    stride = seen[0].key.strides if isinstance(seen[0].key, np.ndarray) else seen[0].key.stride()
    assert stride[1] == 0


def test_backward_strides_reach_numpy_backends_as_they_are(register: Callable[[str, str], None]) -> None:
    register("spy", f"{__name__}:Spy")
    Spy.seen.clear()
    q, k = Q[:, :, ::-1], K[:, :, :, ::-1]
    out = attnswitch.attention(q, k, V)  # torch has no negative strides, so the planner passes its backends over
    assert [address(x) for x in Spy.seen[0][:2]] == [address(q), address(k)]
    exact = attnswitch.attention(q.copy(), k.copy(), V, backend="reference")
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", CPU)
def test_strides_of_axes_of_length_one_have_no_effect(backend: str) -> None:
    q, k, v, g = (x[:1].astype(np.float32) for x in (Q, K, V, G))
    k, v = k[:, :, :1], v[:, :, :1]
    exact = attnswitch.attention(q, k, v, backend=backend)
    grads = attnswitch.attention_backward(g, q, k, v, backend=backend)
    for odd in (-4, 7, 4 * 12345):
        batch = [as_strided(x, strides=(odd, *x.strides[1:])) for x in (q, k, v, g)]
        np.testing.assert_array_equal(attnswitch.attention(*batch[:3], backend=backend), exact)
        again = attnswitch.attention_backward(batch[3], *batch[:3], backend=backend)
        np.testing.assert_array_equal(again.query, grads.query)
    np.testing.assert_array_equal(attnswitch.attention(q, k[:, :, ::-1], v[:, :, ::-1], backend=backend), exact)
    mask = np.ones((1, 1), np.bool_)[::-1]
    np.testing.assert_array_equal(attnswitch.attention(q, k, v, attn_mask=mask, backend=backend), exact)


@pytest.mark.parametrize("backend", CPU)
def test_key_lengths_with_any_stride(backend: str) -> None:
    exact = attnswitch.attention(Q, K, V, key_lengths=[2, 4], backend=backend)
    for lengths in (np.array([4, 2])[::-1], np.array([2, 0, 4, 0])[::2], np.array([2, 4], np.uint8)):
        np.testing.assert_array_equal(attnswitch.attention(Q, K, V, key_lengths=lengths, backend=backend), exact)


# -- results and inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", NAMES)
def test_blhd_in_blhd_out(name: str, backend: str) -> None:
    library = LIBRARIES[name]
    q, k, v, g = (library.make(np.ascontiguousarray(x.swapaxes(1, 2), np.float32)) for x in (Q, K, V, G))
    out = attnswitch.attention(q, k, v, layout="BLHD", backend=backend)
    np.testing.assert_allclose(library.read(out).swapaxes(1, 2), EXACT, rtol=0, atol=1e-6)
    grads = attnswitch.attention_backward(g, q, k, v, layout="BLHD", backend=backend)
    exact: Any = attnswitch.attention_backward(G, Q, K, V, backend="reference")
    for grad, wanted in zip(grads[:3], exact[:3], strict=True):
        np.testing.assert_allclose(library.read(grad).swapaxes(1, 2), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_inputs_are_never_written(make: Callable[[Any], Any], backend: str) -> None:
    mask = np.where(rng.random((2, 1, 3, 5)) > 0.3, 0.0, -np.inf)
    mask[:, :, 0] = -np.inf
    host = [x.copy() for x in (Q, K, V, G, mask, np.array([3, 5]))]
    before = [x.tobytes() for x in host]
    q, k, v, g, m, n = (make(x) for x in host)
    options = {"attn_mask": m, "key_lengths": n, "is_causal": True, "backend": backend}
    attnswitch.attention(q, k, v, **options)
    attnswitch.attention_backward(g, q, k, v, **options)
    assert [x.tobytes() for x in host] == before


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "BLHD": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "backwards": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    "offset": lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_bits(name: str) -> None:
    arrays = [rng.standard_normal((2, 3, 70, 24)).astype(np.float32) for _ in range(3)]
    plain = attnswitch.attention(*arrays, backend="tiled")
    changed = [LAYOUTS[name](x) for x in arrays]
    np.testing.assert_array_equal(attnswitch.attention(*changed, backend="tiled"), plain)
    swapped = attnswitch.attention(*(x.swapaxes(1, 2) for x in changed), layout="BLHD", backend="tiled")
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), plain)
