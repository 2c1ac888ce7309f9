"""The Triton backend's own way with sequences one after another, interpreted and held against the reference.

The checks run in one process that has TRITON_INTERPRET=1: see ``interpreting``.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import interpreting
import pytest
import torch

import attnswitch
from attnswitch import Problem
from attnswitch.call import finite
from attnswitch.machine.device import Device

pytest.importorskip("triton", "3.6")
pytestmark = pytest.mark.slow

arguments = importlib.import_module("attnswitch.backends.triton.arguments")
backend = importlib.import_module("attnswitch.backends.triton.backend")
config = importlib.import_module("attnswitch.backends.triton.config")

#: Rows of queries and of keys of each sequence: none first, in the middle and last, of queries, of keys and of both.
LENGTHS = ((0, 9), (33, 18), (3, 0), (9, 33), (0, 0))
#: By element type, how near results are.
NEAR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}
BOTTOM: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}


@dataclass(frozen=True)
class Case:
    """A call, and what lies where. ``past`` rows of queries and of keys belong to no sequence and hold NaN."""

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (8, 8)
    past: tuple[int, int] = (7, 5)
    dtype: torch.dtype = torch.float32
    offsets: torch.dtype = torch.int32
    lie: str = "plain"
    #: What the most queries and keys are said to be, where it is more.
    said: tuple[int, int] = (0, 0)
    #: Which sequence holds nothing but NaN.
    nan: int | None = None


CASES = {
    "plain": Case(heads=(2, 2)),
    "causal": Case({"is_causal": True}),
    "causal, bottom right": Case(BOTTOM),
    "window": Case({"window": (9, 4)}),
    "window, bottom right": Case({"window": (12, None), **BOTTOM}),
    "softcap": Case({"softcap": 2.0}),
    "negative scale": Case({"scale": -0.3}),
    "grouped heads": Case({"is_causal": True}, heads=(4, 2)),
    "unequal dimensions": Case(BOTTOM, dims=(17, 33)),
    "float16": Case(BOTTOM, dtype=torch.float16, dims=(16, 16)),
    "bfloat16": Case(BOTTOM, dtype=torch.bfloat16, dims=(16, 24)),
    "offsets of 64 bits": Case(BOTTOM, offsets=torch.int64),
    "deterministic": Case({"deterministic": True}),
    "dropout": Case({"dropout_p": 0.4, "seed": 3}),
    "dropout, causal, grouped": Case({"dropout_p": 0.4, "seed": 3, **BOTTOM}, heads=(4, 2)),
    "nothing past the end": Case({"is_causal": True}, past=(0, 0)),
    "much past the end": Case(past=(150, 170), heads=(2, 2)),
    "NaN beside": Case(nan=1),
    "transposed": Case(BOTTOM, lie="transposed", heads=(2, 2)),
    "strided": Case(BOTTOM, lie="strided", heads=(2, 1)),
    "a slice": Case(BOTTOM, lie="slice", heads=(2, 2)),
    "one sequence": Case(BOTTOM, lengths=((70, 70),), past=(0, 0)),
    "many": Case(BOTTOM, lengths=tuple((n % 5, n % 7) for n in range(9))),
    # Few queries: heads that share keys in one tile, and split keys.
    "decoding": Case(BOTTOM, lengths=((1, 70), (1, 1), (0, 3), (1, 0), (1, 35)), heads=(4, 2)),
    "decoding, a head for each": Case(lengths=((1, 70), (1, 1), (0, 3), (1, 0), (1, 35))),
    "decoding, window": Case({"window": (40, 0), **BOTTOM}, lengths=((1, 70), (2, 50), (3, 33)), heads=(4, 2)),
    "decoding, dropout": Case({"dropout_p": 0.4, "seed": 3}, lengths=((1, 50), (2, 31), (3, 33)), heads=(4, 1)),
    "decoding, float16": Case(
        BOTTOM, lengths=((1, 50), (2, 31), (3, 33)), heads=(6, 2), dtype=torch.float16, dims=(16, 16)
    ),
    "few queries, few keys": Case(BOTTOM, lengths=((3, 9), (2, 1), (4, 12)), heads=(4, 2)),
    "few queries, softcap": Case({"softcap": 2.0}, lengths=((3, 50), (0, 9), (4, 12)), heads=(4, 2)),
    # Nothing at all.
    "no sequences": Case(lengths=()),
    "no sequences, no rows": Case(lengths=(), past=(0, 0)),
    "no rows": Case(lengths=((0, 0), (0, 0)), past=(0, 0)),
    "no rows, more said": Case(lengths=((0, 0), (0, 0)), past=(0, 0), said=(20, 20)),
    "no sequences, more said": Case(lengths=(), said=(20, 20)),
    "rows past the end alone": Case(lengths=((0, 0),), said=(20, 20)),
    "queries of no keys": Case(lengths=((5, 0),), said=(20, 20)),
    "keys of no queries": Case(lengths=((0, 5),), past=(0, 3), said=(20, 20)),
    "decoding, nothing there": Case(lengths=((0, 0), (0, 3)), said=(1, 50), heads=(4, 2)),
    "no queries": Case(lengths=((0, 5), (0, 40))),
    "no queries, no rows": Case(lengths=((0, 5), (0, 40)), past=(0, 3)),
    "no keys": Case(lengths=((5, 0), (40, 0))),
    "no keys, no rows": Case(lengths=((5, 0), (40, 0)), past=(3, 0)),
}
GENERIC = (
    "plain", "causal", "causal, bottom right", "window, bottom right", "softcap", "unequal dimensions", "bfloat16",
    "dropout", "NaN beside", "strided", "few queries, few keys", "much past the end", "no keys",
)  # fmt: skip
#: The interpreter takes seconds for each.
AT_NIGHT = [f"{name}, generic" for n, name in enumerate(GENERIC) if n % 4]
INTERPRETED: dict[str, Callable[[], None]] = {}


def interpreted(check: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test of what ``check`` raised in the process that interprets."""
    INTERPRETED[check.__name__] = check

    def test(raised: dict[str, str]) -> None:
        assert raised[check.__name__] == "", raised[check.__name__]

    return test


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each of the checks raised, "" for nothing; skips where this interpreter does not work."""
    return interpreting.raised(__file__, *(name for name in INTERPRETED if name not in AT_NIGHT))


@pytest.fixture(scope="module")
def raised_at_night() -> dict[str, str]:
    return interpreting.raised(__file__, *AT_NIGHT)


# -- beside the reference ----------------------------------------------------------------------------------------------


def edges(lengths: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def placed(array: torch.Tensor, lie: str) -> torch.Tensor:
    """The same (T, H, D) in memory that lies otherwise."""
    if lie == "transposed":  # heads outside
        return array.transpose(0, 1).contiguous().transpose(0, 1)
    if lie == "strided":
        rows, heads, dim = array.shape
        return torch.zeros(rows, heads, 2 * dim, dtype=array.dtype)[..., ::2].copy_(array)
    if lie == "slice":  # as of one projection to all of query, key and value
        return torch.zeros(len(array), 3 * array.shape[1], array.shape[2], dtype=array.dtype)[:, 1::3].copy_(array)
    return array


def operands(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Query, key and value, and the offsets of queries and of keys."""
    draw = torch.Generator().manual_seed(0)
    cu = [edges(tuple(pair[n] for pair in case.lengths), case.offsets) for n in (0, 1)]
    arrays = []
    dim, dim_v = case.dims
    for n, width in ((0, dim), (1, dim), (1, dim_v)):
        end = int(cu[n][-1])
        array = torch.randn(end + case.past[n], case.heads[n], width, generator=draw)
        array[end:] = math.nan
        if case.nan is not None:
            array[cu[n][case.nan] : cu[n][case.nan + 1]] = math.nan
        arrays.append(placed(array.to(case.dtype), case.lie))
    return arrays, cu


def attend(
    name: str, arrays: list[torch.Tensor], cu: list[torch.Tensor], longest: list[int], options: dict[str, Any]
) -> Any:
    query, key, value = arrays
    most = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    said: dict[str, Any] = {**most, **options, "return_lse": True, "backend": name}
    return attnswitch.attention_varlen(query, key, value, cu[0], cu[1], **said)


def results(name: str, case: Case, odd: bool) -> list[torch.Tensor]:
    """Output, lse and gradients, of upstream gradients that hold NaN where no sequence is."""
    arrays, cu = operands(case)
    leaves = [array.requires_grad_() for array in arrays]
    longest = [max((case.said[n], *(pair[n] for pair in case.lengths))) for n in (0, 1)]
    if longest[1]:
        longest[1] += longest[1] % 2 != odd
    with finite.checking("never"):
        out, lse = attend(name, leaves, cu, longest, case.options)
        draw = torch.Generator().manual_seed(1)
        upstream, of_lse = torch.randn(out.shape, generator=draw).to(case.dtype), torch.randn(lse.shape, generator=draw)
        upstream[int(cu[0][-1]) :] = math.nan
        of_lse[:, int(cu[0][-1]) :] = math.nan
        of_lse = torch.where(lse == -math.inf, 0.0 if name == "reference" else of_lse, of_lse)
        grads = torch.autograd.grad((out, lse), leaves, (upstream, of_lse))
    return [out.detach(), lse.detach(), *grads]


def check(case: Case, odd: bool) -> None:
    wanted, got = (results(name, case, odd) for name in ("reference", "triton"))
    near = NEAR[case.dtype]
    for what, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        assert one.dtype == other.dtype, what
        assert one.shape == other.shape, what
        torch.testing.assert_close(
            one,
            other,
            rtol=near,
            atol=near,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",  # noqa: B023
        )


INTERPRETED |= {name: functools.partial(check, case, True) for name, case in CASES.items()}
INTERPRETED |= {f"{name}, generic": functools.partial(check, CASES[name], False) for name in GENERIC}


@pytest.mark.parametrize("name", [name for name in INTERPRETED if name not in AT_NIGHT])
def test_it_agrees_with_the_reference(name: str, raised: dict[str, str]) -> None:
    assert raised[name] == "", raised[name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", AT_NIGHT)
def test_it_agrees_in_all_other_cases(name: str, raised_at_night: dict[str, str]) -> None:
    assert raised_at_night[name] == "", raised_at_night[name]


@pytest.mark.parametrize(
    ("text", "generic", "splits"),
    [
        ("b5.h2.s33x33.d8.fp32.varlen", False, 1),
        ("b5.h2.s33x34.d8.fp32.varlen", True, 1),
        ("b5.h4/2.s1x71.d8.fp32.causal-br.varlen", False, 2),
    ],
)
def test_the_cases_have_the_kernels_that_they_say(text: str, generic: bool, splits: int) -> None:
    chosen = next(config.configs(Problem.parse(text), Device.cpu()))
    assert (chosen.forward.generic, chosen.splits) == (generic, splits)


# -- on the host -------------------------------------------------------------------------------------------------------


def test_what_the_backward_keeps_grows_with_the_rows() -> None:
    """Not with the sequences times the longest; and each sequence lies in whole tiles, whatever lengths they have."""
    problem = Problem.parse("b8.h2.s4096.d64.bf16.varlen.grad")
    assert arguments.padded(problem, 5000) == (39 + 8) * 128
    for lengths in ((0, 1, 127, 128, 129, 0, 4096, 5), (4096, 0, 0, 0, 0, 0, 0, 0), (1,) * 8):
        begins = [0, *itertools.accumulate(lengths)]
        padded = [(begin + number * 128) // 128 * 128 for number, begin in enumerate(begins)]
        whole = [-(-length // 128) * 128 for length in lengths]
        assert all(end - begin >= rows for (begin, end), rows in zip(itertools.pairwise(padded), whole, strict=True))
        assert padded[-1] <= arguments.padded(problem, begins[-1])


@pytest.mark.parametrize("device", ["h200", "a100", "b200"])
@pytest.mark.parametrize(
    "text",
    [
        "b8.h16.s1024.d128.bf16.causal.varlen.grad",
        "b8.h16/4.s1024.d96/64.fp16.causal-br.window=64,*.softcap=3.0.varlen.dropout=0.1.grad",
        "b8.h8/2.s1x4096.d128.bf16.varlen",
    ],
)
def test_it_takes_sequences_on_a_gpu(text: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreting.VARIABLE, raising=False)
    problem = Problem.parse(text)
    made = backend.TritonBackend()
    assert made.varlen
    assert made.supports(problem, Device.named(device)) == ()


if __name__ == "__main__":
    interpreting.tell(INTERPRETED)
