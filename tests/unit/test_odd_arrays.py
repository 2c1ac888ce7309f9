"""Arrays that no call is made with on purpose: an answer, or a sentence of attnswitch's own; in every role."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import AttnswitchError, InvalidProblem

attention: Any = attnswitch.attention
Q, K, G = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 4, 6, 8)
MASK, LENGTHS, LSE = torch.randn(2, 1, 6, 7), torch.tensor([7, 3]), torch.randn(2, 4, 6)


class Foreign:
    """Known by its memory alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**keywords)


class Placed(Foreign):
    """No library makes another such array."""

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Broken(Placed):
    def __dlpack__(self, **_: Any) -> Any:
        raise AttributeError("no memory")


class Nowhere(Placed):
    def __dlpack_device__(self) -> Any:
        raise RuntimeError("no device")


def of_numpy(change: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: change(tensor.numpy().copy())


def of_jax(change: Callable[[Any, Any], Any]) -> Callable[[torch.Tensor], Any]:
    def make(tensor: torch.Tensor) -> Any:
        jax: Any = pytest.importorskip("jax")
        return change(jax, jax.numpy.asarray(tensor.numpy()))

    return make


def deleted(_: Any, array: Any) -> Any:
    array.delete()
    return array


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


def csr(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of its state, "beta"
        return tensor.reshape(1, -1).to_sparse_csr()


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor([tensor, tensor])


class Sub(np.ndarray):
    pass


class SubTensor(torch.Tensor):
    pass


#: Neither a number, nor an array that attention takes in any role.
ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "DLPack without a device": Foreign,
    "DLPack that fails": Broken,
    "device that fails": Nowhere,
    "deleted jax array": of_jax(deleted),
    "key of jax.random": of_jax(lambda jax, _: jax.random.key(0)),
    "float8 of jax": of_jax(lambda _, array: array.astype("float8_e4m3fn")),
    "float8": of_numpy(lambda array: array.astype(ml_dtypes.float8_e4m3fn)),
    "int4": of_numpy(lambda array: array.astype(ml_dtypes.int4)),
    "big-endian": of_numpy(lambda array: array.astype(">f4")),
    "complex": of_numpy(lambda array: array.astype("c8")),
    "text": of_numpy(lambda array: array.astype("U4")),
    "dates": of_numpy(lambda array: array.astype("i8").astype("M8[s]")),
    "objects": of_numpy(lambda array: array.astype(object)),
    "records": of_numpy(lambda array: np.zeros(array.shape, [("a", "f4")])),
    "masked": of_numpy(lambda array: np.ma.masked_array(array, mask=array > 0)),
    "the masked constant": lambda _: np.ma.masked,
    "one number": lambda _: np.array(1.5, "f4"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "CSR": csr,
    "mkldnn": lambda tensor: tensor.float().to_mkldnn(),
    "quantized": quantized,
    "complex of torch": lambda tensor: tensor + 0j,
    "float8 of torch": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "nested": nested,
    "uninitialised": lambda _: torch.nn.UninitializedParameter(),
    "freed": freed,
    "storage": lambda tensor: tensor.untyped_storage(),
    "class": lambda _: torch.Tensor,
    "text of Python": lambda _: "query",
    "dict": lambda _: {},
}
LIBRARIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    "numpy": lambda tensor: tensor.numpy(),
    "jax": of_jax(lambda _, array: array),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_operand_gets_a_sentence(kind: str, library: str) -> None:
    odd = ODD[kind]
    q, k, g, lse = (LIBRARIES[library](x) for x in (Q, K, G, LSE))
    attnswitch.attention(q, k, k)  # a call that the next ones are like
    attend, backward = attnswitch.attention, attnswitch.attention_backward
    for call in (
        lambda: attend(odd(Q), k, k),
        lambda: attend(q, odd(K), k),
        lambda: attend(q, k, odd(K)),
        lambda: attend(odd(Q), odd(K), odd(K)),
        lambda: attend(q, k, k, attn_mask=odd(MASK)),
        lambda: attend(q, k, k, key_lengths=odd(LENGTHS.float())),
        lambda: attnswitch.explain(q, odd(K), k),
        lambda: attnswitch.plan(q, k, k)(odd(Q), k, k),
        lambda: attnswitch.scaled_dot_product_attention(q, odd(Q), q),
        lambda: attnswitch.scaled_dot_product_attention(odd(Q[0]), q[0], q[0]),
        lambda: attnswitch.scaled_dot_product_attention(q, k, k, odd(MASK)),
        lambda: backward(odd(G), q, k, k),
        lambda: backward(g, odd(Q), k, k),
        lambda: backward(g, q, k, k, grad_lse=odd(LSE)),
        lambda: attnswitch.merge([g, odd(G)], [lse, lse]),
        lambda: attnswitch.merge([g, g], [lse, odd(LSE)]),
        lambda: attnswitch.merge([odd(G)] * 2, [odd(LSE)] * 2),
    ):
        with pytest.raises(AttnswitchError):
            call()
    with pytest.raises(AttnswitchError):
        backward(g, q, k, k, out=odd(G), lse=lse)
    with pytest.raises(AttnswitchError):
        backward(g, q, k, k, out=g, lse=odd(LSE))


@pytest.mark.parametrize("option", ["scale", "softcap", "seed", "is_causal", "window", "backend", "layout"])
@pytest.mark.parametrize("kind", sorted(set(ODD) - {"one number", "freed", "text of Python"}))
def test_an_odd_option_gets_a_sentence(kind: str, option: str) -> None:
    odd = ODD[kind](torch.tensor([2.0]))
    with pytest.raises(InvalidProblem, match=option):
        attention(Q, K, K, **{option: (odd, 1) if option == "window" else odd})


@pytest.mark.parametrize("value", [torch.tensor(True), np.array(True), torch.empty((), device="meta")])
def test_options_that_are_no_numbers(value: Any) -> None:
    for options in ({"scale": value}, {"dropout_p": 0.5, "seed": value}, {"window": (value, None)}):
        with pytest.raises(InvalidProblem, match=next(reversed(options))):
            attention(Q, K, K, **options)
    with pytest.raises(InvalidProblem, match="softcap"):
        attention(Q, K, K, softcap=memoryview(bytearray(8)))  # which has no hash


@pytest.mark.parametrize("name", ["scale", "softcap", "seed", "key_lengths", "attn_mask"])
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_what_jax_traces_gets_a_sentence(transform: str, name: str) -> None:
    jax: Any = pytest.importorskip("jax")
    value = {"seed": jax.numpy.array([3]), "key_lengths": jax.numpy.array([[3, 4]]), "attn_mask": np.ones((1, 6, 7))}
    if transform == "grad" and name in ("seed", "key_lengths"):
        pytest.skip("integers have no gradients")
    given = jax.numpy.asarray(value.get(name, [0.5]))
    call = jax.vmap if transform == "vmap" else (lambda f: lambda x: getattr(jax, transform)(f)(x[0]))
    for q, k in ((Q, K), (jax.numpy.asarray(Q.numpy()), jax.numpy.asarray(K.numpy()))):
        options = {"dropout_p": 0.5} if name == "seed" else {}

        def attend(x: Any, q: Any = q, k: Any = k, options: Any = options) -> Any:
            return jax.numpy.sum(jax.numpy.asarray(attnswitch.attention(q, k, k, **options, **{name: x})))

        with pytest.raises(InvalidProblem, match=name):
            call(attend)(given)


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_meta_tensors_among_others(library: str) -> None:
    q, k, mask = (LIBRARIES[library](x) for x in (Q, K, MASK))
    for operands in ((Q.to("meta"), k, k), (q, K.to("meta"), k), (q, k, K.to("meta"))):
        with pytest.raises(InvalidProblem, match="only torch can read"):
            attnswitch.attention(*operands)
        with pytest.raises(InvalidProblem, match="only torch can read"):
            attnswitch.explain(*operands)
    with pytest.raises(InvalidProblem, match="only torch can read"):
        attnswitch.attention(Q.to("meta"), K.to("meta"), K.to("meta"), attn_mask=mask)


def test_meta_tensors_have_shapes() -> None:
    q, lse = Q.to("meta"), LSE.to("meta")
    assert attnswitch.scaled_dot_product_attention(q, q, q).shape == Q.shape
    assert attnswitch.scaled_dot_product_attention(q[0], q[0], q[0]).shape == Q[0].shape
    out, merged = attnswitch.merge([q, q], [lse, lse])
    assert (out.device.type, out.shape, merged.shape) == ("meta", Q.shape, LSE.shape)


ANSWERED: dict[str, Callable[[torch.Tensor], Any]] = {
    "read-only": of_numpy(lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)),
    "record array": of_numpy(np.rec.array),
    "subclass": of_numpy(lambda array: array.view(Sub)),
    "subclass of tensors": lambda tensor: tensor.as_subclass(SubTensor),
    "buffer": torch.nn.Buffer,
    "negated in name only": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "numpy": lambda tensor: tensor.numpy(),
    "jax": of_jax(lambda _, array: array),
}


@pytest.mark.parametrize("kind", ANSWERED)
def test_odd_arrays_that_are_answered(kind: str) -> None:
    make = ANSWERED[kind]
    for backend in ("sdpa-math", "tiled"):
        options: dict[str, Any] = {"backend": backend, "is_causal": True}
        expected = attnswitch.attention(Q, K, K, attn_mask=MASK, **options)
        found = attnswitch.attention(make(Q), make(K), make(K), attn_mask=make(MASK), **options)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-6)
        wanted: Any = attnswitch.attention_backward(G, Q, K, K, **options)
        grads: Any = attnswitch.attention_backward(make(G), make(Q), make(K), make(K), **options)
        for grad, exact in zip(grads[:3], wanted[:3], strict=True):
            np.testing.assert_allclose(np.asarray(grad), exact, rtol=0, atol=1e-5)


def test_a_matrix_has_two_axes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        q = np.matrix(Q[0, 0].numpy())
    for attend in (attnswitch.attention, attnswitch.scaled_dot_product_attention):
        with pytest.raises(InvalidProblem, match="expected four axes"):
            attend(q, q, q)


def test_arrays_of_two_libraries() -> None:
    pairs = [(Q, K.numpy()), (Q.numpy(), K), (Q.numpy().tolist(), K)]
    for q, k in pairs:
        with pytest.raises(InvalidProblem, match=r"differ in library|query is a list"):
            attnswitch.attention(q, k, k)
    with pytest.raises(InvalidProblem, match="attn_mask is a numpy array"):
        attnswitch.attention(Q, K, K, attn_mask=MASK.numpy())
    with pytest.raises(InvalidProblem, match="key_lengths is a numpy array"):
        attnswitch.attention(Q, K, K, key_lengths=LENGTHS.numpy())


def test_parts_that_are_no_numbers_do_not_merge() -> None:
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(InvalidProblem, match="merge: outs have dtype"):
            attnswitch.merge([G.to(dtype)] * 2, [LSE] * 2)
        with pytest.raises(InvalidProblem, match="merge: lses have dtype"):
            attnswitch.merge([G] * 2, [LSE.to(dtype)] * 2)


def test_a_freed_parameter_does_not_end_the_process() -> None:
    """Sharded training frees parameters so. The launch of a call before this one is not run with it."""
    program = """
import torch, attnswitch
q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
k = k.clone()
for _ in range(4):
    attnswitch.attention(q, k, v)
k.untyped_storage().resize_(0)
try:
    attnswitch.attention(q, k, v)
except attnswitch.InvalidProblem as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "key has no memory" in done.stdout) == (0, True), done.stderr
