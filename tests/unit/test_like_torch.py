"""scaled_dot_product_attention beside torch's own: its samples, its shapes, autocast, nested tensors."""

# mypy: disable-error-code="arg-type, misc, no-untyped-call"

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import attnswitch
from attnswitch.errors import AttnswitchError, InvalidProblem

TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 0.15, torch.float16: 3e-2}
ours = attnswitch.scaled_dot_product_attention
#: A torch that gives empty operands results of other shapes, and divides by no heads, which ends the process.
EARLIER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


def outcome(function: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The result and the gradients of all that ask for them, or the error."""
    torch.manual_seed(0)
    try:
        out = function(*operands, **keywords)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        return error
    asked = [x for x in (*operands, *keywords.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not asked or not out.requires_grad:
        return out, ()
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    return out, torch.autograd.grad(out, asked, upstream, allow_unused=True)


def check_alike(found: Any, expected: Any, computed: torch.dtype | None = None) -> None:
    """Whether results are torch's, to the tolerance of their type, or of the lower type they are computed in."""
    if isinstance(expected, Exception):
        return  # what torch refuses may have an answer here
    assert not isinstance(found, Exception), f"torch takes it: {found}"
    assert found[0].dtype == expected[0].dtype
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        if other is not None and one is not None:
            bound = max(TOLERANCE[dtype] for dtype in (other.dtype, computed or other.dtype))
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def samples(device: str, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    pytest.importorskip("expecttest")  # of which torch's module makes use
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    yield from info.sample_inputs(device, dtype, requires_grad=grad)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # of its import
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_samples_of_torch(device: str, dtype: torch.dtype, grad: bool) -> None:
    compared = 0
    for sample in samples(device, dtype, grad):
        operands, keywords = (sample.input, *sample.args), sample.kwargs
        found = outcome(ours, operands, keywords)
        if keywords.get("dropout_p"):  # each draws its own mask: what is kept of it is tested in test_semantics
            assert found[0].shape == outcome(torch_attention, operands, keywords)[0].shape
            continue
        if dtype.itemsize < 4:  # torch's composite rounds in between: both are held against float64
            operands, keywords = widened(operands), dict(zip(keywords, widened(tuple(keywords.values())), strict=True))
            out, grads = outcome(torch_attention, operands, keywords)
            check_alike(found, (out.to(dtype), tuple(None if x is None else x.to(dtype) for x in grads)))
        else:
            check_alike(found, outcome(torch_attention, operands, keywords))
        compared += 1
    assert compared > 10


def widened(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in given
    )


def drawn(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands and keywords, of which many make no sense."""
    leading = [rng.choice((0, 1, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4)))]

    def axes() -> list[int]:
        some = [n if rng.random() < 0.8 else 1 for n in leading]
        return some[rng.choice((0, 0, 0, 0, 1)) :]

    length, keys, dim, columns = (rng.choice((0, 1, 2, 5, 8)) for _ in range(4))
    query, key, value = axes(), axes(), axes()
    if rng.random() < 0.3 and len(query) > 0:
        query[-1] = rng.choice((2, 4, 6))
    shapes = (*query, length, dim), (*key, keys, dim), (*value, keys, columns or 3)
    operands = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    keywords: dict[str, Any] = {}
    if rng.random() < 0.3:
        keywords["enable_gqa"] = True
    if rng.random() < 0.3:
        keywords["is_causal"] = True
    elif rng.random() < 0.5:
        mask = torch.randn((*axes()[rng.choice((0, 1, 2)) :], length, keys))
        keywords["attn_mask"] = mask > -1 if rng.random() < 0.5 else mask.requires_grad_()
    if rng.random() < 0.2:
        keywords["scale"] = rng.choice((0.3, 1, 2.0))
    return operands, keywords


@pytest.mark.parametrize("seed", range(8))
def test_drawn_shapes(seed: int) -> None:
    rng, answered = random.Random(seed), 0
    for _ in range(150):
        operands, keywords = drawn(rng)
        if EARLIER and any(x.numel() == 0 for x in operands):
            continue
        expected = outcome(torch_attention, operands, keywords)
        found = outcome(ours, operands, keywords)
        assert not isinstance(found, Exception) or isinstance(found, AttnswitchError), found
        check_alike(found, expected)
        answered += not isinstance(expected, Exception)
    assert answered > 30


def test_numpy_has_the_same_shapes() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 5, 8)).astype("float32")
    for operands in ((q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), (q[0], k[0, 0], v[0]), (q, k, v[:1]), (q[:0], k[:0], v[:0])):
        expected = torch_attention(*(torch.from_numpy(x) for x in operands)).numpy()
        np.testing.assert_allclose(ours(*operands), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases(bias: Any) -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    torch.testing.assert_close(ours(q, k, v, bias(3, 7)), torch_attention(q, k, v, bias(3, 7)))


@pytest.mark.parametrize("shape", [(3, 7, 8), (1, 3, 7, 8)])
@pytest.mark.parametrize("made", [(5, 5), (5, 7)])
def test_causal_biases_are_aligned_as_torch_aligns_them(made: tuple[int, int], shape: tuple[int, ...]) -> None:
    """A square one begins at the first query, whatever the lengths are."""
    q, k = torch.randn(*shape[:-2], 5, 8), torch.randn(shape)
    torch.testing.assert_close(
        ours(q, k, k, causal_lower_right(*made)), torch_attention(q, k, k, causal_lower_right(*made))
    )


def test_causal_biases_that_torch_refuses() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    with pytest.raises(InvalidProblem, match="CausalBias for"):
        ours(q, k, k, causal_lower_right(4, 7))
    with pytest.raises(InvalidProblem, match="one of the two"):
        ours(q, k, k, causal_lower_right(5, 7), is_causal=True)


@pytest.mark.parametrize("mask", [torch.tensor(True), torch.tensor(0.5, requires_grad=True)])
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8)])
def test_a_mask_may_be_one_number(mask: Any, shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    expected = outcome(torch_attention, (q, q, q), {"attn_mask": mask.expand(5, 5)})
    found = outcome(ours, (q, q, q), {"attn_mask": mask})
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][0], expected[1][0])


def test_results_over_no_keys_can_be_written_to() -> None:
    q, k = torch.randn(3, 5, 8), torch.randn(3, 0, 8)
    assert ours(q, k, k).add_(1).eq(1).all()
    assert ours(q.numpy(), k.numpy(), k.numpy()).flags.writeable


# -- odd arrays --------------------------------------------------------------------------------------------------------


class Foreign:
    """An array of which only the memory is known."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**keywords)


class Shaped(Foreign):
    @property
    def shape(self) -> Any:
        return self.tensor.shape


class Placed(Shaped):
    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


RECORD = np.dtype([("a", "f4")])
ODD: dict[str, Any] = {
    "no device": Foreign,
    "shape and no device": Shaped,
    "no namespace": Placed,
    "big-endian": lambda x: x.numpy().astype(">f4"),
    "objects": lambda x: x.numpy().astype(object),
    "records": lambda x: np.zeros(x.shape, RECORD),
    "list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("kind", ODD)
def test_odd_arrays_get_a_sentence(kind: str, shape: tuple[int, ...]) -> None:
    plain = torch.randn(shape)
    odd = ODD[kind](plain)
    for operands in (
        (odd, odd, odd),
        (plain, odd, odd),
        (plain, plain, plain, ODD[kind](torch.ones((*shape[:-1], 5)))),
    ):
        with pytest.raises(InvalidProblem):
            ours(*operands)


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8)])
def test_arrays_of_jax(shape: tuple[int, ...]) -> None:
    jax = pytest.importorskip("jax")
    there = jax.numpy.ones(shape)
    assert isinstance(ours(there, there[:1], there[:1]), jax.Array)
    with pytest.raises(InvalidProblem, match="tracer"):
        jax.jit(lambda x: ours(x, x, x))(there)
    gone = there + 1
    gone.delete()
    for operands in ((gone, there, there), (there, gone, there)):
        with pytest.raises(InvalidProblem, match="deleted"):
            ours(*operands)


def test_a_mask_that_does_not_fit_numpy() -> None:
    q = np.ones((3, 5, 8), "f4")
    with pytest.raises(InvalidProblem, match="attn_mask"):
        ours(q, q, q, np.zeros((4, 5, 5), "f4"))


def test_autocast_leaves_other_libraries_to_the_message() -> None:
    q = torch.randn(2, 3, 5, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidProblem, match="library"):
        ours(q, q.numpy(), q)


# -- autocast ----------------------------------------------------------------------------------------------------------

MIXED = {
    "float32": (torch.float32, torch.float32, torch.float32, None),
    "mixed": (torch.float32, torch.bfloat16, torch.float16, None),
    "mask": (torch.float32, torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64, None),
    "bool": (torch.bfloat16, torch.float32, torch.float32, torch.bool),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MIXED)
def test_autocast_casts_as_torch_does(kind: str, lower: torch.dtype, enabled: bool) -> None:
    *dtypes, of_mask = MIXED[kind]
    operands = tuple(torch.randn(2, 3, 5, 8).to(dtype).requires_grad_() for dtype in dtypes)
    keywords = {} if of_mask is None else {"attn_mask": torch.rand(5, 5).to(of_mask)}
    with torch.autocast("cpu", lower), torch.autocast("cpu", lower, enabled=enabled):
        found, expected = (outcome(call, operands, keywords) for call in (ours, torch_attention))
    check_alike(found, expected, lower if enabled else None)
    assert isinstance(found, Exception) == isinstance(expected, Exception)
    if not isinstance(found, Exception):
        assert [grad.dtype for grad in found[1]] == dtypes


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast_is_as_exact_as_torchs(lower: torch.dtype) -> None:
    cast = [torch.randn(2, 3, 40, 16).to(lower) for _ in range(3)]
    operands = tuple(x.float().requires_grad_() for x in cast)
    with torch.autocast("cpu", lower):
        found, expected = (outcome(call, operands, {}) for call in (ours, torch_attention))
    out, grads = outcome(torch_attention, tuple(x.double().requires_grad_() for x in cast), {})
    for one, other, exact in zip((found[0], *found[1]), (expected[0], *expected[1]), (out, *grads), strict=True):
        assert (one - exact).square().mean() <= 1.1 * (other - exact).square().mean()


def test_a_training_step_under_autocast_is_torchs() -> None:
    losses: dict[Any, list[float]] = {}
    for call in (ours, torch_attention):
        torch.manual_seed(0)
        inner, outer = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        optimiser = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=0.1)
        x = torch.randn(2, 6, 16)
        losses[call] = []
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                q, k, v = inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                out = outer(call(q, k, v.float(), is_causal=True).transpose(1, 2).flatten(2))
                loss = (out.float() - x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[call].append(loss.item())
    assert losses[ours] == pytest.approx(losses[torch_attention], rel=1e-2)
    assert losses[ours][-1] < losses[ours][0]


@pytest.mark.parametrize("lower", [None, torch.bfloat16])
def test_other_ranks_and_autocast_compile_without_a_break(lower: torch.dtype | None) -> None:
    torch.compiler.reset()
    q, k, v = torch.randn(3, 5, 8), torch.randn(3, 7, 8), torch.randn(1, 7, 8)
    with torch.autocast("cpu", lower or torch.bfloat16, enabled=lower is not None):
        found = torch.compile(ours, fullgraph=True, backend="eager")(q, k, v)
        expected = ours(q, k, v)
    assert found.dtype == expected.dtype == (lower or torch.float32)
    torch.testing.assert_close(found, expected)


# -- nested tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(layout: torch.layout, causal: bool) -> None:
    lengths = (3, 1, 6)
    leaves = [[torch.randn(n, 2, 8, requires_grad=True) for n in lengths] for _ in range(3)]
    if layout == torch.jagged:
        first: Any = torch.nested.as_nested_tensor(leaves[0], layout=layout)
        rest = (torch.nested.nested_tensor_from_jagged(torch.cat(x), first.offsets()) for x in leaves[1:])
        operands = [x.transpose(1, 2) for x in (first, *rest)]
    else:
        operands = [torch.nested.as_nested_tensor([x.transpose(0, 1) for x in each]) for each in leaves]
    out = ours(*operands, is_causal=causal)
    assert out.is_nested
    assert out.layout == layout
    parts = [x.transpose(0, 1) for x in out.transpose(1, 2).unbind()] if layout == torch.jagged else out.unbind()
    expected = [
        torch_attention(*(x.transpose(0, 1)[None] for x in each), is_causal=causal)[0]
        for each in zip(*leaves, strict=True)
    ]
    for part, other in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, other)
    flat = [x for each in leaves for x in each]
    sums = (torch.cat([part.square().flatten() for part in each]).sum() for each in (parts, expected))
    torch.testing.assert_close(*(torch.autograd.grad(total, flat) for total in sums))
    with pytest.raises(InvalidProblem, match="beside nested tensors"):
        ours(*operands, attn_mask=torch.ones(6, 6, dtype=torch.bool))


def packed(values: torch.Tensor, lengths: Any = None) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 8, 12]), lengths).transpose(1, 2)


def test_nested_tensors_with_gaps() -> None:
    values, lengths = torch.randn(12, 2, 8), (2, 3, 1)
    with_gaps = packed(values, torch.tensor(lengths))
    out = ours(with_gaps, with_gaps, with_gaps)
    for part, start, length in zip(out.unbind(), (0, 4, 8), lengths, strict=True):
        x = values[start : start + length].transpose(0, 1)
        torch.testing.assert_close(part, torch_attention(x, x, x))


@pytest.mark.parametrize("width", [(8,), (2, 8)])
def test_nested_tensors_whose_lengths_come_first(width: tuple[int, ...]) -> None:
    rows = [torch.randn(n, *width) for n in (3, 1, 6)]
    first = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for part, x in zip(ours(first, first, first).unbind(), rows, strict=True):
        torch.testing.assert_close(part, torch_attention(x, x, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # at the break
@pytest.mark.parametrize("training", [False, True])
def test_nested_tensors_break_a_graph(training: bool) -> None:
    """A sequence is as long as its numbers say, which a graph cannot ask."""
    torch.compiler.reset()
    values = torch.randn(12, 2, 8, requires_grad=training)

    def attends(x: torch.Tensor) -> torch.Tensor:
        q = packed(x * 2)
        return ours(q, q, q, is_causal=True).values() + 1  # type: ignore[no-any-return]

    found, expected = torch.compile(attends, backend="aot_eager")(values), attends(values)
    torch.testing.assert_close(found, expected)
    if training:
        grads = (torch.autograd.grad(x.square().sum(), values) for x in (found, expected))
        torch.testing.assert_close(*grads)
    # Older torch stops earlier, at what it does not know of subclasses.
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"how long each sequence is|hasattr"):
        torch.compile(attends, fullgraph=True, backend="eager")(values)


def test_nested_tensors_of_other_counts() -> None:
    three = packed(torch.randn(12, 2, 8))
    two = torch.nested.nested_tensor_from_jagged(torch.randn(8, 2, 8), torch.tensor([0, 4, 8])).transpose(1, 2)
    with pytest.raises(InvalidProblem, match="sequences"):
        ours(three, two, two)


class Plain(torch.Tensor):
    """A subclass with torch's own ``__torch_function__``."""


class Answering(torch.Tensor):
    """A subclass that answers for itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__, kwargs


class Noting(torch.overrides.TorchFunctionMode):
    """A mode that notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, kwargs))
        return func(*args, **(kwargs or {}))


def test_a_subclass_comes_back_as_it_does_from_torch() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    kinds = [type(function(q, k.as_subclass(Plain), v)) for function in (torch_attention, ours)]
    assert kinds == [Plain, Plain]
    torch.testing.assert_close(ours(q.as_subclass(Plain), k, v).as_subclass(torch.Tensor), ours(q, k, v))


def test_a_subclass_may_answer_for_itself() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    name, said = ours(q, k, v.as_subclass(Answering), is_causal=True)
    assert name == "scaled_dot_product_attention"
    assert said == {"is_causal": True}


def test_a_mode_sees_the_function_that_was_called() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    with Noting() as noting:
        found = ours(q, k, v, scale=0.5)
    assert noting.seen[0] == (ours, {"scale": 0.5})
    assert sum(function is ours for function, _ in noting.seen) == 1
    torch.testing.assert_close(found, torch_attention(q, k, v, scale=0.5))
    with attnswitch.installed(), Noting() as noting:
        installed = torch.nn.functional.scaled_dot_product_attention
        installed(q, k, v)
    assert noting.seen[0][0] is installed


def test_a_mode_sees_biases_and_nested_tensors_answered() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    with Noting():
        found = ours(q, k, v, causal_upper_left(3, 3))
        assert type(found) is torch.Tensor
    torch.testing.assert_close(found, torch_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(("of_key", "of_value"), [(2, 1), (1, 4), (2, 2), (2, 3)])
def test_a_graph_of_any_sizes_has_groups_of_unlike_heads(of_key: int, of_value: int) -> None:
    def call(query: Any, key: Any, value: Any) -> Any:
        return attnswitch.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    operands = [torch.randn(1, heads, 3, 2) for heads in (12, of_key, of_value)]
    torch.compiler.reset()
    found = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(*operands)
    wide = [x.repeat_interleave(12 // x.shape[1], 1) for x in operands]
    torch.testing.assert_close(found, attnswitch.scaled_dot_product_attention(*wide))
    torch.testing.assert_close(call(*operands), found)
