"""torch autograd through ``attention``, and ``attention_backward`` for those without it."""

from __future__ import annotations

import gc
import importlib
import inspect
import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's users know it by

import attnswitch
from attnswitch import InvalidProblem, Unsupported
from attnswitch.machine.backend import Inputs

CPU = ("sdpa-flash", "sdpa-math", "tiled", "reference")
every_backend = pytest.mark.parametrize("backend", CPU)
own_gradients = pytest.mark.parametrize("backend", ["tiled", "reference"])
SHAPES = ((2, 4, 3, 5), (2, 2, 4, 5), (2, 2, 4, 5))
SMALL = ((2, 4, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2))  # gradcheck calls once or twice for each element


def leaves(dtype: torch.dtype = torch.float64, *shapes: tuple[int, ...]) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in shapes or SHAPES
    ]


def gradients(backend: str, operands: list[torch.Tensor], upstream: torch.Tensor, **options: Any) -> Any:
    out = attnswitch.attention(*operands[:3], backend=backend, **options)
    return torch.autograd.grad(out, operands, upstream)


def close(got: Any, wanted: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right", "key_lengths": [3, 1]},
    "window": {"window": (1, 0), "scale": -0.7},
    "bool mask": {"attn_mask": torch.ones(3, 4).triu() > 0},
    "softcap": {"softcap": 0.8},
    "dropout": {"dropout_p": 0.4, "seed": 5},
    "dropout of everything": {"dropout_p": 1.0, "seed": 5},
    "all": {"is_causal": True, "window": (2, None), "softcap": 2.0, "dropout_p": 0.2, "seed": 1, "key_lengths": [4, 2]},
}


@own_gradients
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_of_output_and_lse(backend: str, variant: str) -> None:
    options = VARIANTS[variant]

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse = attnswitch.attention(q, k, v, return_lse=True, backend=backend, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, leaves(torch.float64, *SMALL))


@own_gradients
@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1), (4, 1, 4), (2, 1, 3, 4), (1, 4, 1, 1), (2, 4, 3, 4)])
def test_gradcheck_of_masks(backend: str, shape: tuple[int, ...]) -> None:
    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attnswitch.attention(
            q, k, v, attn_mask=mask, softcap=1.5, is_causal=True, return_lse=True, backend=backend
        )

    assert torch.autograd.gradcheck(call, leaves(torch.float64, *SMALL, shape))


@every_backend
@pytest.mark.parametrize("wanted", ["".join(c) for n in range(1, 5) for c in combinations("qkvm", n)])
def test_every_subset_of_operands(backend: str, wanted: str) -> None:
    upstream = torch.randn(2, 4, 3, 5, dtype=torch.float64)

    def run(name: str, letters: str) -> list[Any]:
        operands = [
            x.requires_grad_(c in letters)
            for c, x in zip("qkvm", leaves(torch.float64, *SHAPES, (1, 3, 4)), strict=True)
        ]
        out = attnswitch.attention(*operands[:3], attn_mask=operands[3], backend=name)
        out.backward(upstream)
        return [x.grad for x in operands]

    if backend == "sdpa-flash" and "m" in wanted:
        with pytest.raises(Unsupported, match="gradient of attn_mask"):
            run(backend, wanted)
        return
    for letter, grad, exact in zip("qkvm", run(backend, wanted), run("reference", "qkvm"), strict=True):
        if letter not in wanted:
            assert grad is None
        else:
            close(grad, exact)


@pytest.mark.parametrize("backend", ["sdpa-math", "tiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (1,), (3, 1), (4, 1, 1), (2, 1, 3, 4)])
def test_a_mask_gradient_has_the_shape_and_dtype_of_the_mask(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v = leaves(torch.float32)
    (mask,) = leaves(dtype, shape)
    attnswitch.attention(q, k, v, attn_mask=mask, backend=backend).square().sum().backward()
    assert mask.grad is not None
    assert (mask.grad.shape, mask.grad.dtype) == (mask.shape, dtype)
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@every_backend
def test_lse_is_differentiable_or_refused(backend: str) -> None:
    q, k, v = leaves()
    if backend.startswith("sdpa"):
        with pytest.raises(Unsupported, match="return_lse"):
            attnswitch.attention(q, k, v, return_lse=True, backend=backend)
        return
    _, lse = attnswitch.attention(q, k, v, return_lse=True, backend=backend)
    scores = q @ k.repeat_interleave(2, 1).mT * 5**-0.5
    close(lse, scores.logsumexp(-1))
    got = torch.autograd.grad(lse.square().sum(), (q, k, v), materialize_grads=True)
    wanted = torch.autograd.grad(scores.logsumexp(-1).square().sum(), (q, k, v), materialize_grads=True)
    close(got, wanted)


@every_backend
def test_double_backward_raises_or_is_right(backend: str) -> None:
    def penalty(backend: str | None, q: Any, k: Any, v: Any) -> Any:
        out = attnswitch.attention(q, k, v, backend=backend) if backend else F.scaled_dot_product_attention(q, k, v)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        return torch.autograd.grad(out.sum() + grad.square().sum(), (q, k, v))

    operands = leaves(torch.float64, *[(1, 2, 3, 4)] * 3)
    if backend == "sdpa-math":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            close(penalty(backend, *operands), penalty(None, *operands))
        return
    with pytest.raises(Unsupported, match=r"^double backward of attention: .*use backend='sdpa-math'"):
        penalty(backend, *operands)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_lengths": [3, 2]},
        {"attn_mask": torch.ones(3, 4, dtype=torch.bool)},
        {"attn_mask": torch.zeros(3, 4, dtype=torch.float64)},
    ],
    ids=["plain", "lengths", "bool", "float"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_flash_kernel_says_that_it_has_no_second_derivative(options: dict[str, Any], autocast: bool) -> None:
    """However the operator is reached: in a first call or a later one, by a mask of its own or one that is made."""
    operands = leaves()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = attnswitch.attention(*operands, backend="sdpa-flash", **options)
            wanted = torch.autograd.grad(out.sum(), operands, retain_graph=True)
            first = torch.autograd.grad(out.sum(), operands, create_graph=True)
        close(first, wanted)
        with pytest.raises(Unsupported, match=r"^double backward of attention: .*use backend='sdpa-math'"):
            sum(grad.sum() for grad in first).backward()


@every_backend
@pytest.mark.parametrize("which", [0, 1, 2])
def test_writing_to_an_operand_before_backward_raises_or_changes_nothing(backend: str, which: int) -> None:
    upstream = torch.ones(2, 4, 3, 5, dtype=torch.float64)
    operands = leaves()
    wanted = gradients(backend, operands, upstream)
    copies = [x * 1 for x in operands]
    out = attnswitch.attention(*copies, backend=backend)
    with torch.no_grad():
        copies[which].add_(1)
    try:
        close(torch.autograd.grad(out, operands, upstream), wanted)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either is right


@every_backend
def test_writing_to_the_result_before_backward_raises_or_is_right(backend: str) -> None:
    operands = leaves()
    upstream = torch.ones(2, 4, 3, 5, dtype=torch.float64)
    wanted = gradients(backend, operands, 2 * upstream)
    out = attnswitch.attention(*operands, backend=backend)
    out.mul_(2)
    try:
        close(torch.autograd.grad(out, operands, upstream), wanted)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either is right


@every_backend
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_upstream_gradients_of_any_stride(backend: str, layout: str) -> None:
    operands = [x.detach().transpose(1, 2).requires_grad_() if layout == "BLHD" else x for x in leaves()]
    shape = attnswitch.attention(*operands, layout=layout).shape
    wide = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)
    for upstream in (
        torch.tensor(1.5, dtype=torch.float64).expand(shape),
        torch.randn(shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0),
        wide[..., ::2],
        wide[..., 1 : shape[-1] + 1],
        torch.randn(shape[-1], dtype=torch.float64).expand(shape),
    ):
        got = gradients(backend, operands, upstream, layout=layout)
        close(got, gradients("reference", operands, upstream.contiguous(), layout=layout))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_changes_nothing(backend: str, dtype: torch.dtype) -> None:
    operands = leaves(dtype)
    upstream = torch.randn(2, 4, 3, 5, dtype=dtype)
    plain = attnswitch.attention(*operands, backend=backend)
    grads = attnswitch.attention_backward(upstream, *operands, backend=backend)[:3]
    with torch.autocast("cpu", torch.bfloat16):
        inside = attnswitch.attention(*operands, backend=backend)
        again = attnswitch.attention_backward(upstream, *operands, backend=backend)[:3]
    assert inside.dtype == dtype
    close(inside, plain, 0)
    close(again, grads, 0)


def test_dropout_of_everything_by_torchs_generator() -> None:
    operands = leaves()
    out = attnswitch.attention(*operands, dropout_p=1.0, backend="sdpa-math")
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), operands))


@every_backend
def test_no_grad(backend: str) -> None:
    operands = leaves()
    with torch.no_grad():
        assert not attnswitch.attention(*operands, backend=backend).requires_grad
    with torch.inference_mode():
        assert attnswitch.attention(*operands, backend=backend).is_inference()
    assert attnswitch.attention(*operands, backend=backend).requires_grad
    assert not attnswitch.attention(*(x.detach() for x in operands), backend=backend).requires_grad


@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_backward_is_autograd(backend: str, variant: str) -> None:
    options = VARIANTS[variant]
    operands = leaves()
    upstream = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    if backend.startswith("sdpa") and {"softcap", "seed"} & options.keys():
        with pytest.raises(Unsupported, match=r"softcap=|seed"):
            attnswitch.attention_backward(upstream, *operands, backend=backend, **options)
        return
    grads = attnswitch.attention_backward(upstream, *operands, backend=backend, **options)
    assert grads.attn_mask is None
    assert not any(x.requires_grad for x in grads[:3] if x is not None)
    close(list(grads[:3]), list(gradients(backend, operands, upstream, **options)), 1e-15)


@every_backend
def test_attention_backward_with_a_mask_that_requires_a_gradient_nobody_asked_for(backend: str) -> None:
    *operands, mask = leaves(torch.float64, *SHAPES, (3, 4))
    upstream = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    got = attnswitch.attention_backward(upstream, *operands, attn_mask=mask, backend=backend)
    exact = attnswitch.attention_backward(upstream, *operands, attn_mask=mask.detach(), backend="reference")
    close(list(got[:3]), list(exact[:3]))


@every_backend
@pytest.mark.parametrize("within", [False, True])
def test_attention_backward_of_tensors_of_inference_mode(backend: str, within: bool) -> None:
    """Autograd never takes these, and torch's kernels have no gradients without it."""
    made = [torch.randn(*shape, dtype=torch.float64) for shape in (*SHAPES, (3, 4), (2, 4, 3, 5))]
    exact = attnswitch.attention_backward(made[4], *made[:3], attn_mask=made[3], backend="reference")
    with torch.inference_mode():
        *operands, mask, upstream = (tensor.clone() for tensor in made)
        assert upstream.is_inference()
    with torch.inference_mode(mode=within):
        got = attnswitch.attention_backward(upstream, *operands, attn_mask=mask, backend=backend)
    close(list(got[:3]), list(exact[:3]))


@own_gradients
def test_attention_backward_from_saved_results(backend: str) -> None:
    *operands, mask = leaves(torch.float64, *SHAPES, (3, 4))
    upstream, lse_upstream = torch.randn(2, 4, 3, 5, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    out, lse = attnswitch.attention(*operands, attn_mask=mask, return_lse=True, backend=backend)
    options: dict[str, Any] = {"attn_mask": mask, "grad_lse": lse_upstream, "mask_grad": True, "backend": backend}
    saved = attnswitch.attention_backward(upstream, *operands, out=out.detach(), lse=lse.detach(), **options)
    again = attnswitch.attention_backward(upstream, *operands, **options)
    wanted = torch.autograd.grad((out, lse), (*operands, mask), (upstream, lse_upstream))
    close(list(saved), list(wanted), 1e-15)
    close(list(again), list(wanted), 1e-15)


# -- torch's own call --------------------------------------------------------------------------------------------------


def test_the_signature_is_torchs() -> None:
    documented = (F.scaled_dot_product_attention.__doc__ or "").split("->")[0]
    names = inspect.signature(attnswitch.scaled_dot_product_attention).parameters.values()
    ours = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in names)
    assert " ".join(documented.split()) == f"scaled_dot_product_attention({ours})"
    assert [p.kind for p in names][:6] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}),
        *({"attn_mask": torch.ones(3, 4).tril() > 0}, {"attn_mask": torch.linspace(-1, 1, 4).expand(3, 4)}),
    ],
    ids=["plain", "causal", "scale", "gqa", "bool", "float"],
)
def test_scaled_dot_product_attention_is_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {k: x.to(dtype) if getattr(x, "dtype", None) == torch.float32 else x for k, x in options.items()}
    operands = leaves(dtype) if "enable_gqa" in options else leaves(dtype, (2, 4, 3, 8), (2, 4, 4, 8), (2, 4, 4, 8))
    got = attnswitch.scaled_dot_product_attention(*operands, **options)
    close(got, F.scaled_dot_product_attention(*operands, **options), {8: 1e-14, 4: 1e-6}.get(dtype.itemsize, 0.02))
    if "attn_mask" in options:
        q, k, v = operands
        assert torch.equal(got, attnswitch.scaled_dot_product_attention(q, k, v, options["attn_mask"], 0.0, False))


def test_scaled_dot_product_attention_needs_the_flag_for_shared_heads() -> None:
    with pytest.raises(attnswitch.InvalidProblem, match="need enable_gqa=True"):
        attnswitch.scaled_dot_product_attention(*leaves())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")  # torch's own
@pytest.mark.parametrize("known", [False, True])
def test_a_trace_is_refused_for_what_it_is(known: bool) -> None:
    operands = tuple(operand.detach() for operand in leaves())
    plan = attnswitch.plan(*operands)
    for call in (attnswitch.attention, plan):
        if known:
            call(*operands)
        with pytest.raises(InvalidProblem, match=r"torch\.jit\.trace records .*, which cannot see the choice"):
            torch.jit.trace(lambda q, k, v, call=call: call(q, k, v), operands)  # type: ignore[no-untyped-call]
        call(*operands)


@pytest.mark.parametrize("expanded", [False, True])
def test_operands_that_hooks_lay_otherwise_lie_as_before(expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is built for rows that are padded to whole steps of 16 bytes: copied, they are not."""
    seen: list[Any] = []
    kernel: Any = importlib.import_module("attnswitch.backends.tiled").TiledKernel

    def noting(run: Any) -> Any:
        def noted(self: Any, inputs: Inputs, *rest: Any) -> Any:
            arrays = [array for array in inputs[:4] if array is not None]
            seen.append([(tuple(s // x.itemsize for s in x.strides), x.ctypes.data % 16) for x in arrays])
            return run(self, inputs, *rest)

        return noted

    for way in ("forward", "backward"):
        monkeypatch.setattr(kernel, way, noting(getattr(kernel, way)))
    q, k, v = leaves(torch.float32, (2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    mask = torch.randn(5, 32)[:, :7].expand(2, 2, 5, 7) if expanded else torch.randn(2, 2, 5, 32)[..., :7]
    call: dict[str, Any] = {"attn_mask": mask, "backend": "tiled", "key_lengths": torch.tensor([7, 5])}
    plain = torch.autograd.grad(attnswitch.attention(q, k, v, **call).sum(), (q, k, v))
    seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        out = attnswitch.attention(q, k, v, **call)
    close(torch.autograd.grad(out.sum(), (q, k, v)), plain)
    forward, backward = seen
    assert backward == forward
    assert backward[3][0] == (mask.stride() if not expanded else (0, 0, 32, 1))


@pytest.mark.parametrize("options", [{}, {"key_lengths": [3, 5]}], ids=["plain", "lengths"])
def test_the_graph_keeps_operands_as_saved_tensors_alone(options: dict[str, Any]) -> None:
    """Or hooks that move them elsewhere would free nothing."""
    operands = [torch.randn(2, 2, 5, 8).requires_grad_() for _ in range(3)]
    inner = [operand * 1 for operand in operands]
    kept = [weakref.ref(tensor) for tensor in inner]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        out = attnswitch.attention(*inner, backend="tiled", **options)
    del inner
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    out.sum().backward()
    assert all(operand.grad is not None for operand in operands)


@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_do_not_vanish_under_autocast(masked: bool) -> None:
    """They were 0 for whatever the upstream gradient did not depend on."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64).unbind()
    v, mask = torch.randn(1, 2, 3, 6, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    operands = [x.requires_grad_() for x in (q, k, v, *([mask] if masked else []))]

    def second() -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"attn_mask": mask} if masked else {}
        out = attnswitch.attention(q, k, v, backend="sdpa-math", **options)
        first = torch.autograd.grad(out.sum(), operands, create_graph=True)
        return torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in first), operands)  # type: ignore[arg-type]

    expected = second()
    with torch.autocast("cpu", torch.bfloat16):
        found = second()
    torch.testing.assert_close(found, expected)
    assert all(x.abs().max() > 1e-4 for x in found)
