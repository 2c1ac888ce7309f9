"""What a default run meets: head dimensions of every class, and sinks and slopes beside keys in pages."""

from __future__ import annotations

from collections import Counter

import pytest

from attnswitch.verify import Case, examine
from attnswitch.verify.drawing import dims
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.plan import EXAMPLES, targets

EIGHTS = set(range(8, 257, 8))


@pytest.fixture(scope="module")
def met() -> list[Case]:
    """The cases of a default run on a CPU that have anything to compute."""
    (target,) = targets(("cpu",), ("tiled",))
    return [case for case in draw(target.space, 0, EXAMPLES) if case.work]


@pytest.mark.parametrize("side", ["dim_qk", "dim_v"])
def test_every_multiple_of_8_is_met_several_times(side: str, met: list[Case]) -> None:
    times = Counter(getattr(case, side) for case in met)
    assert min(times[dim] for dim in EIGHTS) >= 5


@pytest.mark.parametrize("side", ["dim_qk", "dim_v"])
def test_few_of_the_small_ones_are_missed(side: str, met: list[Case]) -> None:
    assert len(set(range(1, 65)) - {getattr(case, side) for case in met}) <= 2


@pytest.mark.parametrize("edge", [16, 32, 64, 96, 128, 192, 256])
def test_both_sides_of_an_edge_are_met(edge: int, met: list[Case]) -> None:
    assert {edge - 1, edge, edge + 1} <= {case.dim_qk for case in met} | {case.dim_v for case in met}


def test_unequal_ones_are_met_in_both_orders(met: list[Case]) -> None:
    wider, narrower = (sum(sign * (case.dim_v - case.dim_qk) > 0 for case in met) for sign in (1, -1))
    assert min(wider, narrower) > 0.1 * len(met)
    assert any(64 < case.dim_qk < case.dim_v <= 96 for case in met), "of one class"


def test_few_need_panels(met: list[Case]) -> None:
    wide = [case for case in met if max(case.dim_qk, case.dim_v) > 256]
    assert 0.02 < len(wide) / len(met) < 0.06
    assert any(min(case.dim_qk, case.dim_v) > 512 and case.grads for case in wide)
    assert any((case.dim_qk, case.dim_v) == (576, 512) for case in wide)


def test_classes_hold_what_the_contract_names() -> None:
    for name, of_class in dims.CLASSES.items():
        assert len({*of_class}) == len(of_class), name
        assert {*of_class} <= set(range(1, dims.WIDEST + 1)), name
    assert {*dims.CLASSES["edges"]} >= {1, 2, 3, 31, 32, 33, 95, 96, 97, 255, 256}
    assert {*dims.CLASSES["wide edges"]} == {257, 511, 512, 513, 575, 576}
    assert next(iter(dims.CLASSES.values()))[0] == 8, "the plainest"


def test_sinks_and_slopes_beside_pages_are_met(met: list[Case]) -> None:
    pages = [case for case in met if case.page]
    assert sum(bool(case.sinks) for case in pages) > 0.2 * len(pages)
    assert any(case.alibi for case in pages)
    assert any(case.sinks and case.splits and case.batch > 1 for case in pages)
    assert all(case.alignment == "bottom_right" for case in pages)


def test_slopes_of_a_batch_go_with_the_sequence() -> None:
    """A sequence alone has its own slopes, not all of the batch's."""
    pages = Case(batch=3, seq_q=4, seq_k=96, lengths=(90, 33, 70), page=16, splits=3, alignment="bottom_right")
    case = pages.replace(alibi="batch", sinks="normal", check="splits")
    (outcome,) = examine(case, ("tiled",), only=True)
    assert outcome.verdict == "verified", outcome
