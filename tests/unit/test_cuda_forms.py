"""Sinks, ALiBi and pages: which CUDA kernels take them, and the portable ones' results in the emulator.

These are held to ``reference`` and laws that it obeys. A sink scales the output by sigmoid(lse - sink), ALiBi is a
float mask, and pages are keys that were gathered.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.machine.backend import Inputs, Offsets
from attnswitch.machine.device import Device
from attnswitch.planning.forecast import of_itself
from attnswitch.problem import Mask

arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
backend = importlib.import_module("attnswitch.backends.cuda.backend")
classes = importlib.import_module("attnswitch.backends.cuda.classes")
config = importlib.import_module("attnswitch.backends.cuda.config")
emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
families = importlib.import_module("attnswitch.backends.cuda.families")
reference = importlib.import_module("attnswitch.backends.reference")
splits = importlib.import_module("attnswitch.backends.cuda.portable.splits")
tiles = importlib.import_module("attnswitch.backends.cuda.portable.tiles")
compiled = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

#: How near results are to those of the same operands in float64, relative to the largest.
NEAR = {"float32": 3e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2e-2}
CPU = Device.cpu()
Array = npt.NDArray[Any]


# -- what is expected --------------------------------------------------------------------------------------------------


class Call:
    """A problem and its operands in float64, rounded to its dtype; queries and keys of each batch entry by length."""

    def __init__(self, text: str, lengths: Any = None, queries: Any = None, sinks: Any = None, seed: int = 0) -> None:
        p = self.problem = Problem.parse(text)
        draw = np.random.default_rng(seed)
        self.lengths = [p.seq_k] * p.batch if lengths is None else list(lengths)
        self.queries = [p.seq_q] * p.batch if queries is None else list(queries)

        def of(*shape: int) -> Array:
            return self.rounded(draw.standard_normal(shape))

        self.query = [of(p.heads_q, n, p.dim_qk) for n in self.queries]
        self.grad = [of(p.heads_q, n, p.dim_v) for n in self.queries]
        self.key = [of(p.heads_kv, n, p.dim_qk) for n in self.lengths]
        self.value = [of(p.heads_kv, n, p.dim_v) for n in self.lengths]
        self.grad_lse = [draw.standard_normal((p.heads_q, n)) for n in self.queries]
        self.sinks = draw.standard_normal(p.heads_q) if sinks is None else np.array(sinks, float)
        self.slopes = draw.uniform(0.01, 1, (p.batch if p.batch % 2 else 1, p.heads_q))
        self.mask: Array | None = None
        if p.mask is not None:
            self.mask = draw.standard_normal((p.batch, 1, p.seq_q, p.seq_k)).astype(p.mask.dtype).astype(float)
        self.pages = draw.permutation(p.batch * (p.seq_k // p.page) + 3) if p.page else None
        self.trees = [draw.random((n, p.seq_q)) < 0.6 for n in self.queries]

    def rounded(self, array: Array) -> Array:
        return torch.from_numpy(array).to(getattr(torch, self.problem.dtype)).double().numpy()

    def expected(self) -> list[list[Array]]:
        """Output, lse and gradients of query, key and value of each batch entry."""
        return [list(each) for each in zip(*map(self._entry, range(self.problem.batch)), strict=True)]

    def _entry(self, b: int) -> list[Array]:
        """Of one batch entry, with ALiBi as a mask."""
        p = self.problem
        lq, lk = self.queries[b], self.lengths[b]
        plain = p.replace(
            batch=1, seq_q=lq, seq_k=lk, dtype="float64", varlen=False, page=0, splits=0, sinks=False, alibi=False,
            key_lengths=False, mask=None, lse=True, grads="qkv", tree=False,
        )  # fmt: skip
        mask = np.zeros((1, p.heads_q, lq, lk)) if self.mask is None else self.mask[b, :, :lq, :lk][None]
        if p.alibi:
            centre = np.arange(lq)[:, None] + (lk - lq if p.bottom_right else 0)
            apart = np.abs(centre - np.arange(lk)[None, :])
            mask = mask - self.slopes[b % len(self.slopes)][None, :, None, None] * apart
        for j in range(max(0, lk - lq), lk if p.tree else 0):
            mask[..., j] = np.where(self.trees[b][:, j - (lk - lq)], mask[..., j], -np.inf)
        if lq and lk:
            plain = plain.replace(mask=Mask("float64", "hqk"))
        given = Inputs(
            self.query[b][None], self.key[b][None], self.value[b][None], mask if plain.mask else None, seed=7
        )
        kernel = reference.ReferenceKernel(plain, b)
        out, lse = kernel.forward(given)
        if p.sinks:
            sink = self.sinks[None, :, None]
            whole = np.logaddexp(lse, sink)
            with np.errstate(invalid="ignore"):
                out = out * np.where(np.isfinite(whole), np.exp(lse - whole), 1)[..., None]
            lse = whole
        grads = kernel.backward(given, out, lse, self.grad[b][None], np.where(np.isfinite(lse), self.grad_lse[b], 0.0))
        return [array[0] for array in (out, lse, *grads[:3])]

    # -- what is given -------------------------------------------------------------------------------------------------

    def inputs(self, garbage: float = np.nan) -> Inputs:
        """As a kernel is given them; ``garbage`` lies where nothing is to be read."""
        p = self.problem
        query = self._rows(self.query, p.seq_q, p.varlen)
        real = "float64" if p.dtype == "float64" else "float32"
        offsets = None
        if p.varlen:
            starts = torch.tensor([0, *itertools.accumulate(self.queries)], dtype=torch.int32)
            ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int64)
            offsets = Offsets(starts, torch.full_like(starts, -9) if p.page else ends)
        table = None
        if p.page:
            key, value, table = self._cache(garbage)
        else:
            key, value = (self._rows(each, p.seq_k, p.varlen, garbage) for each in (self.key, self.value))
        mask = None
        if self.mask is not None and p.mask is not None:
            mask = torch.from_numpy(self.mask).to(getattr(torch, p.mask.dtype))
        return Inputs(
            query,
            key,
            value,
            mask,
            torch.tensor(self.lengths, dtype=torch.int32) if p.key_lengths else None,
            7 if p.dropout else None,
            offsets,
            torch.from_numpy(self.sinks).to(getattr(torch, real)) if p.sinks else None,
            torch.from_numpy(self.slopes).to(getattr(torch, real)) if p.alibi else None,
            table,
            tree_mask=self._bits() if p.tree else None,
        )

    def _bits(self) -> torch.Tensor:
        """Those of the trees; of queries that a sequence does not have they are drawn too."""
        drawn = [np.packbits(tree, axis=-1, bitorder="little") for tree in self.trees]
        bits = [np.pad(rows, ((0, 0), (0, 1)), constant_values=255) for rows in drawn]
        return torch.from_numpy(np.concatenate(bits)[None] if self.problem.varlen else np.stack(bits))

    def _rows(self, entries: list[Array], length: int, packed: bool, garbage: float = 0.0) -> torch.Tensor:
        if packed:
            array = np.concatenate(entries, 1)[None]
        else:
            heads, _, dim = entries[0].shape
            array = np.full((len(entries), heads, length, dim), garbage)
            for b, entry in enumerate(entries):
                array[b, :, : entry.shape[1]] = entry
        return torch.from_numpy(array).to(getattr(torch, self.problem.dtype))

    def _cache(self, garbage: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Caches (P, Hkv, page, D) of (P, page, Hkv, D) in memory, and a table that past the lengths leads nowhere."""
        p, pages = self.problem, self.pages
        assert pages is not None
        each = p.seq_k // p.page
        caches = [np.full((len(pages), p.page, p.heads_kv, dim), garbage) for dim in (p.dim_qk, p.dim_v)]
        table = np.full((p.batch, each), 2**31 - 1 if garbage == garbage else -(2**31), np.int64)
        for b, length in enumerate(self.lengths):
            for j in range(length):
                table[b, j // p.page] = page = pages[b * each + j // p.page]
                for cache, entries in zip(caches, (self.key, self.value), strict=True):
                    cache[page, j % p.page] = entries[b][:, j]
        width = torch.int64 if p.page % 2 else torch.int32
        key, value = (torch.from_numpy(cache).to(getattr(torch, p.dtype)).transpose(1, 2) for cache in caches)
        return key, value, torch.from_numpy(table).to(width)

    def by_entry(self, array: torch.Tensor, by_query: bool) -> list[Array]:
        """An output, lse or gradient of each batch entry."""
        sizes = self.queries if by_query else self.lengths
        found = array.double().numpy()
        if self.problem.varlen:
            edges = [0, *itertools.accumulate(sizes)]
            return [found[0, :, begin:end] for begin, end in itertools.pairwise(edges)]
        return [found[b, :, :size] for b, size in enumerate(sizes)]


def run(call: Call, chosen: Any = None, **given: Any) -> tuple[torch.Tensor, ...]:
    """Output, lse and, where the problem has them, gradients by ``cuda``."""
    p, cuda = call.problem, backend.CudaBackend()
    kernel = cuda.compile(p, CPU, chosen or next(cuda.configs(p, CPU)))
    inputs = call.inputs(**given)
    out, lse = kernel.forward(inputs)
    if not p.grads:
        return out, lse
    grad_lse = call._rows([array[..., None] for array in call.grad_lse], p.seq_q, p.varlen)[..., 0].to(lse.dtype)
    grad = call._rows(call.grad, p.seq_q, p.varlen)
    grad_lse = torch.where(torch.isfinite(lse), grad_lse, 0)
    return out, lse, *kernel.backward(inputs, out, lse, grad, grad_lse)[:3]


def compare(call: Call, chosen: Any = None) -> tuple[torch.Tensor, ...]:
    """What ``cuda`` makes of a call is near to what is expected."""
    found = run(call, chosen)
    for number, (got, right) in enumerate(zip(found, call.expected(), strict=False)):
        for one, other in zip(call.by_entry(got, number < 3), right, strict=True):
            size = max(1.0, np.abs(other[np.isfinite(other)]).max(initial=0))
            np.testing.assert_allclose(one, other, rtol=0, atol=NEAR[call.problem.dtype] * size, err_msg=str(number))
    return found


FORMS = {"sinks": ".sinks", "alibi": ".alibi", "both": ".sinks.alibi"}


# -- what is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("form", ["alibi", "sinks.alibi", "lengths.page=16", "varlen.alibi"])
def test_it_takes_them_and_hoppers_kernels_say_why_not(form: str, device: str) -> None:
    cuda, where = backend.CudaBackend(), Device.named(device)
    p = Problem.parse(f"b4.h16/4.s1024x2048.d128.bf16.causal-br.{form}{'' if 'page' in form else '.grad'}")
    assert cuda.supports(p, where) == ()
    hoppers = device == "h200" and "page" not in form
    first, *others = cuda.configs(p, where)
    assert isinstance(first.forward, tiles.Tile) != hoppers
    assert (first.backward is None) != hoppers
    assert hoppers or all(isinstance(each.forward, tiles.Tile) and each.backward is None for each in others)
    for against in (families.against_hopper, families.against_hopper_backward):
        for name in ("sinks", "alibi", "page"):
            said = [reason for reason in against(p, Device.named("h200")) if reason.startswith(name)]
            assert bool(said) == (name in form and name == "page")
    assert (families.beside_hopper(p, Device.named("h200")) > 1) == (p.page > 0)


@pytest.mark.parametrize(("page", "measured"), [(16, "triton"), (64, "cuda")])
def test_pages_smaller_than_a_tile_go_to_whom_they_cost_less(page: int, measured: str) -> None:
    """As fixtures/results/h200/bench-pages.json has it: 0.206 ms and 0.190, 0.150 and 0.189."""
    p = Problem.parse(f"b64.h32/8.s8x4096.d128.bf16.causal-br.lengths.page={page}")
    expected = of_itself(p, Device.named("h200")).ms
    assert min(("cuda", "triton"), key=expected.__getitem__) == measured


@pytest.mark.parametrize("page", [1, 2, 3, 4, 5, 8, 16, 24, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
def test_a_warp_has_a_lane_for_each_page_of_a_tile(keys: int, page: int) -> None:
    """Wherever in a page the tile begins; else each copy looks for its own."""
    way = tiles.paged(Problem.parse(f"b1.h1.s1x{4 * page}.d64.bf16.lengths.page={page}"), tiles.Tile(16, keys, 4, 1))
    most = max(-(-(first + keys) // page) for first in range(page))
    assert way == (2 if page % keys == 0 else 1 if most <= 32 else 3)


def test_hopper_takes_sinks_and_costs_what_it_does_without() -> None:
    p, where = Problem.parse("b4.h16/4.s1024x2048.d128.bf16.causal-br.sinks.grad"), Device.named("h200")
    chosen, plain = (next(config.configs(each, where)) for each in (p, p.replace(sinks=False)))
    assert str(chosen) == str(plain)
    assert chosen.backward is not None
    assert families.beside_hopper(p, where) == 1.0
    assert not {"hopper", "fused"} & {each.family for each in _variants(p, Device.named("a100"))}


def _variants(p: Problem, where: Device) -> Any:
    cuda = backend.CudaBackend()
    return cuda.compile(p, where, next(cuda.configs(p, where))).variants()


def test_hoppers_gradients_know_of_sinks_by_the_lse_alone() -> None:
    where, with_sinks = Device.named("h200"), Problem.parse("b4.h16/4.s1024.d128.bf16.sinks.grad")
    for p in (with_sinks, with_sinks.replace(mask=Mask("bool", "bk")), with_sinks.replace(deterministic=True)):
        kernels, plain = ({v.kernel: v for v in _variants(each, where)} for each in (p, p.replace(sinks=False)))
        assert {name for name in plain if plain[name] != kernels[name]} == {"forward"}
        assert dict(kernels["forward"].flags)["SINKS"] == 1
    added = {v.kernel: dict(v.flags) for v in _variants(with_sinks.replace(mask=Mask("bfloat16")), where)}
    assert (added["forward"]["SINKS"], added["prepare_added"]["SINKS"]) == (1, 1)


@pytest.mark.parametrize("form", [{"sinks": True}, {"alibi": True}, {"page": 16}, {"page": 16, "tree": True}], ids=str)
def test_a_form_makes_a_class_of_its_own(form: dict[str, Any]) -> None:
    p = Problem.parse("b4.h4.s64.d64.bf16.causal-br.lengths")
    less = p.replace(page=16) if "tree" in form else p
    assert classes._results(less) is not classes._results(p.replace(**form))


@pytest.mark.parametrize("text", ["b4.h16.s1024.d64.bf16.grad", "b1.h2.s64.d20.fp32.grad"], ids=["own", "generic"])
def test_each_kernel_is_compiled_for_what_it_computes_of_a_form(text: str) -> None:
    """A sink is nothing to gradients but the lse, unless that is renewed: they share kernels with what has none."""
    cuda, where = backend.CudaBackend(), Device.named("a100")

    def flags(more: str) -> dict[str, dict[str, int]]:
        p = Problem.parse(f"{text}.{more}")
        variants = cuda.compile(p, where, next(cuda.configs(p, where))).variants()
        return {variant.kernel: dict(variant.flags) for variant in variants}

    plain, with_sinks, with_alibi = flags("causal"), flags("causal.sinks"), flags("causal.alibi")
    assert {kernel for kernel in plain if plain[kernel] != with_sinks[kernel]} == {"forward"}
    assert with_sinks["forward"]["SINKS"] == 1
    assert {kernel for kernel, each in with_alibi.items() if each.get("ALIBI")} == set(plain) - {"prepare"}
    added = flags("mask=fp32.sinks")
    assert added["prepare_added"]["SINKS"] == 1
    assert "SINKS" not in added["query_gradient"]


# -- what is computed --------------------------------------------------------------------------------------------------

ROOMS = {
    "own": "b2.h4/2.s37x53.d24/40.fp32",
    "generic": "b2.h4/2.s37x64.d24/40.fp32",
    "tensor": "b2.h4/2.s37x53.d32.bf16",
    "double": "b2.h4/2.s11x23.d16.fp64",
    "few": "b2.h4/2.s2x53.d32.fp16",
}
MORE = {
    "plain": "",
    "causal": ".causal",
    "bottom-right": ".causal-br",
    "window": ".window=9,3",
    "bottom-right-window": ".bottom-right.window=7,20",
    "softcap": ".softcap=1.5.scale=-0.4",
    "mask": ".mask=fp32:bqk",
}


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_results_are_those_of_the_reference(room: str, more: str, form: str) -> None:
    compare(Call(f"{room}{more}{form}.lse.grad"))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("more", ["", ".causal-br", ".bottom-right", ".window=9,3"])
@pytest.mark.parametrize("room", ["own", "generic", "few"])
def test_of_lengths(room: str, more: str, form: str) -> None:
    if more == ".bottom-right" and "alibi" not in form:
        pytest.skip("no alignment")
    compare(Call(f"{ROOMS[room]}{more}{form}.lse.lengths", lengths=[0, 31]))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("form", ["sinks", "alibi.causal-br", "sinks.alibi.bottom-right.dropout=0.3.seeded"])
@pytest.mark.parametrize(
    ("queries", "keys"), [((37, 5, 0, 20, 33), (53, 9, 7, 0, 33)), ((1, 1, 1), (53, 0, 9))], ids=["many", "decoding"]
)
@pytest.mark.parametrize("longest", [53, 64], ids=["own", "generic"])
def test_sequences_one_after_another(longest: int, queries: Any, keys: Any, form: str) -> None:
    grad = ".grad" if max(queries) > 1 else ""
    text = f"b{len(keys)}.h4/2.s{max(queries)}x{longest}.d24/40.fp32.varlen.{form}.lse{grad}"
    compare(Call(text, keys, queries))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("queries", "kind"), [(1, "merged"), (4, "merged"), (20, "parts"), (70, "whole")])
@pytest.mark.parametrize("sinks", [(0.5, -3.0, 2.0, 40.0), (-np.inf, 1e4, -1e4, 0.0)], ids=["usual", "extreme"])
@pytest.mark.parametrize("room", ["d32.fp32", "d32.bf16", "d16.fp64", "d32.fp32.mask=fp32:bqk"])
def test_a_sink_is_counted_once_whatever_its_size(room: str, sinks: Any, queries: int, kind: str) -> None:
    """However keys are split; a row that sees nothing has the sink's lse, and -inf is no sink at all."""
    call = Call(f"b2.h4/2.s{queries}x53.{room}.sinks.lse.lengths", lengths=[53, 0], sinks=sinks)
    p, cuda = call.problem, backend.CudaBackend()
    kernel = cuda.compile(p, CPU, next(cuda.configs(p, CPU)))
    how = {0: "whole", 1: "parts", 2: "merged"}[dict(kernel.variants()[0].flags)["SPLIT"]]
    assert how == kind
    out, lse = compare(call)
    assert torch.all(out[1] == 0)
    assert torch.equal(lse[1], torch.tensor(sinks, dtype=lse.dtype)[:, None].expand(4, queries))
    without = p.replace(sinks=False)
    bits, same = cuda.compile(without, CPU, next(cuda.configs(without, CPU))).forward(call.inputs())
    for head in np.flatnonzero(np.isneginf(sinks)):
        assert torch.equal(out[0, head], bits[0, head])
        assert torch.equal(lse[0, head], same[0, head])


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("alibi", ["", ".alibi"])
@pytest.mark.parametrize("sink", [-1e9, 3.0, 1e9])
def test_a_row_that_a_mask_saturates_counts_its_sink(sink: float, alibi: str) -> None:
    """There lse has no digits for the sum, and the backward renews it: with the sink, whose weight is that of a key."""
    call = Call(f"b2.h4/2.s8x21.d16.fp32.mask=fp32:bqk.sinks{alibi}.lse.grad", sinks=[sink] * 4)
    assert call.mask is not None
    call.slopes[:] = 0.0
    call.mask[:, :, 2:6] = np.float32(-1e9)
    call.key[0][:] = call.key[1][:] = 0.0  # equal scores, to the last digit that is left
    found = run(call)
    p, inputs = call.problem, call.inputs()
    weights = np.full((2, 4, 8), {-1e9: 1 / 22, 3.0: 0.0, 1e9: 0.0}[sink])
    rows = slice(2, 6)
    share = torch.from_numpy(weights)[..., rows, None].float()
    grad = torch.from_numpy(np.stack(call.grad)).float()
    mean = inputs.value.float().mean(2).repeat_interleave(2, 1)[:, :, None]
    torch.testing.assert_close(found[0][:, :, rows], (21 * share * mean).expand(-1, -1, 4, -1), rtol=1e-5, atol=1e-6)
    alone = Call(f"{str(p).replace('.grad', '.grad=v')}", sinks=[sink] * 4)
    alone.mask, alone.slopes, alone.key = call.mask, call.slopes, call.key
    alone.grad = [np.where(np.isin(np.arange(8), range(2, 6))[None, :, None], each, 0) for each in call.grad]
    by_value = run(alone)[4]
    expected = (share * grad[:, :, rows]).sum(2).reshape(2, 2, 2, -1).sum(2)[:, :, None].expand(-1, -1, 21, -1)
    torch.testing.assert_close(by_value, expected, rtol=1e-5, atol=1e-6)


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("page", [1, 3, 16, 24, 64])
@pytest.mark.parametrize("more", [".causal-br", "", ".causal-br.window=20,0", ".softcap=2.0", ".sinks.alibi.causal-br"])
@pytest.mark.parametrize(
    "room", ["s1.d32.bf16", "s3.d24/40.fp32", "s40.d32.fp16", "s9.d20.fp64"], ids=["decode", "few", "many", "strided"]
)
def test_pages_are_keys_that_were_gathered(room: str, more: str, page: int) -> None:
    """NaN lies in what no sequence has, and entries past a length lead nowhere."""
    queries, _, kind = room.partition(".")
    call = Call(
        f"b4.h4/2.{queries}x{192 // page * page}.{kind}.lengths.page={page}.lse{more}", [100, 0, 17, 192 // page * page]
    )
    compare(call)


@compiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("page", "way"), [(1, 3), (2, 3), (3, 1), (16, 1), (64, 2)])
def test_tiles_of_many_keys_over_pages(page: int, way: int) -> None:
    """What the emulator chooses by itself has 16 keys, of which no lane past the 16th has a page."""
    tile = tiles.Tile(16, 64, 1, 2)
    call = Call(f"b3.h4/2.s3x{192 // page * page}.d32.bf16.lengths.page={page}.causal-br.lse", [130, 0, 64])
    assert tiles.paged(call.problem, tile) == way
    other = tiles.Tile(32, 32, 1, 1)
    compare(call, config.CudaConfig(tile, other, other, other))


def test_pages_are_numbered_in_32_bits() -> None:
    call = Call("b1.h1.s1x16.d8.bf16.lengths.page=1")
    inputs, constants = call.inputs(), arguments.constants(call.problem)
    arguments.of_call(constants, inputs)
    steps = 0, *inputs.key.stride()[1:]
    with pytest.raises(attnswitch.Unsupported, match="a cache of 4294967296 pages"):
        arguments.of_call(constants, inputs._replace(key=inputs.key.as_strided((2**32, *inputs.key.shape[1:]), steps)))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("page", [3, 16])
@pytest.mark.parametrize("more", ["causal-br", "sinks.alibi.causal-br"])
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (7, 0, 20, 3)], ids=["decoding", "mixed"])
@pytest.mark.parametrize("splits", [0, 1, 4])
def test_pages_of_packed_queries(splits: int, queries: Any, more: str, page: int) -> None:
    """The offsets of keys are none, and are not read."""
    fixed = f".splits={splits}" if splits else ""
    text = f"b4.h4/2.s{max(queries)}x96.d32.bf16.lengths.page={page}.lse.varlen.{more}{fixed}"
    compare(Call(text, [96, 50, 20, 0], queries))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("more", [".causal-br", "", ".window=30,3.softcap=2.0", ".sinks.alibi.causal-br", ".splits=3"])
@pytest.mark.parametrize(
    ("room", "page"),
    [("s1.d32.bf16", 16), ("s3.d24/40.fp32", 3), ("s12.d32.fp16", 64), ("s40.d32.bf16", 24), ("s9.d20.fp64", 1)],
    ids=["decode", "few", "more than a byte", "many", "strided"],
)
def test_trees_are_masks_of_the_newest_keys(room: str, page: int, more: str) -> None:
    """As many queries as keys, fewer keys than queries, and older keys that end within a tile."""
    queries, _, kind = room.partition(".")
    count = int(queries[1:])
    text = f"b4.h4/2.{queries}x{96 // page * page}.{kind}.lengths.page={page}.tree.lse{more}"
    compare(Call(text, [50, count, count // 2, 96 // page * page]))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (7, 0, 20, 3)], ids=["decoding", "mixed"])
@pytest.mark.parametrize("splits", ["", ".splits=4"])
def test_trees_of_packed_queries(splits: str, queries: Any) -> None:
    text = f"b4.h4/2.s{max(queries)}x96.d32.bf16.lengths.page=16.tree.lse.varlen.causal-br{splits}"
    compare(Call(text, [96, 50, 20, 0], queries))


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_pages_that_others_have_change_no_bit() -> None:
    """A page that two sequences share, garbage past the lengths, and where pages lie."""
    call = Call("b2.h4/2.s2x64.d32.bf16.lengths.page=8.lse.causal-br", [50, 50])
    call.key[1], call.value[1] = call.key[0].copy(), call.value[0].copy()
    assert call.pages is not None
    out, lse = run(call)
    call.pages[8:12] = call.pages[:4]
    shared = run(call, garbage=1e30)
    assert torch.equal(out, shared[0])
    assert torch.equal(lse, shared[1])


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("splits", [1, 2, 5, 30])
@pytest.mark.parametrize("more", ["causal-br", "causal-br.window=30,0", "causal-br.sinks"])
@pytest.mark.parametrize("varlen", ["", ".varlen"])
def test_splits_that_are_asked_for_leave_a_sequence_its_bits(varlen: str, more: str, splits: int) -> None:
    """Alone, with a table of its own length, and among others that are longer."""
    form = f"d32.bf16.lengths.page=8.splits={splits}.lse.{more}{varlen}"
    queries = [3, 2, 30] if varlen else [2, 2, 2]
    call = Call(f"b3.h4/2.s{max(queries)}x160.{form}", [9, 77, 160], queries)
    out, lse = compare(call)
    alone = Call(f"b1.h4/2.s{queries[1]}x80.{form}", [77], queries[1:2])
    alone.query, alone.key, alone.value, alone.sinks = call.query[1:2], call.key[1:2], call.value[1:2], call.sinks
    found = run(alone)
    for whole, part in zip((out, lse), found, strict=True):
        np.testing.assert_array_equal(call.by_entry(whole, True)[1], alone.by_entry(part, True)[0])


def test_splits_that_are_asked_for_depend_on_no_batch() -> None:
    cuda = backend.CudaBackend()
    for device, varlen in itertools.product(map(Device.named, ("h200", "a100", "rtx3090")), ("", ".varlen")):
        chosen = set()
        for batch, queries, keys in itertools.product((1, 300), (1, 40, 3000) if varlen else (1,), (16, 8192)):
            p = Problem.parse(f"b{batch}.h32/8.s{queries}x{keys}.d128.bf16.lengths.page=16.splits=6.causal-br{varlen}")
            (only,) = cuda.configs(p, device)
            assert only.splits == 6
            kernel = cuda.compile(p, device, only)
            chosen.add((only, kernel._forward.constants.pack, kernel.variants()[0].teams))
        assert len(chosen) == 1


@compiled
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("parts", "most"), [(1, 24), (3, 24), (3, 2)], ids=["whole", "merged", "parts"])
@pytest.mark.parametrize("keys", [8, 16], ids=str)
def test_warps_apart_with_rows_in_several_tiles(
    keys: int, parts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiles.Tile(32, 32, 1, 1)
    monkeypatch.setattr(splits, "_MOST_MERGED", most)
    for form in (f"page={keys}.lengths", "lengths.grad"):
        tile = tiles.Tile(16, 16, 3, 2, apart=True)
        chosen = config.CudaConfig(tile, other, other, replace(other, stages=1), splits=parts)
        compare(Call(f"b3.h4/2.s30x64.d32.fp32.{form}.sinks.alibi.causal-br.lse", [53, 9, 0]), chosen)
