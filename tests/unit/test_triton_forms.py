"""The Triton kernels with sinks, slopes of distances and pages, interpreted and held against float64.

The checks run in one process that has TRITON_INTERPRET=1: see ``interpreting``.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import interpreting
import numpy as np
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs, Offsets, Order
from attnswitch.machine.device import Device

pytest.importorskip("triton", "3.6")

backend = importlib.import_module("attnswitch.backends.triton.backend").TritonBackend()
config = importlib.import_module("attnswitch.backends.triton.config")

CPU = Device.cpu()
#: Scores that float32 cannot tell apart from this.
FAR = -1e9


@dataclass(frozen=True)
class Case:
    """A problem, and what its text does not say; queries and keys of each sequence where they have their own."""

    text: str
    lengths: tuple[tuple[int, int], ...] = ()
    sinks: tuple[float, ...] = ()
    #: Whether each batch entry has slopes of its own.
    each: bool = False
    table: torch.dtype = torch.int32
    #: Whether one row is as far from 0 as ``FAR``.
    far: bool = False


CASES = {
    # Sinks: of every size beside scores of about 1, with keys in one part and in several.
    "sinks": Case("b1.h4/2.s20x33.d8.fp32.lse.sinks.grad", sinks=(0.3, -math.inf, 1e4, -1e4)),
    "sinks, generic": Case("b1.h2.s5x34.d20.fp32.softcap=2.0.sinks.lse.grad"),
    "sinks, rows that see nothing": Case("b1.h2.s20x5.d8.fp32.causal-br.lse.sinks.grad"),
    "sinks, lengths": Case("b3.h2.s5x33.d8.fp32.lengths.lse.sinks.grad", ((5, 33), (5, 0), (5, 17))),
    "sinks, split keys": Case("b2.h4/2.s2x71.d8.fp32.lse.sinks", sinks=(0.3, -math.inf, 1e4, -1e4)),
    "sinks, split keys, lengths": Case("b3.h2.s1x71.d8.fp32.lengths.lse.sinks", ((1, 71), (1, 0), (1, 9))),
    "sinks, bool mask": Case("b1.h2.s20x33.d8.fp32.mask=bool:qk.lse.sinks.grad"),
    "sinks, varlen": Case("b4.h2.s9x33.d8.fp32.lse.varlen.sinks.grad", ((9, 33), (3, 0), (0, 5), (5, 9))),
    "sinks, varlen, split keys": Case("b3.h4/2.s2x71.d8.fp32.varlen.lse.sinks", ((2, 71), (1, 0), (1, 40))),
    "sinks, a row far from 0": Case("b1.h2.s5x33.d8.fp32.mask=fp32:qk.lse.sinks.grad", sinks=(FAR, 0.5), far=True),
    "sinks as far as scores": Case("b1.h2.s5x33.d8.fp32.mask=fp32:qk.lse.sinks.grad=m", sinks=(FAR, FAR), far=True),
    # Slopes: of both corners, in every kernel, after softcap.
    "alibi": Case("b2.h4/2.s20x33.d8.fp32.lse.alibi.grad"),
    "alibi, each": Case("b2.h4/2.s20x33.d8.fp32.lse.alibi.grad", each=True),
    "alibi, bottom right": Case("b1.h2.s33x21.d8.fp32.alibi.causal-br.lse.grad"),
    "alibi, generic": Case("b2.h2.s5x34.d20.fp32.alibi.causal-br.softcap=2.0.lse.grad", each=True),
    "alibi, window": Case("b1.h2.s33x51.d8.fp32.alibi.causal-br.window=12,*.softcap=2.0.grad"),
    "alibi, lengths": Case("b2.h2.s20x33.d8.fp32.alibi.causal-br.lengths.grad", ((20, 33), (20, 17))),
    "alibi, packed heads, split keys": Case("b2.h4/2.s2x71.d8.fp32.alibi.causal-br.lse", each=True),
    "alibi, float mask": Case("b1.h2.s20x33.d8.fp32.alibi.mask=fp32:hqk.lse.grad=qkvm"),
    "alibi, bool mask": Case("b1.h2.s33x65.d8.fp32.alibi.causal-br.mask=bool:k.grad"),
    "alibi, varlen": Case(
        "b4.h4/2.s20x33.d8.fp32.alibi.causal-br.varlen.lse.grad", ((20, 33), (3, 0), (0, 5), (9, 20)), each=True
    ),
    "alibi, a row far from 0": Case("b1.h2.s5x33.d8.fp32.mask=fp32:qk.alibi.sinks.lse.grad=m", far=True),
    # Pages: smaller and larger than a tile, and not in step with one.
    "pages": Case("b3.h2.s1x80.d8.fp32.page=16.lengths.lse", ((1, 70), (1, 1), (1, 0))),
    "pages of one": Case("b2.h4/2.s2x71.d8.fp32.page=1.lengths.causal-br.lse", ((2, 70), (2, 1))),
    "large pages": Case("b2.h4/2.s1x128.d8.fp32.page=64.lengths.causal-br.lse", ((1, 70), (1, 128))),
    "pages, many queries": Case("b2.h2.s20x48.d8.fp32.page=12.lengths.causal-br.lse", ((20, 41), (20, 7))),
    "pages, generic": Case("b2.h2.s5x36.d20.fp32.page=9.lengths.causal-br.lse", ((5, 30), (5, 4))),
    "pages, splits": Case("b2.h2.s1x77.d8.fp32.page=7.splits=3.lengths.causal-br.lse", ((1, 70), (1, 3))),
    "pages, more splits than keys": Case("b2.h2.s1x32.d8.fp32.page=16.splits=9.lengths.lse", ((1, 30), (1, 3))),
    "pages, window, splits": Case(
        "b2.h2.s2x80.d8.fp32.page=4.splits=4.lengths.causal-br.window=30,*.lse",
        ((2, 70), (2, 40)),
        table=torch.int64,
    ),
    "pages and all else": Case(
        "b2.h4/2.s2x80.d8.fp32.page=16.splits=2.lengths.alibi.causal-br.softcap=2.0.sinks.lse", ((2, 70), (2, 9))
    ),
    "pages, varlen": Case(
        "b3.h4/2.s9x48.d8.fp32.page=16.varlen.lengths.alibi.causal-br.sinks.lse", ((9, 40), (0, 7), (1, 20)), each=True
    ),
    "pages, varlen, splits": Case(
        "b3.h4/2.s2x80.d8.fp32.page=16.splits=2.varlen.lengths.causal-br.sinks.lse", ((2, 70), (0, 7), (1, 20))
    ),
    "pages, varlen, generic": Case(
        "b3.h2.s5x36.d20.fp32.page=3.varlen.lengths.causal-br.lse", ((5, 30), (2, 4), (0, 7))
    ),
    # Trees: bits of more than a byte, of sequences with fewer keys than queries, where older keys end within a tile.
    "tree": Case("b3.h4/2.s11x48.d8.fp32.page=16.tree.lengths.causal-br.lse", ((11, 41), (11, 11), (11, 5))),
    "tree, not causal": Case("b2.h2.s20x96.d8.fp32.page=16.tree.lengths.lse", ((20, 90), (20, 7))),
    "tree, generic": Case("b2.h2.s5x36.d20.fp32.page=9.tree.lengths.causal-br.lse", ((5, 30), (5, 4))),
    "tree, splits and all else": Case(
        "b2.h4/2.s9x80.d8.fp32.page=16.splits=2.tree.lengths.window=30,3.alibi.sinks.softcap=2.0.lse",
        ((9, 70), (9, 20)),
    ),
    "tree, varlen": Case(
        "b3.h4/2.s9x48.d8.fp32.page=16.varlen.tree.lengths.causal-br.sinks.lse", ((9, 40), (0, 7), (3, 20))
    ),
}  # fmt: skip
INTERPRETED: dict[str, Callable[[], None]] = {}


def interpreted(check: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test of what ``check`` raised in the process that interprets."""
    INTERPRETED[check.__name__] = check

    def test(raised: dict[str, str]) -> None:
        assert raised[check.__name__] == "", raised[check.__name__]

    return pytest.mark.slow(test)


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each of the checks raised, "" for nothing; skips where this interpreter does not work."""
    return interpreting.raised(__file__)


# -- in float64 --------------------------------------------------------------------------------------------------------


def attended(
    p: Problem, query: Any, key: Any, value: Any, mask: Any = None, sinks: Any = None, slopes: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of one sequence: query (Hq, Lq, D), key and value (Hkv, Lk, D), slopes (Hq,)."""
    key, value = (x.repeat_interleave(p.group, 0) for x in (key, value))
    scores = query @ key.mT * p.softmax_scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    rows, keys = scores.shape[1:]
    offset = keys - rows if p.bottom_right else 0
    away = torch.arange(rows)[:, None] + offset - torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * away.abs()
    left, right = (rows + keys if side is None else side for side in p.reach)
    seen = (away <= left) & (-away <= right)
    if mask is not None:
        seen, scores = (seen & mask, scores) if mask.dtype == torch.bool else (seen, scores + mask)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, rows, 1)), -1)
        value = torch.cat((value, value.new_zeros(p.heads_q, 1, p.dim_v)), 1)
    nothing = (scores == -math.inf).all(-1, keepdim=True)  # whose gradient is 0, not NaN
    scores = scores.masked_fill(nothing, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(nothing, 0.0)
    return weights @ value, torch.logsumexp(scores, -1).masked_fill(nothing[..., 0], -math.inf)


class Made:
    """Inputs of a case as kernels take them, and the results that they should have."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.p = p = Problem.parse(case.text)
        draw = torch.Generator().manual_seed(seed)
        self.random = functools.partial(torch.randn, generator=draw)
        self.lengths = case.lengths or ((p.seq_q, p.seq_k),) * p.batch
        self.sinks = torch.tensor(case.sinks) if case.sinks else self.random(p.heads_q) if p.sinks else None
        entries = p.batch if case.each else 1
        self.slopes = torch.rand(entries, p.heads_q, generator=draw) if p.alibi else None
        self.mask = self._mask(draw)
        self.queries = [self.random(p.heads_q, rows, p.dim_qk) for rows, _ in self.lengths]
        self.keys = [self.random(p.heads_kv, keys, p.dim_qk) for _, keys in self.lengths]
        self.values = [self.random(p.heads_kv, keys, p.dim_v) for _, keys in self.lengths]
        if case.far:
            self.queries[0][:, 0] = 0.0
            self.mask[..., 0, :] = FAR
        self._table = case.table
        self._trees = [torch.rand(rows, p.seq_q, generator=draw) < 0.6 for rows, _ in self.lengths]

    def _mask(self, draw: torch.Generator) -> Any:
        mask, shape = self.p.mask, self.p.mask_shape
        if mask is None or shape is None:
            return None
        return torch.rand(shape, generator=draw) < 0.7 if mask.is_bool else torch.randn(shape, generator=draw)

    def inputs(self) -> Inputs:
        """Of sequences one after another, side by side or in pages; what belongs to none of them is NaN."""
        p = self.p
        offsets = lengths = table = None
        if p.varlen:
            edges = [
                torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32)
                for of in zip(*self.lengths, strict=True)
            ]
            offsets = Offsets(*edges)
        if p.key_lengths:
            lengths = torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32)
        query = _together(self.queries, 2) if p.varlen else torch.stack(self.queries)
        if p.page:
            table, key, value = self._pages()
        elif p.varlen:
            key, value = _together(self.keys, 3), _together(self.values, 3)
        else:
            key, value = (torch.stack([_longer(x, p.seq_k, math.nan) for x in of]) for of in (self.keys, self.values))
        made = Inputs(query, key, value, self.mask, lengths, None, offsets, self.sinks, self.slopes, table)
        return made._replace(tree_mask=self._bits()) if p.tree else made

    def _bits(self) -> torch.Tensor:
        """Those of the trees, and some that mean nothing."""
        drawn = [np.packbits(tree.numpy(), axis=-1, bitorder="little") for tree in self._trees]
        bits = [torch.from_numpy(np.pad(rows, ((0, 0), (0, 1)), constant_values=255)) for rows in drawn]
        return torch.cat([*bits, *([bits[0][:1]] * 2)])[None] if self.p.varlen else torch.stack(bits)

    def _seen(self, b: int) -> torch.Tensor:
        """Which of its keys the queries of a sequence see by its tree."""
        rows, keys = self.lengths[b]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        for j in range(max(0, keys - rows), keys):
            seen[:, j] = self._trees[b][:, j - (keys - rows)]
        return seen

    def _pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages in no order, and a table that names some that are not there past each length."""
        p, columns = self.p, self.p.seq_k // self.p.page
        order = torch.randperm(p.batch * columns + 3, generator=torch.Generator().manual_seed(1))
        table = torch.full((p.batch, columns), 2**30, dtype=self._table)
        table[:, 1::2] = -(2**30)
        caches = [torch.full((len(order), p.page, p.heads_kv, dim), math.nan) for dim in (p.dim_qk, p.dim_v)]
        for b, (_, keys) in enumerate(self.lengths):
            for j in range(keys):
                page = order[b * columns + j // p.page]
                table[b, j // p.page] = page
                for cache, of in zip(caches, (self.keys, self.values), strict=True):
                    cache[page, j % p.page] = of[b][:, j]
        return table, caches[0].transpose(1, 2), caches[1].transpose(1, 2)

    def _put(self, arrays: list[torch.Tensor]) -> torch.Tensor:
        """Sequences (H, L, D) as results hold them."""
        return _together(arrays, 0) if self.p.varlen else torch.stack(arrays)

    def wanted(self, upstream: tuple[Any, Any]) -> list[Any]:
        """Output, lse, and gradients of query, key, value and mask, as a kernel gives them."""
        p = self.p
        leaves = [[x.double().requires_grad_() for x in of] for of in (self.queries, self.keys, self.values)]
        mask = self.mask
        if p.adds_mask:
            mask = mask.double().requires_grad_()
        whole = None if mask is None else mask.expand(p.batch, p.heads_q, p.seq_q, p.seq_k)
        results = [
            attended(
                p,
                leaves[0][b],
                leaves[1][b],
                leaves[2][b],
                self._seen(b) if p.tree else None if whole is None else whole[b],
                None if self.sinks is None else self.sinks.double(),
                None if self.slopes is None else self.slopes.double().expand(p.batch, -1)[b],
            )
            for b in range(p.batch)
        ]
        out = self._put([result[0] for result in results])
        lse = self._put([result[1][..., None] for result in results])[..., 0]
        if not p.grads:
            return [out, lse]
        seen = torch.where(lse == -math.inf, 0.0, lse)
        loss = (out * upstream[0]).sum() + (0.0 if upstream[1] is None else (seen * upstream[1]).sum())
        asked = [*itertools.chain(*leaves), *([mask] if p.adds_mask else [])]
        grads = torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True)
        n, keys = p.batch, 0 if p.varlen else p.seq_k
        by_query = self._put(list(grads[:n]))
        by_key, by_value = (self._put([_longer(x, keys) for x in grads[at * n : at * n + n]]) for at in (1, 2))
        return [out, lse, by_query, by_key, by_value, grads[3 * n] if p.adds_mask else None]


def _together(arrays: list[torch.Tensor], past: int) -> torch.Tensor:
    """Sequences (H, L, D) one after another, (1, H, T, D), and rows of NaN past them."""
    heads, _, dim = arrays[0].shape
    return torch.cat([*arrays, torch.full((heads, past, dim), math.nan, dtype=arrays[0].dtype)], 1)[None]


def _longer(array: torch.Tensor, rows: int, filled: float = 0.0) -> torch.Tensor:
    """(H, L, D), ``filled`` up to ``rows``."""
    return torch.nn.functional.pad(array, (0, 0, 0, max(rows - array.shape[1], 0)), value=filled)


# -- beside the kernels ------------------------------------------------------------------------------------------------


def compiled(p: Problem) -> Any:
    return backend.compile(p, CPU, next(backend.configs(p, CPU)))


def check(case: Case) -> None:
    made = Made(case)
    p, inputs = made.p, made.inputs()
    kernel = compiled(p)
    out, lse = kernel.forward(inputs)
    ends = sum(rows for rows, _ in made.lengths) if p.varlen else p.seq_q
    got = [out[:, :, :ends], lse[:, :, :ends]]
    assert (out[:, :, ends:] == 0.0).all()
    assert (lse[:, :, ends:] == -math.inf).all()
    upstream = made.random(out.shape), made.random(lse.shape) if p.lse else None
    if p.grads:
        grads = kernel.backward(inputs, out, lse, *upstream)
        rows = ends, *([sum(keys for _, keys in made.lengths)] * 2 if p.varlen else [p.seq_k] * 2)
        got += [None if x is None else x[:, :, :n] for x, n in zip(grads[:3], rows, strict=True)]
        got.append(grads.attn_mask)
    cut = upstream[0][:, :, :ends], None if upstream[1] is None else upstream[1][:, :, :ends]
    for what, one, other in zip(("out", "lse", "dq", "dk", "dv", "dm"), got, made.wanted(cut), strict=False):
        if one is not None:
            torch.testing.assert_close(
                one.double(),
                other.detach(),
                rtol=3e-5,
                atol=3e-5,
                msg=lambda text: f"{what}: {text}",  # noqa: B023
            )


INTERPRETED |= {name: functools.partial(check, case) for name, case in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_it_agrees_with_float64(name: str, raised: dict[str, str]) -> None:
    assert raised[name] == "", raised[name]


@interpreted
def test_bits_of_a_sequence_are_those_that_it_has_alone() -> None:
    """Where the call says how keys are divided: whatever the batch, and however wide the table."""
    form = "d8.fp32.page=16.splits=3.lengths.causal-br.lse"
    for varlen, queries in (("", (1, 1, 1)), (".varlen", (1, 40, 0))):
        lengths = tuple(zip(queries, (70, 96, 5), strict=True))
        several = Made(Case(f"b3.h4/2.s{max(queries)}x96.{form}{varlen}", lengths))
        alone = Made(Case(f"b1.h4/2.s1x80.{form}{varlen}", lengths[:1]))
        alone.queries, alone.keys, alone.values = several.queries[:1], several.keys[:1], several.values[:1]
        one, other = (compiled(made.p).forward(made.inputs()) for made in (several, alone))
        assert all(torch.equal(a[:1, :, :1], b[:, :, :1]) for a, b in zip(one, other, strict=True))


@interpreted
def test_one_kernel_takes_slopes_of_each_sequence_and_of_all() -> None:
    shared = Made(Case("b2.h2.s2x9.d8.fp32.alibi.causal-br.lse"))
    kernel, inputs = compiled(shared.p), shared.inputs()
    slopes = torch.rand(2, 2)
    kernel.forward(inputs)
    out, _ = kernel.forward(inputs._replace(alibi_slopes=slopes))
    shared.slopes = slopes
    torch.testing.assert_close(out.double(), shared.wanted((None, None))[0], rtol=1e-5, atol=1e-5)


@interpreted
def test_one_kernel_takes_a_cache_of_one_page_and_of_many() -> None:
    made = Made(Case("b1.h2.s1x16.d8.fp32.page=16.lengths.lse", ((1, 9),)))
    kernel, inputs = compiled(made.p), made.inputs()
    table: Any = inputs.block_table
    at = int(table[0, 0])
    alone = inputs._replace(key=inputs.key[at : at + 1], value=inputs.value[at : at + 1], block_table=table * 0)
    one, other = kernel.forward(alone), kernel.forward(inputs)
    assert at > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@interpreted
def test_values_are_the_first_columns_of_the_keys_in_the_same_memory() -> None:
    """Arrays of NumPy's: views of one memory that begin together, and do not end together."""
    rng = np.random.default_rng(0)
    cache, query = (rng.standard_normal(shape, dtype=np.float32) for shape in ((3, 16, 2, 24), (2, 3, 4, 24)))
    table, lengths = [[2, 0], [1, -1]], [29, 7]
    out = attnswitch.attention_paged(query, cache, cache[..., :16], table, lengths, backend="triton")
    wanted = attnswitch.attention_paged(query, cache, cache[..., :16], table, lengths, backend="reference")
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


@interpreted
def test_calls_that_lie_alike_come_to_the_same_bits_in_the_order_of_the_caller() -> None:
    """Tensors have their axes as the caller has them: where they begin is all that is asked of them."""
    for name in (
        "sinks, split keys",
        "alibi, bottom right",
        "pages, splits",
        "pages and all else",
        "pages, varlen, splits",
        "sinks, varlen",
        "tree, varlen",
        "sinks, bool mask",
        "pages, generic",
    ):
        case = CASES[name]
        first, second = (Made(replace(case, text=case.text.replace(".grad", "")), seed) for seed in (0, 1))
        inputs, others = first.inputs(), second.inputs()
        order = Order(turned=True, packed=first.p.varlen)
        kernel = compiled(first.p)
        general = kernel.prepared_form(inputs, order)
        assert general.__module__ == "attnswitch.machine.backend"  # it knows nothing yet of how arrays lie
        for made in (inputs, others):
            expected = [order.of(result) for result in kernel.forward(made)]
            for way in (general, kernel.prepared_form(inputs, order)):
                found = way(*_turned(made))
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), name
                    assert one.stride() == other.stride(), name
        copied = first.mask is not None  # which begins no two rows alike
        assert way.__module__ == f"attnswitch.{'machine.backend' if copied else 'backends.triton.kernel'}", name


def _turned(inputs: Inputs) -> list[Any]:
    """What ``Inputs.flat`` has, with axes in another order; offsets of keys are left out where nobody reads them."""
    flat = list(inputs.flat())
    packed = inputs.offsets is not None
    flat[:3] = [x[0].swapaxes(0, 1) if packed and x.shape[0] == 1 else x.swapaxes(1, 2) for x in flat[:3]]
    if inputs.block_table is not None:
        flat[7] = None
    return flat


@pytest.mark.parametrize(
    ("text", "generic", "splits"),
    [
        ("b1.h4/2.s20x33.d8.fp32.lse.sinks.grad", False, 1),
        ("b1.h2.s5x34.d20.fp32.softcap=2.0.sinks.lse.grad", True, 1),
        ("b2.h4/2.s2x71.d8.fp32.alibi.causal-br.lse", False, 2),
        ("b2.h2.s5x36.d20.fp32.page=9.lengths.causal-br.lse", True, 1),
        ("b2.h2.s1x77.d8.fp32.page=7.splits=3.lengths.causal-br.lse", False, 3),
    ],
)
def test_the_cases_have_the_kernels_that_they_say(text: str, generic: bool, splits: int) -> None:
    chosen = next(config.configs(Problem.parse(text), CPU))
    assert (chosen.forward.generic, chosen.splits) == (generic, splits)


# -- on the host -------------------------------------------------------------------------------------------------------


def test_without_keys_there_is_the_sink() -> None:
    p = Problem.parse("b2.h2.s3x0.d8.fp32.sinks.lse")
    sinks = torch.tensor([0.5, -math.inf])
    query, key = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 0, 8)
    out, lse = compiled(p).forward(Inputs(query, key, key, sinks=sinks))
    assert (out == 0.0).all()
    assert torch.equal(lse, sinks[:, None].expand(2, 2, 3))


def test_without_keys_rows_of_no_sequence_have_no_sink() -> None:
    p = Problem.parse("b2.h1.s2x0.d8.fp32.varlen.sinks.lse")
    query, key, edges = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 0, 8), torch.tensor([0, 2, 3])
    _, lse = compiled(p).forward(Inputs(query, key, key, offsets=Offsets(edges, edges * 0), sinks=torch.tensor([0.5])))
    assert lse.tolist() == [[[0.5, 0.5, 0.5, -math.inf, -math.inf]]]


@pytest.mark.parametrize("queries", [1, 300])
def test_keys_are_divided_as_the_call_says(queries: int) -> None:
    """And nothing of other sequences has a say in how they are taken."""
    form = "d128.bf16.page=16.splits=5.lengths.causal-br"
    for device in map(Device.named, ("a100", "h200", "b200")):
        for texts in (
            (f"b1.h32/8.s{queries}x16.{form}", f"b64.h32/8.s{queries}x65536.{form}"),
            (f"b1.h32/8.s1x16.{form}.varlen", f"b64.h32/8.s{queries}x65536.{form}.varlen"),
        ):
            problems = [Problem.parse(text) for text in texts]
            one, other = (list(config.configs(problem, device)) for problem in problems)
            assert one == other
            assert [(chosen.splits, chosen.forward.generic) for chosen in one] == [(5, False)]
            assert config.packs(problems[0]) == config.packs(problems[1])


@pytest.mark.parametrize("device", ["h200", "a100", "b200"])
@pytest.mark.parametrize(
    "text",
    [
        "b8.h16/4.s1024.d128.bf16.causal.sinks.alibi.grad",
        "b8.h16.s1024.d96/64.fp16.causal-br.softcap=3.0.varlen.dropout=0.1.sinks.alibi.grad",
        "b8.h8/2.s1x4096.d128.bf16.page=16.lengths.causal-br.sinks.alibi",
        "b8.h8/2.s512x4096.d64.fp16.page=1.lengths.causal-br.varlen",
        "b4096.h64/8.s1x1048576.d128.bf16.page=16.lengths",  # a table far longer than a grid
    ],
)
def test_it_takes_them_on_a_gpu(text: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreting.VARIABLE, raising=False)
    assert backend.supports(Problem.parse(text), Device.named(device)) == ()


@pytest.mark.parametrize("text", ["d20.bf16.page=16.lengths", "d128.bf16.page=16.lengths.k=align2"])
def test_no_cache_is_copied(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreting.VARIABLE, raising=False)
    (reason,) = backend.supports(Problem.parse(f"b8.h8.s1x4096.{text}"), Device.named("h200"))
    assert "copy" in reason


if __name__ == "__main__":
    interpreting.tell(INTERPRETED)
