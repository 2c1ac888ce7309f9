"""attnswitch in JAX: values, gradients and refusals under jit, grad and vmap, on each platform that JAX has here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import attnswitch
from attnswitch import InvalidProblem, Unsupported
from attnswitch.call.options import Options
from attnswitch.planning import policy

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
attention: Any = pytest.importorskip("attnswitch.integrations.jax").attention

PLATFORMS = sorted({"cpu", jax.default_backend()})
rng = np.random.default_rng(3)


@pytest.fixture(autouse=True, params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where arrays are put and computed with; products in whole float32 on GPUs too."""
    with jax.default_device(jax.devices(request.param)[0]), jax.default_matmul_precision("highest"):
        yield


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of arrays on the CPU, where the call under JAX is computed as well, and by the same backend."""
    host = jax.devices("cpu")[0]

    def moved(given: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, host) if isinstance(x, jax.Array) else x, given)

    return lambda *given, **options: function(*moved(given), **moved(options))


directly, backwards = on_host(attnswitch.attention), on_host(attnswitch.attention_backward)


def normal(*shape: int, dtype: str = "float32") -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


Q, K, V, G = normal(2, 4, 6, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 5), normal(2, 4, 6, 5)
BOOL = jnp.asarray(rng.random((2, 1, 6, 7)) > 0.3)
BIAS = normal(4, 1, 7)
LENGTHS = jnp.array([7, 4])


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, "f8"), np.asarray(y, "f8"), rtol=tolerance, atol=tolerance)


def pulled(function: Callable[..., Any], *operands: Any) -> Any:
    """Results of ``function``, and the gradients of all of its operands for an upstream of some sort."""
    found, back = jax.vjp(function, *operands)
    return found, back(upstream_of(found))


def upstream_of(found: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), found)


# -- against JAX's own, which has (B, L, H, D) -------------------------------------------------------------------------

THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "scale": ({"scale": -0.3}, {"scale": -0.3}),
    "mask": ({"attn_mask": BOOL}, {"mask": BOOL}),
    "mask and causal": ({"attn_mask": BOOL, "is_causal": True}, {"mask": BOOL, "is_causal": True}),
    "lengths": ({"key_lengths": LENGTHS}, {"key_value_seq_lengths": LENGTHS}),
    "window": ({"window": (2, 1)}, {"local_window_size": (2, 1)}),
}


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("kind", THEIRS)
def test_as_jax_has_it(kind: str, heads: int) -> None:
    mine, theirs = THEIRS[kind]
    q, k, v = normal(2, 6, 4, 8), normal(2, 7, heads, 8), normal(2, 7, heads, 8)
    own = jax.jit(lambda *x: attention(*x, layout="BLHD", **mine))
    close(pulled(own, q, k, v), pulled(jax.jit(lambda *x: jax.nn.dot_product_attention(*x, **theirs)), q, k, v))


def test_a_float_mask_as_jax_has_it() -> None:
    q, k, bias = normal(2, 6, 4, 8), normal(2, 7, 2, 8), normal(1, 4, 6, 7)
    own = jax.jit(lambda q, k, bias: attention(q, k, k, attn_mask=bias, layout="BLHD"))
    close(pulled(own, q, k, bias), pulled(lambda q, k, b: jax.nn.dot_product_attention(q, k, k, bias=b), q, k, bias))


# -- against attnswitch without JAX's transformations ------------------------------------------------------------------

#: Every keyword of ``Options`` at least once.
KINDS: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},
    "causal_alignment": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (2, None)},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "enable_gqa": {"enable_gqa": True},
    "return_lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "layout": {"layout": "BLHD", "is_causal": True},
    "dropout_p": {"dropout_p": 0.4, "seed": 2**64 - 3},
    "attn_mask": {"attn_mask": BOOL},
    "bias": {"attn_mask": BIAS},
    "key_lengths": {"key_lengths": LENGTHS},
    "backend": {"backend": "reference"},
    "several": {"key_lengths": [0, 5], "softcap": 3.0, "attn_mask": BIAS, "return_lse": True, "is_causal": True},
}


def test_every_option_is_tried() -> None:
    assert {field.name for field in fields(Options)} <= set(KINDS)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_without_transformations(kind: str, jit: bool) -> None:
    options = KINDS[kind]
    given = [x.swapaxes(1, 2) if kind == "layout" else x for x in (Q, K, V)]
    if floating := kind in ("bias", "several"):
        options = {name: option for name, option in options.items() if name != "attn_mask"}
        given.append(BIAS)

    def of(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, *mask: attend(q, k, v, **options, **({"attn_mask": mask[0]} if mask else {}))

    function = jax.jit(of(attention)) if jit else of(attention)
    expected = of(directly)(*given)
    close(function(*given), expected)
    found, grads = pulled(function, *given)
    close(found, expected)
    upstream = upstream_of(found)
    rest = {name: option for name, option in options.items() if name != "return_lse"}
    if "return_lse" in options:
        rest["grad_lse"] = upstream[1]
        upstream = upstream[0]
    if floating:
        rest |= {"attn_mask": BIAS, "mask_grad": True}
    wanted: Any = backwards(upstream, *given[:3], **rest)
    close(list(grads), [x for x in wanted if x is not None])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype: str) -> None:
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, dtype) for x in (Q, K, V))
        found = pulled(jax.jit(lambda *x: attention(*x, return_lse=True)), q, k, v)
        expected = directly(q, k, v, return_lse=True)
        close(found[0], expected, {"float64": 1e-12}.get(dtype, 2e-2))
        assert [x.dtype for x in found[1]] == [dtype] * 3


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_to_attend(shape: tuple[int, int, int]) -> None:
    batch, queries, keys = shape
    q, k = normal(batch, 4, queries, 8), normal(batch, 2, keys, 8)
    found, (of_query, of_key) = pulled(jax.jit(lambda q, k: attention(q, k, k)), q, k)
    for x, like in ((found, q), (of_query, q), (of_key, k)):
        assert x.shape == like.shape
        assert not x.any()


def test_only_the_lse_has_an_upstream_gradient() -> None:
    found = jax.jit(jax.grad(lambda q: attention(q, K, V, return_lse=True)[1].sum()))(Q)
    expected: Any = backwards(jnp.zeros_like(G), Q, K, V, grad_lse=jnp.ones((2, 4, 6)))
    close(found, expected.query)


@pytest.mark.parametrize("backend", ["sdpa-math", "sdpa-flash", "tiled", "reference"])
def test_backends_without_an_lse_have_gradients_too(backend: str) -> None:
    found = jax.jit(jax.grad(lambda q: (attention(q, K, K, backend=backend) * Q).sum()))(Q)
    expected: Any = backwards(Q, Q, K, K, backend="reference")
    close(found, expected.query)


# -- vmap --------------------------------------------------------------------------------------------------------------


def looped(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """What ``jax.vmap`` of ``function`` means."""

    def mapped(*given: Any) -> Any:
        (size,) = {x.shape[axis] for x, axis in zip(given, axes, strict=True) if axis is not None}
        calls = [
            function(*(x if axis is None else jnp.take(x, n, axis) for x, axis in zip(given, axes, strict=True)))
            for n in range(size)
        ]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *calls)

    return mapped


def several(x: Any, axis: int | None) -> Any:
    return x if axis is None else jnp.stack([x, x[::-1], x * 2], axis)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, None), (None, None, None, 0), (2, 4, 0, 1)], ids=str
)
@pytest.mark.parametrize("mask", [BIAS, normal(2, 1, 6, 7), normal(7)], ids=["heads", "batch", "keys"])
def test_vmap_is_a_loop(mask: Any, axes: tuple[int | None, ...]) -> None:
    axes = (*axes[:3], axes[3] and min(axes[3], mask.ndim))
    given = [several(x, axis) for x, axis in zip((Q, K, V, mask), axes, strict=True)]

    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention(q, k, v, attn_mask=mask, softcap=4.0, return_lse=True)

    for once in (jax.jit(function), jax.jit(lambda *x: pulled(function, *x))):
        close(jax.vmap(once, axes)(*given), looped(once, axes)(*given), 2e-5)


def test_vmap_of_vmap() -> None:
    q, k = normal(3, *Q.shape), normal(5, *K.shape)
    for inner, outer in (((0, None), (None, 0)), ((None, 0), (0, None))):

        def mapped(over: Callable[..., Any], inner: Any = inner, outer: Any = outer) -> Any:
            return over(over(lambda q, k: pulled(lambda q, k: attention(q, k, k), q, k), inner), outer)(q, k)

        close(mapped(jax.vmap), mapped(looped))


def test_vmap_of_lengths_and_masks_alone() -> None:
    lengths, masks = jnp.array([[7, 4], [0, 1]]), jnp.stack([BOOL, ~BOOL])
    for name, given in (("key_lengths", lengths), ("attn_mask", masks)):

        def function(x: Any, name: str = name) -> Any:
            return pulled(lambda q: attention(q, K, V, **{name: x}), Q)

        close(jax.vmap(function)(given), looped(function, (0,))(given))


def test_vmap_of_the_upstream_gradient() -> None:
    upstream = normal(3, *G.shape)
    back = jax.vjp(lambda *x: attention(*x), Q, K, V)[1]
    close(jax.vmap(back)(upstream), looped(back, (0,))(upstream))


def test_vmap_draws_the_dropout_of_each_call() -> None:
    given, seeds = several(Q, 0), jnp.array([3, 3, 8])

    def function(q: Any, seed: Any) -> Any:
        return pulled(lambda q: attention(q, K, V, dropout_p=0.5, seed=seed), q)

    for axes in ((0, None), (0, 0)):
        seed = seeds if axes[1] == 0 else seeds[0]
        close(jax.jit(jax.vmap(function, axes))(given, seed), looped(function, axes)(given, seed))


# -- other transformations ---------------------------------------------------------------------------------------------


def test_scan_and_checkpoint() -> None:
    def layers(attend: Callable[..., Any], q: Any, k: Any) -> Any:
        step = jax.checkpoint(lambda x, _: (x + attend(x, k, k), None))
        return jax.lax.scan(step, q, None, length=3)[0]

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

    found, expected = (
        jax.jit(lambda q, k, f=f: pulled(lambda *x: layers(f, *x), q, k))(Q, K) for f in (attention, plain)
    )
    close(found, expected, 5e-5)


def test_a_seed_may_be_traced() -> None:
    function = jax.jit(lambda q, seed: attention(q, K, V, dropout_p=0.5, seed=seed))
    for seed in (3, 4):
        same(function(Q, seed), directly(Q, K, V, dropout_p=0.5, seed=seed))
    drawn = jax.random.bits(jax.random.key(0), (), "uint32")
    same(function(Q, drawn), directly(Q, K, V, dropout_p=0.5, seed=int(drawn)))
    assert function._cache_size() == 2  # one for a plain integer, which JAX traces as int32, and one for uint32


def test_large_operands_do_not_wait_for_themselves() -> None:
    x = normal(2, 8, 512, 64)
    function = jax.jit(jax.grad(lambda x: attention(jnp.sin(x) * 2, x, x).sum()))
    assert all(bool(jnp.isfinite(function(x + n)).all()) for n in range(5))


# -- sinks and slopes --------------------------------------------------------------------------------------------------

SINKS = normal(4)
SLOPES = jnp.abs(normal(2, 4))


def formula(query: Any, key: Any, value: Any, sinks: Any, slopes: Any) -> Any:
    key, value = (jnp.repeat(x, 2, 1) for x in (key, value))
    i, j = jnp.arange(6)[:, None] + 1, jnp.arange(7)[None]
    scores = query @ key.swapaxes(-1, -2) * 8**-0.5 - slopes.reshape(-1, 4)[:, :, None, None] * jnp.abs(i - j)
    scores = jnp.where(j <= i, scores, -jnp.inf)
    last = jnp.broadcast_to(sinks[None, :, None, None], (2, 4, 6, 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, last], -1), -1)
    return jnp.exp(scores - lse[..., None]) @ value, lse


def of_heads(query: Any, key: Any, value: Any, sinks: Any, slopes: Any) -> Any:
    said = {"is_causal": True, "causal_alignment": "bottom_right", "return_lse": True}
    return attention(query, key, value, sinks=sinks, alibi_slopes=slopes, **said)


@pytest.mark.parametrize("slopes", [SLOPES, SLOPES[0]], ids=["of entries", "of heads"])
@pytest.mark.parametrize("jitted", [False, True])
def test_sinks_and_slopes(slopes: Any, jitted: bool) -> None:
    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        def summed(*given: Any) -> Any:
            out, lse = function(*given)
            return (out * jnp.cos(jnp.arange(5.0))).sum() + (lse**2).sum()

        return summed

    given = Q, K, V, SINKS, slopes
    function, found = of_heads, jax.grad(loss(of_heads), (0, 1, 2, 3))
    if jitted:
        function, found = jax.jit(function), jax.jit(found)
    close(function(*given), formula(*given))
    close(found(*given), jax.grad(loss(formula), (0, 1, 2, 3))(*given))
    with pytest.raises(InvalidProblem, match="alibi_slopes is differentiated"):
        jax.grad(loss(of_heads), 4)(*given)


def test_sinks_that_are_mapped() -> None:
    sinks = jnp.stack([SINKS, SINKS + 1, 2 * SINKS])

    def of(sinks: Any) -> Any:
        return attention(Q, K, V, sinks=sinks)

    same(jax.vmap(of)(sinks), jnp.stack([of(each) for each in sinks]))
    grads = jax.grad(lambda each: jax.vmap(of)(each).sum())(sinks)
    close(grads, jnp.stack([jax.grad(lambda each: of(each).sum())(each) for each in sinks]))


def test_sinks_that_are_a_list() -> None:
    same(attention(Q, K, V, sinks=[0.5] * 4), attention(Q, K, V, sinks=jnp.full(4, 0.5)))


def test_operands_of_numpy_are_arrays_of_jax_to_grad() -> None:
    host = np.asarray(Q)
    same(jax.grad(lambda x: attention(x, K, V).sum())(host), jax.grad(lambda x: attention(x, K, V).sum())(Q))


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown": (InvalidProblem, "unexpected keyword 'causal'", {"causal": True}),
    "rank of the mask": (InvalidProblem, "does not broadcast", {"attn_mask": jnp.ones(())}),
    "mask": (InvalidProblem, "does not broadcast", {"attn_mask": jnp.ones((3, 7), bool)}),
    "integer mask": (InvalidProblem, "attn_mask has dtype int32", {"attn_mask": jnp.ones((6, 7), "int32")}),
    "mask of another library": (InvalidProblem, "attn_mask is no array of JAX", {"attn_mask": np.ones((6, 7), bool)}),
    "lengths": (InvalidProblem, "key_lengths holds 8", {"key_lengths": jnp.array([8, 1])}),
    "list of lengths": (InvalidProblem, "key_lengths has shape", {"key_lengths": [1]}),
    "float lengths": (InvalidProblem, "expected integers", {"key_lengths": jnp.array([1.0, 2.0])}),
    "no seed": (InvalidProblem, "needs a seed", {"dropout_p": 0.5}),
    "key of random": (InvalidProblem, "jax.random.bits", {"dropout_p": 0.5, "seed": jax.random.key(0)}),
    "negative seed": (InvalidProblem, "seed=-1", {"dropout_p": 0.5, "seed": -1}),
    "scale": (InvalidProblem, "scale=nan", {"scale": float("nan")}),
    "backend": (Unsupported, "sdpa-flash", {"backend": "sdpa-flash", "softcap": 2.0}),
    "name": (InvalidProblem, "nothing", {"backend": "nothing"}),
    "sinks": (InvalidProblem, r"sinks has shape \(3,\)", {"sinks": jnp.zeros(3)}),
    "sinks of NaN": (InvalidProblem, "sinks holds nan", {"sinks": [float("nan")] * 4}),
    "integer slopes": (InvalidProblem, "alibi_slopes has dtype int32", {"alibi_slopes": jnp.zeros(4, "int32")}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_during_the_trace(kind: str) -> None:
    error, sentence, options = REFUSED[kind]
    with pytest.raises(error, match=sentence):
        jax.eval_shape(lambda q: attention(q, K, V, **options), Q)


def test_operands_that_are_refused() -> None:
    host, gone = np.asarray(Q), Q + 1
    gone.delete()
    for query, sentence in (
        (host, "query is no array of JAX"),
        (gone, "deleted"),
        (Q[0], "four axes"),
        (K, "must agree"),
    ):
        with pytest.raises(InvalidProblem, match=sentence):
            attention(query, K[:1] if query is K else K, V)
    with pytest.raises(InvalidProblem, match="dtype int32"):
        attention(*(x.astype("int32") for x in (Q, K, V)))


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p", "is_causal"])
def test_options_are_not_traced(name: str) -> None:
    with pytest.raises(InvalidProblem, match=f"{name} is traced"):
        jax.jit(lambda x: attention(Q, K, V, **{name: x}))(0.5)
    with pytest.raises(InvalidProblem, match=f"{name} is traced"):
        jax.grad(lambda x: attention(Q, K, V, **{name: x}).sum())(0.5)


def test_what_is_traced_within_a_container() -> None:
    with pytest.raises(InvalidProblem, match="window is traced"):
        jax.jit(lambda x: attention(Q, K, V, window=(x, 0)))(2)
    found = jax.jit(lambda n: attention(Q, K, V, key_lengths=[n, n + 1]))(3)
    same(found, directly(Q, K, V, key_lengths=[3, 4]))


def test_traced_lengths() -> None:
    function = jax.jit(lambda lengths: attention(Q, K, V, key_lengths=lengths))
    same(function(LENGTHS), directly(Q, K, V, key_lengths=LENGTHS))
    with pytest.raises(InvalidProblem, match=r"expected integers \(2,\)"):
        function(jnp.array([1, 2, 3]))
    with pytest.raises(InvalidProblem, match=r"expected integers \(2,\)"):
        function(jnp.array([1.0, 2.0]))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="key_lengths holds 8: expected 0 to Lk = 7"):
        jax.block_until_ready(function(jnp.array([8, 1])))


def test_second_derivatives_are_refused() -> None:
    def loss(q: Any) -> Any:
        return (attention(q, K, V) ** 2).sum()

    with pytest.raises(Unsupported, match="second derivatives"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(Q)
    with pytest.raises(Unsupported, match="second derivatives"):
        jax.jit(jax.jacfwd(jax.grad(loss)))(Q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (Q,), (Q,))


def test_the_policy_is_that_of_the_trace() -> None:
    with policy.using("wisdom-only"), pytest.raises(Unsupported, match="wisdom"):
        jax.jit(lambda q: attention(q, K, V))(Q)
