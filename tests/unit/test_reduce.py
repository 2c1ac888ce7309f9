"""Cases made smaller: to the plainest that still fails, within so many tries, and always cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnswitch.verify import Case, MaskRecipe, Placing, Space
from attnswitch.verify.session.explore import draw
from attnswitch.verify.session.reduce import reduced

#: Everything at once.
FULL = Case(
    batch=3,
    heads_kv=2,
    group=4,
    seq_q=70,
    seq_k=129,
    dim_qk=72,
    dim_v=40,
    dtype="bfloat16",
    causal=True,
    alignment="bottom_right",
    window=(5, 2),
    lengths=(129, 3, 70),
    mask=MaskRecipe("float32", "bhqk", 4, "random"),
    scale=0.125,
    softcap=5.0,
    dropout=0.25,
    dropout_seed=9,
    lse=True,
    grads="qkvm",
    library="numpy",
    layout="BLHD",
    placing=Placing("strided", "offset", "packed", "columns", "transposed"),
    data="large",
    data_seed=200,
    deterministic=True,
    check="repeat",
)
PLAINEST = Case(dim_qk=1, dim_v=1, dtype="bfloat16")
FAULTS: dict[str, tuple[Callable[[Case], bool], Case]] = {
    "always": (lambda case: True, PLAINEST),
    "window": (lambda case: case.window is not None, PLAINEST.replace(window=(0, 0))),
    "lengths": (lambda case: case.lengths is not None, PLAINEST.replace(lengths=(1,))),
    "mask": (lambda case: case.mask is not None, PLAINEST.replace(mask=FULL.mask)),
    "mask-gradient": (lambda case: "m" in case.grads, PLAINEST.replace(mask=FULL.mask, grads="qkvm")),
    "seeded-dropout": (lambda c: c.dropout_seed is not None, PLAINEST.replace(dropout=0.25, dropout_seed=9)),
    "check": (lambda case: case.check == "repeat", PLAINEST.replace(check="repeat")),
    "numpy": (lambda case: case.library == "numpy", PLAINEST.replace(library="numpy")),
    "tail": (lambda case: case.seq_k % 64 == 1 and case.seq_k > 1, PLAINEST.replace(seq_k=65)),
    "two-rows": (lambda case: case.seq_q > 1, PLAINEST.replace(seq_q=2)),
    "placing": (lambda c: c.placing.key == "offset", PLAINEST.replace(placing=Placing(key="offset"))),
    "causal-and-lse": (lambda case: case.causal and case.lse, PLAINEST.replace(causal=True, lse=True)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_is_what_fails(fault: str) -> None:
    fails, plainest = FAULTS[fault]
    assert fails(FULL)
    assert reduced(FULL, fails, 300) == plainest


@pytest.mark.parametrize("tries", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_stops_after_so_many_tries(fault: str, tries: int) -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return FAULTS[fault][0](case)

    small = reduced(FULL, fails, tries)
    assert len(asked) <= tries
    assert FAULTS[fault][0](small)
    assert small in (FULL, *asked)
    assert len(set(asked)) == len(asked), "a case that did not fail was tried again"


def test_one_feature_is_found_in_a_few_tries() -> None:
    """Each try of a case that ends its process costs another process."""
    assert reduced(FULL, FAULTS["window"][0], 30).replace(seq_k=1) == FAULTS["window"][1]


def test_what_does_not_fail_otherwise_is_left_alone() -> None:
    assert reduced(FULL, lambda case: case == FULL, 500) == FULL


@pytest.mark.parametrize("seed", range(4))
def test_every_case_tried_is_a_case(seed: int) -> None:
    """Whatever fails, of whatever was drawn: ``problem`` raises for what is none."""
    for number, case in enumerate(draw(Space(checks=("split", "repeat")), seed, 40)):

        def fails(smaller: Case, number: int = number) -> bool:
            smaller.problem()
            assert smaller.lengths is None or len(smaller.lengths) == smaller.batch
            assert not (smaller.dropout and smaller.dropout_seed is None) or smaller.dim_v >= smaller.seq_k
            return hash((str(smaller), number)) % 3 == 0

        reduced(case, fails, 60).problem()


def test_the_probe_keeps_its_columns() -> None:
    """With fewer it could not say which key."""
    case = Case(seq_k=300, dim_qk=32, dim_v=16, check="one-hot", group=2)
    assert reduced(case, lambda c: c.check == "one-hot", 100) == Case(dim_qk=8, dim_v=1, check="one-hot")
    assert reduced(case, lambda c: c.check == "one-hot" and c.seq_k == 300 and c.dim_qk > 8, 100).dim_qk == 32
