"""Every check: it is drawn often enough, holds for what is right, and fails for a fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from attnswitch.machine import registry
from attnswitch.verify import Case, Failure, MaskRecipe, Placing, examine, targets
from attnswitch.verify.checks import CHECKS, DRAWN, LAST, named
from attnswitch.verify.mutants import mutants
from attnswitch.verify.session.explore import draw

RIGHT = ("tiled", "reference", "sdpa-math")
#: But conduct, which is looked at before the court: test_gallery.py.
ON_CPU = [check.name for check in CHECKS if not check.gpu and check not in LAST]
ON_GPU = [check.name for check in CHECKS if check.gpu]
#: Checks that say something about fewer than one drawn case in twenty, and why.
SELDOM = {
    "fresh-dropout": "dropout without a seed is drawn only where V can be the identity, which shows the mask",
    "splits": "num_splits is an option of one form of the call alone; where it is drawn nothing else is checked",
}

PLAIN = Case(heads_kv=2, group=2, seq_q=20, seq_k=40, dim_qk=16, dim_v=12, grads="qkv")
TINY = Case(dim_qk=1, dim_v=1)
#: A bit of everything. The first ones lie plainly, so that whatever is copied is copied as it was.
CASES = {
    "plain": PLAIN,
    "lse": PLAIN.replace(lse=True),
    "batch": PLAIN.replace(batch=3, data="negative", dtype="float16"),
    "causal": PLAIN.replace(causal=True, seq_k=70),
    "bottom-right": PLAIN.replace(causal=True, alignment="bottom_right", seq_q=70),
    "window": PLAIN.replace(window=(3, 2), library="numpy"),
    "lengths": PLAIN.replace(batch=2, lengths=(40, 3), dtype="bfloat16", library="numpy"),
    "bool-mask": PLAIN.replace(mask=MaskRecipe("bool", "bhqk", 4, "dead-rows")),
    "float-mask": PLAIN.replace(mask=MaskRecipe("float32", "hqk", 4, "random"), grads="qkvm"),
    "softcap": PLAIN.replace(softcap=5.0, dtype="float64", lse=True),
    "sinks": PLAIN.replace(sinks="extreme", lse=True),
    "alibi": PLAIN.replace(alibi="batch", batch=2, causal=True, alignment="bottom_right"),
    "scale": PLAIN.replace(scale=-0.25, library="numpy"),
    "placed": PLAIN.replace(layout="BLHD", placing=Placing("strided", "columns", "packed", "offset", "padded-rows")),
    "expanded": PLAIN.replace(batch=2, placing=Placing("expanded-batch", "expanded-heads", "expanded-rows")),
    "seeded": PLAIN.replace(dropout=0.5, dropout_seed=11, batch=2, deterministic=True),
    "own-dropout": PLAIN.replace(dropout=0.5, dim_v=40),
    "poison": PLAIN.replace(causal=True, poison=True, grads=""),
    "paged": PLAIN.replace(
        batch=2, seq_k=48, page=16, lengths=(40, 7), alignment="bottom_right", causal=True, grads=""
    ),
    "divided": PLAIN.replace(batch=2, seq_k=96, page=1, splits=3, lengths=(9, 95), alignment="bottom_right", grads=""),
    "wide": PLAIN.replace(seq_q=130, seq_k=130, dim_qk=80, dim_v=80),
}


class Shown(NamedTuple):
    """A fault that a check catches, and a case that shows it there."""

    backend: str
    case: Case


def mutant(name: str, case: Case) -> Shown:
    (target,) = (mutant.target for mutant in mutants() if mutant.name == name)
    return Shown(target, case)


ROWS = MaskRecipe("float32", "qk", 2, "random")
PAGED = TINY.replace(batch=2, seq_k=4, page=2, lengths=(2, 4), alignment="bottom_right")
CAUGHT = {
    "form": mutant("output-left-in-accumulator-type", TINY.replace(dtype="float16")),
    "inputs": mutant("query-scaled-in-place", TINY.replace(dim_qk=2)),
    "reference": mutant("keep-mask-restarts-in-each-tile", TINY.replace(seq_k=99, dropout=0.5, dropout_seed=1)),
    "identities": mutant("lse-gradient-ignored", TINY.replace(lse=True, grads="qkv")),
    "one-hot": mutant("partial-key-tile-skipped", TINY.replace(seq_k=90, dim_qk=14)),
    "uniform": mutant("one-key-tail-dropped", TINY.replace(dim_v=3)),
    "powers-of-two": mutant("kernel-cached-without-scale", TINY.replace(seq_k=3)),
    "causality": mutant("hidden-keys-set-quantisation-step", TINY.replace(seq_k=8, mask=ROWS)),
    "leak": mutant("nan-of-hidden-value-leaks", TINY.replace(seq_q=2, seq_k=2, causal=True)),
    "independence": mutant("maximum-shared-across-batch", TINY.replace(batch=2, seq_k=3)),
    "mask-forms": mutant("window-right-one-far", TINY.replace(seq_q=2, alignment="bottom_right", window=(0, 0))),
    "permutation": mutant("partial-key-tile-skipped", TINY.replace(seq_k=65)),
    "shift": mutant("maximum-starts-at-zero", TINY),
    "linearity": mutant("head-dim-tail-dropped", Case(seq_k=2, dim_qk=22, data="needle")),
    "hull": mutant("denominator-in-float16", TINY.replace(seq_k=2)),
    "split": mutant("weights-in-storage-type", Case(seq_k=129, dim_v=11, dtype="float16", data_seed=135)),
    "prefix": mutant("last-visible-key-of-a-query-tile-cut", TINY.replace(seq_q=2, causal=True)),
    "decode": mutant("softcap-missing-when-decoding", TINY.replace(seq_q=2, seq_k=3, softcap=5.0)),
    "batch": mutant("maximum-shared-across-batch", TINY.replace(batch=2, data="negative")),
    "pages": mutant("page-table-of-the-first-sequence-for-all", PAGED),
    "splits": mutant(
        "page-keys-divided-by-the-batch", PAGED.replace(seq_k=100, dim_qk=8, dim_v=12, lengths=(1, 99), splits=2)
    ),
    "heads-written-out": mutant("sink-scaled", Case(seq_k=3, sinks="normal", data_seed=1)),
    "grouped-heads": mutant("key-heads-matched-modulo", TINY.replace(heads_kv=2, group=2)),
    "repeat": mutant("order-of-gradient-sums-varies", Case(seq_q=200, seq_k=3, grads="qkv")),
    "layouts": mutant("row-stride-rounded-to-16-bytes", Case(seq_k=9, placing=Placing(value="padded-rows"))),
    "variants": mutant("mask-of-first-batch-entry-for-all", TINY.replace(batch=2, data_seed=242)),
    "fresh-dropout": mutant("unseeded-dropout-accepted", TINY.replace(seq_q=7, seq_k=13, dim_v=13, dropout=0.25)),
    "autocast": Shown("saboteurs:CastInAutocast", TINY),
    "fences": Shown("saboteurs:DiffersAtAPage", TINY.replace(placing=Placing(key="offset"))),
}
#: Checks that need no argument for being there: no other one sees the fault above.
ALONE = ("form", "leak")


def test_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert [named(check.name) for check in CHECKS] == list(CHECKS)
    assert list(CAUGHT) == ON_CPU


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return draw(targets(["cpu"], ["tiled"])[0].space, 0, 300)


@pytest.mark.parametrize("name", ON_CPU)
def test_it_applies_to_what_is_drawn(name: str, drawn: list[Case]) -> None:
    share = sum(named(name).applies(case) for case in drawn) / len(drawn)
    assert share >= 0.05 or name in SELDOM  # "splits" to one case in twenty: more or less, as the seed has it
    assert share > 0.01


def test_every_check_is_asked_for(drawn: list[Case]) -> None:
    assert {case.check for case in drawn} == {"reference", *(check.name for check in DRAWN if not check.gpu)}
    assert 0.4 < sum(case.check != "reference" for case in drawn) / len(drawn) < 0.6


@pytest.mark.parametrize("name", ON_CPU)
def test_it_holds_for_what_is_right(name: str) -> None:
    held = dict.fromkeys(RIGHT, 0)
    for case in (CAUGHT[name].case, *CASES.values()):
        if named(name).applies(case):
            for outcome in examine(case.replace(check=name), RIGHT, only=True):
                assert outcome.verdict in ("verified", "refused"), (outcome.failure, str(case))
                held[outcome.backend] += outcome.checks == (name,)
    if name == "fresh-dropout":  # only torch's own generator draws without a seed
        assert held == {"tiled": 0, "reference": 0, "sdpa-math": 2}
    elif name in (
        "leak",
        "split",
        "splits",
        "heads-written-out",
    ):  # the composite lets 0 * NaN leak, has no lse, no sinks
        assert min(held["tiled"], held["reference"]) >= 2
    else:
        assert min(held.values()) >= 2, held


@pytest.mark.parametrize("name", ON_CPU)
def test_it_fails_for_its_fault(name: str) -> None:
    backend, case = CAUGHT[name]
    (outcome,) = examine(case.replace(check=name), (backend,), only=True)
    assert outcome.verdict == "mismatch"
    assert outcome.failure is not None
    assert outcome.failure.check == name
    assert outcome.failure.result
    assert outcome.failure.message
    assert outcome.kind == ("cpu", backend, name, outcome.failure.sort)


@pytest.mark.parametrize("name", ["one-hot", "split"])  # one makes operands of its own, and one does not
def test_what_does_not_run_has_the_same_verdict_in_every_check(
    name: str, register: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object) -> None:
        raise ZeroDivisionError("halved")

    register("saboteur", "saboteurs:Saboteur")
    monkeypatch.setattr(type(registry.load("saboteur")), "reasons", raising)
    absent = "saboteurs:NoSuchBackend"
    refused, unavailable, failed = examine(
        PLAIN.replace(check=name, data_seed=1), ("sdpa-cudnn", absent, "saboteur"), only=True
    )
    assert (refused.verdict, unavailable.verdict, failed.verdict) == ("refused", "unavailable", "mismatch")
    assert "NoSuchBackend" in unavailable.reasons[0]
    assert failed.failure == Failure("crash", "it failed while planning: ZeroDivisionError: halved")


@pytest.mark.parametrize("name", ["powers-of-two", "causality", "independence", "repeat"])
def test_bits_are_compared_where_they_are_promised(name: str) -> None:
    case = PLAIN.replace(check=name, causal=True, batch=2, library="numpy", data_seed=2)
    for asked in (case, case.replace(deterministic=True)):
        (outcome,) = examine(asked, ("saboteurs:OrderedIfAsked",), only=True)
        assert (outcome.verdict, outcome.failure, outcome.checks) == ("verified", None, (name,))


@pytest.mark.parametrize("name", ALONE)
def test_no_other_check_sees_its_fault(name: str) -> None:
    backend, case = CAUGHT[name]
    for other in ON_CPU:
        if other != name and named(other).applies(case):
            (outcome,) = examine(case.replace(check=other), (backend,), only=True)
            assert outcome.verdict != "mismatch", outcome.failure


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_it_says_what_it_holds_and_why_it_is_there(check: object) -> None:
    """A check that is the only one to see some fault needs no argument."""
    assert isinstance(check, type(CHECKS[0]))
    assert check.says
    assert not check.says.endswith(".")
    assert bool(check.why) != (check.name in ALONE)
    assert not check.why or check.why.endswith(".")


@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpus_check_is_not_looked_at_on_a_cpu(name: str) -> None:
    case = PLAIN.replace(check=name)
    assert named(name).applies(case)
    assert examine(case, ("sdpa-math",), only=True) == []
    (outcome,) = examine(case.replace(lse=False), ("sdpa-math",))
    assert outcome.verdict == "verified"
    assert name not in outcome.checks
    assert name not in targets(["cpu"], ["tiled"])[0].space.checks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpus_check_holds_for_what_is_right(name: str) -> None:
    assert name in targets(["cuda:0"], ["sdpa-math"])[0].space.checks
    plain = PLAIN.replace(lse=False)  # which sdpa-math does not return
    for case in (plain, plain.replace(dtype="bfloat16", causal=True)):
        (outcome,) = examine(case.replace(check=name), ("sdpa-math",), "cuda:0", only=True)
        assert (outcome.verdict, outcome.failure, outcome.reasons) == ("verified", None, ())
        assert bool(outcome.checks) == (name != "elsewhere" or torch.cuda.device_count() > 1)
