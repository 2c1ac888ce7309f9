"""One path: what was prepared for a call does what an unprepared one does, and whatever differs is told apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import attnswitch
from attnswitch import InvalidProblem, Unsupported
from attnswitch.call import attend, finite
from attnswitch.call.launch import Request
from attnswitch.planning.policy import Policy
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time
from attnswitch.wisdom.signature import Signature, sign

Register = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("nothing_before")


def tensors(length: int = 8, heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    return [torch.randn(1, heads, length, 16, dtype=dtype) for _ in range(3)]


def slowly(*operands: Any, **options: Any) -> list[torch.Tensor]:
    """Output, lse and gradients by a launch that is built for this call, and prepared for nothing."""
    requests = dict(attend._requests)
    attend.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "_arm", lambda *_: None)
        results = quickly(*operands, **options)
    attend._requests.clear()
    attend._requests.update(requests)
    return results


def quickly(*operands: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)  # for dropout
    result = attnswitch.attention(*operands, **options)
    results = list(result) if isinstance(result, tuple) else [result]
    wanted = [tensor for tensor in operands if tensor.requires_grad]
    return results + (list(torch.autograd.grad(results[0].sum(), wanted)) if wanted else [])


def agree(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)
        assert (one.stride(), one.dtype, one.requires_grad) == (other.stride(), other.dtype, other.requires_grad)


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "lse": {"return_lse": True},
    "window": {"window": (3, None)},
    "dropout": {"dropout_p": 0.5},
    "named": {"backend": "sdpa-math"},
    "policy": {"policy": "estimate"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("grads", [False, True])
def test_it_is_as_unprepared(options: dict[str, Any], layout: str, grads: bool, built: list[object]) -> None:
    operands = [tensor.requires_grad_(grads) for tensor in tensors(8, 8)]
    expected = slowly(*operands, layout=layout, **options)
    assert len(built) == 1
    for _ in range(3):
        agree(quickly(*operands, layout=layout, **options), expected)
    assert len(built) == 2


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_every_rank(rank: int, dtype: torch.dtype, built: list[object]) -> None:
    operands = tensors()
    for _ in range(3):
        mask = (torch.rand((1, 2, 8, 8)[4 - rank :]) > 0.3).to(dtype)
        agree(quickly(*operands, attn_mask=mask), slowly(*operands, attn_mask=mask))
    assert len(built) == 1 + 3


def variants() -> list[tuple[Any, dict[str, Any]]]:
    """Each is another problem, or another choice, than the first; none may be taken for another."""
    q, k, v = tensors()
    aside = torch.randn(2 * 8 * 16 + 1)[1:].view(1, 2, 8, 16)  # 4 bytes off alignment
    return [
        ((q, k, v), {}),
        ((q, k[:, :, :7], v[:, :, :7]), {}),
        ((q.transpose(2, 3).contiguous().transpose(2, 3), k, v), {}),
        ((aside, k, v), {}),
        (tuple(tensors(dtype=torch.float64)), {}),
        ((q.clone().requires_grad_(), k, v), {}),
        ((q, k, v.clone().requires_grad_()), {}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"scale": 1.0}),
        ((q, k, v), {"scale": 0.0}),
        ((q, k, v), {"backend": "sdpa-math"}),
        ((q, k, v), {"layout": "BLHD"}),
        ((q, k, v), {"window": (1, 1)}),
        ((q, k, v), {"window": (1, 2)}),
        ((q, k, v), {"dropout_p": 0.5}),
        ((q, k, v), {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()}),
        ((q, k, v), {"attn_mask": torch.randn(8, 8)}),
        ((q, k, v), {"attn_mask": torch.randn(1, 8)}),
        ((q, k, v), {"attn_mask": torch.randn(8, 8).requires_grad_()}),
    ]


def test_every_fact_counts(built: list[object]) -> None:
    made = variants()
    for _ in range(3):  # in one order, and with every other one known
        for operands, options in made:
            agree(quickly(*operands, **options), slowly(*operands, **options))
    assert len(built) == len(made) + 3 * len(made)  # and none was built again


def test_what_is_wrong_is_refused_after_a_right_call_too() -> None:
    q, k, v = tensors()
    attnswitch.attention(q, k, v, is_causal=True, scale=1.0)
    for options, message in (
        ({"is_causal": 1, "scale": 1.0}, "is_causal=1: expected True or False"),
        ({"is_causal": True, "scale": True}, "scale=True: expected a number"),
        ({"is_causal": True, "scale": 1.0, "layout": ["BHLD"]}, "layout="),
        ({"is_causal": True, "scale": 1.0, "window": (True, 1)}, "window="),
        ({"is_causal": True, "scale": 1.0, "policy": "fast"}, "policy='fast'"),
        ({"is_causal": True, "scale": 1.0, "backend": "fastest"}, "backend 'fastest' is not known"),
        ({"is_causal": True, "scale": 1.0, "backend": ["sdpa-math"]}, "backend="),
    ):
        with pytest.raises(InvalidProblem, match=message):
            attnswitch.attention(q, k, v, **options)
    for operands in (
        (q, k, v[:, :, :4]),
        (q[0], k[0], v[0]),
        (q, k.double(), v),
        (q, k.numpy(), v),
        (q.to_sparse(), k, v),
    ):
        with pytest.raises(InvalidProblem):
            attnswitch.attention(*operands, is_causal=True, scale=1.0)
    with pytest.raises(Unsupported):
        attnswitch.attention(q, k, v, backend="sdpa-flash", softcap=3.0)


def test_a_scale_that_is_changed_in_place_is_read_again() -> None:
    q, k, v = tensors()
    scale: Any = torch.tensor(0.1)
    first = attnswitch.attention(q, k, v, scale=scale)
    scale.fill_(2.0)
    assert not torch.allclose(first, attnswitch.attention(q, k, v, scale=scale))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one for each call whose facts are read."""
    seen: list[object] = []
    find = Request.find

    def counted(*arguments: Any) -> Any:
        seen.append(arguments)
        return find(*arguments)

    monkeypatch.setattr(Request, "find", counted)
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"), nullcontext])
def test_a_call_like_the_one_before_looks_nothing_up(mode: Callable[[], Any], looked_up: list[object]) -> None:
    q, k, v = tensors()
    expected = attnswitch.attention(q, k, v)
    for _ in range(2):
        with mode():
            looked_up.clear()
            for _ in range(4):
                operands = (q.clone(), k.clone(), v.clone())
                assert torch.equal(attnswitch.attention(*operands), expected)
            assert len(looked_up) <= 2
    assert len(looked_up) == 0


def test_what_lies_otherwise_is_looked_up(looked_up: list[object]) -> None:
    q, k, v = tensors()
    aside = torch.randn(2 * 8 * 16 + 1)[1:].view(1, 2, 8, 16)
    for query, times in ((q, 2), (aside, 3), (q, 0), (q.mT.contiguous().mT, 2)):
        expected = slowly(query, k, v)
        looked_up.clear()
        for _ in range(3):
            agree(quickly(query, k, v), expected)
        assert len(looked_up) == times


def test_a_torch_without_guards_is_served_too(monkeypatch: pytest.MonkeyPatch, looked_up: list[object]) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    q, k, v = tensors()
    expected = slowly(q, k, v)
    looked_up.clear()
    for _ in range(3):
        agree(quickly(q, k, v), expected)
    assert len(looked_up) == 3


def test_a_policy_is_found_by_its_text() -> None:
    assert {policy: str(policy) for policy in Policy} == {str(policy): str(policy) for policy in Policy}
    assert {Policy.MEASURE: 1}["measure"] == 1  # type: ignore[index]


def test_the_mode_of_autograd_is_a_fact() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    for _ in range(2):
        with attnswitch.record() as recorded:
            assert attnswitch.attention(q, k, v).requires_grad
            with torch.no_grad():
                assert not attnswitch.attention(q, k, v).requires_grad
                assert not torch.is_grad_enabled()
            with torch.inference_mode():
                assert not attnswitch.attention(q, k, v).requires_grad
            assert torch.is_grad_enabled()
        assert {problem.grads: calls for problem, calls in recorded.problems.items()} == {"qkv": 1, "": 2}


def _nested(like: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([like[0], like[0, :, :3]])


UNLIKE = {"nested": _nested, "sparse": torch.Tensor.to_sparse, "a list": torch.Tensor.tolist, "none": lambda _: None}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("role", [0, 1, 2, 3])
def test_what_has_no_sizes_or_memory_is_refused_as_before(role: int, change: Callable[[torch.Tensor], Any]) -> None:
    """torch's guards end the process where they are asked of some of these."""
    operands: list[Any] = tensors()
    mask: Any = torch.zeros(1, 2, 8, 8)
    for _ in range(2):
        attnswitch.attention(*operands, attn_mask=mask)
    if role < 3:
        operands[role] = change(operands[role])
    else:
        mask = change(mask)
    with nullcontext() if mask is None else pytest.raises(InvalidProblem):
        attnswitch.attention(*operands, attn_mask=mask)


def test_autocast_casts_nothing_here_either() -> None:
    q, k, v = tensors()
    first = attnswitch.attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = attnswitch.attention(q, k, v)
    assert again.dtype == torch.float32
    assert torch.equal(first, again)


@pytest.mark.parametrize("policy", [None, "estimate"])
def test_torch_compile_keeps_its_graph_and_warns_of_nothing(policy: str | None) -> None:
    q, k, v = tensors()

    def function(q: torch.Tensor) -> Any:
        return attnswitch.attention(2 * q, k, v, is_causal=True, policy=policy) + 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(q), function(q), rtol=0, atol=0)


def test_subclasses_and_other_libraries_go_the_same_way(built: list[object]) -> None:
    class Named(torch.Tensor):
        pass

    q, k, v = tensors()
    for _ in range(3):
        attnswitch.attention(q.as_subclass(Named), k, v)
        attnswitch.attention(*(tensor.numpy() for tensor in (q, k, v)))
        attnswitch.attention(q, k, v, key_lengths=[8])
        attnswitch.attention(q, k, v, dropout_p=0.5, seed=1)
    assert len(built) == 4
    assert isinstance(attnswitch.attention(torch.nn.Parameter(q), k, v), torch.Tensor)


def test_wisdom_that_changes_is_noticed() -> None:
    q, k, v = tensors()
    problem = attnswitch.plan(q, k, v).problem
    for name in ("sdpa-flash", "sdpa-math"):
        signed = sign(name, attnswitch.Device.cpu())
        assert isinstance(signed, Signature)
        ms = 1e-3 if name == "sdpa-math" else 1.0
        view.remember([Time(problem, name, "", ms, ms, ms, 30, 1, signed, view.now())])
        agree(quickly(q, k, v), quickly(q, k, v, backend=name))
    assert attnswitch.plan(q, k, v).backend == "sdpa-math"


def test_backends_that_change_are_noticed(register: Register) -> None:
    q, k, v = tensors()
    right = quickly(q, k, v)
    register("saboteur", "saboteurs:ScaledOutput")
    assert not torch.equal(quickly(q, k, v)[0], right[0])


def test_a_plan_is_called_so_too(built: list[object]) -> None:
    q, k, v = tensors()
    plan = attnswitch.plan(q, k, v, is_causal=True)
    assert torch.equal(plan(q, k, v), attnswitch.attention(q, k, v, is_causal=True))
    assert torch.equal(plan(q, k, v), plan(q, k, v))
    assert len(built) == 2  # that of the plan, and that of the call
    with pytest.raises(InvalidProblem, match="the plan is for"):
        plan(*tensors(9))
    with pytest.raises(InvalidProblem, match="the plan is for"):
        plan(q, k, v, attn_mask=torch.ones(8, 8))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_plan_says_what_is_wrong_with_nan(role: int, library: str) -> None:
    operands = tensors()
    plan = attnswitch.plan(*operands, is_causal=True)
    plan(*operands)
    operands[role][0, 0, 3, 5] = torch.nan
    arrays = operands if library == "torch" else [operand.numpy() for operand in operands]
    with pytest.raises(InvalidProblem, match=r"query, key or value holds NaN or inf, .* attention chooses"):
        plan(*arrays)
    with pytest.raises(InvalidProblem, match=r"the plan is for .* and the call is "):
        plan(*arrays, attn_mask=arrays[0][0, 0, :, :8])


def test_calls_are_recorded_so_too() -> None:
    q, k, v = tensors()
    with attnswitch.record() as recorded:
        for _ in range(3):
            attnswitch.attention(q, k, v)
    assert list(recorded.problems.values()) == [3]


def test_empty_sizes() -> None:
    for _ in range(2):
        assert attnswitch.attention(*tensors(0)).shape == (1, 2, 0, 16)
        out = attnswitch.attention(tensors()[0], *tensors(0)[:2])
        assert np.all(out.numpy() == 0)


def test_a_call_like_one_before_is_short(entered: Any) -> None:
    """Functions of ours entered on the way to the kernel: what costs time there, whatever else the machine does."""
    q, k, v = tensors()
    with finite.checking("never"):
        for _ in range(3):
            attnswitch.attention(q, k, v, backend="sdpa-flash")
        found = entered(lambda: attnswitch.attention(q, k, v, backend="sdpa-flash"))
    ours = [name for module, name in found if module.startswith("attnswitch")]
    assert ours == ["attention", "call", "of_call", "attend", "modes", "lies_alike"]


def test_calls_of_several_shapes_in_turn_are_short(entered: Any) -> None:
    """As of a layer for the sequence and one for what it is told: no facts are read again."""
    calls = [partial(attnswitch.attention, tensors()[0], *tensors(length)[:2]) for length in (8, 12, 20, 8)]
    with finite.checking("never"):
        for _ in range(3):
            for call in calls:
                call()
        for call in calls:
            ours = [name for module, name in entered(call) if module.startswith("attnswitch")]
            assert "take_all" not in ours


@pytest.mark.parametrize("places", [(0, 1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0)])
def test_one_tensor_in_several_places_is_short(places: tuple[int, ...], entered: Any) -> None:
    x = tensors()
    operands = [x[n] for n in places]
    with finite.checking("never"):
        for _ in range(3):
            attnswitch.attention(*operands)
        found = entered(lambda: attnswitch.attention(*operands))
        assert "take_all" not in [name for _, name in found]
        for others in (x, [x[0], x[2], x[1]], operands):  # whichever came before
            for grad in (False, True):
                leaf = others[1].detach().requires_grad_(grad)
                given = [leaf if y is others[1] else y for y in others]
                found, expected = attnswitch.attention(*given), torch_attention(*given)
                torch.testing.assert_close(found, expected)
                if grad:
                    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), leaf) for y in (found, expected)))


def test_nan_is_seen_by_the_look_and_runs_once(built: list[object]) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
    attnswitch.attention(query, key, value)
    query[0, 0, 0, 0] = torch.nan
    for _ in range(3):
        assert attnswitch.attention(query, key, value)[0, 0, 0].isnan().all()
    assert len(built) == 2  # and the one for operands that hold NaN


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_leaves_the_mode_of_autograd_and_is_built_once(mode: Callable[[], Any], built: list[object]) -> None:
    q, k, v = tensors()
    with mode():
        for _ in range(3):
            attnswitch.attention_backward(q, q, k, v, backend="tiled")
            assert not torch.is_grad_enabled()
    assert len(built) == 1


def test_a_plan_for_nan_is_called_with_it() -> None:
    q, k, v = tensors()
    k[0, 0, 3] = torch.nan
    plan = attnswitch.plan(q, k, v, is_causal=True)
    assert plan.problem.nonfinite
    expected = attnswitch.attention(q, k, v, is_causal=True)
    assert torch.equal(plan(q, k, v).isnan(), expected.isnan())


def test_an_upstream_gradient_that_is_none() -> None:
    with pytest.raises(InvalidProblem, match="grad_out is None: expected the upstream gradient"):
        attnswitch.attention_backward(None, *tensors())
