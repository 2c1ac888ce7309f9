"""What the benchmark measures and of what: suites, workloads, peers, deviations, records, the document."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attnswitch
from attnswitch.bench import candidates, deviation, document, peers, workload
from attnswitch.bench.candidates import Refused
from attnswitch.bench.measure import Budget, Limits
from attnswitch.bench.record import Direction, Record
from attnswitch.bench.run import run, steps
from attnswitch.bench.suites import Row, ad_hoc, suites
from attnswitch.errors import InvalidProblem
from attnswitch.machine import registry
from attnswitch.problem import Problem, cost
from attnswitch.tune import problems

Register = Callable[[str, str], None]
ROOT = Path(__file__).parents[2]
LIMITS = Limits(1.0, 10.0, 1024, "float32", 2**26)
SHORT = Budget(1.0, 1.0)
ROWS = [row for suite in suites().values() for row in suite.rows]


def row(problem: str, *backends: str, **fields: Any) -> Row:
    return Row("test", "row", Problem.parse(problem), backends, fields.pop("peers", ()), **fields)


def records(problem: str, *backends: str, direction: Direction = "forward", **fields: Any) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for step in steps([row(problem, *backends, **fields)], (direction,)):
        found |= {record.candidate: record for record in run(step, "cpu", LIMITS, SHORT)}
    return found


# -- suites ------------------------------------------------------------------------------------------------------------


def test_the_suites_that_are_promised() -> None:
    named = ["grid", "forward", "backward", "features", "decode"]
    named += ["serving", "memory", "quick", "unseen-cpu", "unseen-gpu"]
    assert list(suites()) == named
    assert len(suites()["grid"].rows) == 12
    for suite in suites().values():
        assert len({row.name for row in suite.rows}) == len(suite.rows)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.suite}-{row.name}")
def test_a_row_is_a_problem_with_known_candidates(row: Row) -> None:
    assert Problem.parse(str(row.problem)) == row.problem
    assert row.directions
    assert set(row.peers) <= set(peers.PEERS)
    assert set(row.backends) <= {"auto", "triton", *registry.names()}


@pytest.mark.parametrize(("suite", "kind"), [("unseen-cpu", "cpu"), ("unseen-gpu", "cuda")])
def test_what_is_unseen_is_not_tuned_on(suite: str, kind: str) -> None:
    rows = suites()[suite].rows
    assert len(rows) == 64
    assert not {row.problem for row in rows} & set(problems.catalogue(kind))
    assert {row.directions for row in rows} == {("forward",), ("forward", "training")}
    assert all((row.directions == ("forward",)) == (row.problem.seq_q == 1) for row in rows)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_is_unseen_is_what_was_drawn(kind: str) -> None:
    spec = importlib.util.spec_from_file_location("draw_unseen", ROOT / "fixtures" / "draw_unseen.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    text = (ROOT / "attnswitch/bench/suites.toml").read_text("utf-8").replace("\n# ", " ")
    (seed,) = re.findall(rf"`unseen-{kind}` [^`]*?with seed (\d+)", text)
    assert [str(row.problem) for row in suites()[f"unseen-{kind}"].rows] == drawing.rows(kind, int(seed))


@pytest.mark.parametrize("row", suites()["grid"].rows, ids=lambda row: row.name)
def test_the_grid_is_16384_tokens_of_2048_features(row: Row) -> None:
    p = row.problem
    assert (p.batch * p.seq_q, p.heads_q * p.dim_qk, p.dtype) == (16_384, 2048, "bfloat16")
    assert row.name == f"D {p.dim_qk}, S {p.seq_q}{', causal' if p.causal else ''}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": (8,)}, "has neither `lengths` nor a padding mask"),
        ({"problem": "b2.h1.s8.d8.fp32.lengths", "lengths": (8,)}, "1 lengths, expected 2"),
        ({"problem": "b1.h1.s8.d8.fp32.lengths", "lengths": (9,)}, "expected 0 to Lk = 8"),
        ({"problem": "b1.h1.s8.d8.fp32.k=expanded"}, "leave that part out"),
        ({"problem": "b1.h1.s8.d8.fp32.nonfinite"}, "leave that part out"),
        ({"kind": "speeds"}, "kind 'speeds'"),
        ({"directions": ("sideways",)}, "directions"),
        ({"peers": ("tiled",)}, "expected each of them once"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        row(fields.pop("problem", "b1.h1.s8.d8.fp32"), "tiled", **fields)


def test_a_problem_by_itself() -> None:
    made = ad_hoc("b1.h4/2.s1x64.d8.fp32")
    assert (made.kind, made.directions) == ("decode", ("forward",))
    assert made.backends == tuple(row.name for row in registry.table() if not row.waits)
    assert ad_hoc("b1.h4.s64.d8.fp32").directions == ("forward", "backward")
    assert ad_hoc("b1.h4.s64.d8.fp32", "training").directions == ("training",)
    assert ad_hoc("b1.h4/2.s1x64.d8.fp32", "backward").kind == "speed"


# -- workloads ---------------------------------------------------------------------------------------------------------


def test_a_padding_mask_is_true_before_each_length() -> None:
    made = workload.make(row("b2.h2.s4x6.d8.fp32.mask=bool:bk", lengths=(6, 2)), "forward", "cpu")
    assert made.attn_mask is not None
    assert made.attn_mask[:, 0, 0].tolist() == [[True] * 6, [True, True, False, False, False, False]]


def test_tensors_are_the_same_each_time_and_require_what_is_asked() -> None:
    where = row("b2.h4/2.s4x6.d8/16.bf16.mask=fp32:hqk.lengths", lengths=(6, 2))
    first, second = (workload.make(where, direction, "cpu") for direction in ("forward", "backward"))
    assert torch.equal(first.query, second.query)
    assert (first.query.shape, first.key.shape, first.value.shape) == ((2, 4, 4, 8), (2, 2, 6, 8), (2, 2, 6, 16))
    assert first.attn_mask is not None
    assert (first.attn_mask.shape, first.attn_mask.dtype) == ((1, 4, 4, 6), torch.float32)
    assert first.key_lengths is not None
    assert first.key_lengths.tolist() == [6, 2]
    assert (first.leaves, first.grad_out) == ((), None)
    assert [leaf.shape for leaf in second.leaves] == [second.query.shape, second.key.shape, second.value.shape]


# -- deviation and peers -----------------------------------------------------------------------------------------------

SEMANTICS = [
    "b2.h2.s33x65.d16.fp32",
    "b2.h4/2.s33x65.d16/24.fp32.causal",
    "b2.h4/2.s33x65.d16.fp32.causal-br.lengths",
    "b2.h2.s65.d16.fp32.causal.window=7,0",
    "b1.h2.s33x65.d16.fp32.window=5,3.bottom-right",
    "b2.h2.s33x65.d16.fp32.mask=bool:bk",
    "b2.h2.s33x65.d16.fp32.mask=bool:bhqk.causal",
    "b2.h2.s33x65.d16.fp32.mask=fp32:hqk.scale=0.5",
    "b2.h2.s33x65.d16.fp32.mask=fp32:bhqk.lengths.causal",
    "b1.h4/2.s1x65.d16.fp32",
]


@pytest.mark.parametrize("problem", [*SEMANTICS, "b2.h2.s33x65.d16.fp32.softcap=2.0.mask=fp32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_reference_agrees_with_another_backend(
    problem: str, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deviation, "_CHUNK", 1000)  # so that rows come in several chunks
    found = records(problem, "reference", "tiled", direction=direction)
    for record in found.values():
        assert record.status == "measured", record.why
        assert record.deviation is not None
        assert record.deviation < 1e-5


@pytest.mark.parametrize("problem", SEMANTICS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_torch_default_is_given_the_whole_problem(problem: str, direction: Any) -> None:
    found = records(problem, peers=("torch",), direction=direction)
    assert found["torch"].status == "measured", found["torch"].why
    assert found["torch"].deviation is not None
    assert found["torch"].deviation < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("problem", [*SEMANTICS, "b2.h2.s33x65.d16.fp32.softcap=2.0.mask=fp32"])
def test_flex_is_given_the_whole_problem(problem: str) -> None:
    """Uncompiled, which is the same functions on dense scores."""
    work = workload.make(row(problem), "forward", "cpu")
    if "mask" in problem and not hasattr(torch.nn.attention, "list_flash_attention_impls"):
        pytest.skip("flex_attention before torch 2.11 asks a mask for its elements within vmap")
    attend = peers.flex(work, compiler=lambda function, **_: function)
    assert deviation.make(work).deviation((attend(),)) < 1e-5


@pytest.mark.parametrize(
    ("peer", "problem", "direction", "reason"),
    [
        ("torch", "b1.h1.s8.d8.fp32.softcap=2.0", "forward", "no softcap"),
        ("torch", "b1.h1.s8.d8.fp32.dropout=0.1.seeded", "forward", "takes no seed"),
        ("torch", "b1.h1.s8.d8.fp32.lse", "forward", "without lse"),
        ("flex", "b1.h1.s8.d8.fp32.dropout=0.1", "forward", "no dropout"),
        ("flex", "b1.h1.s8.d8.fp32", "backward", "no backward on the CPU"),
        ("fa4", "b1.h1.s8.d8.bf16.mask=bool", "forward", "no attn_mask"),
        ("fa4", "b1.h1.s8.d8.fp32", "forward", "16-bit types"),
        ("fa4", "b1.h1.s4x8.d8.bf16.causal", "forward", "bottom right"),
    ],
)
def test_a_peer_says_what_it_does_not_take(peer: str, problem: str, direction: Any, reason: str) -> None:
    record = records(problem, peers=(peer,), direction=direction)[peer]
    assert (record.status, record.ms) == ("refused", None)
    assert reason in (record.why or "")


def test_flash_attention_4_gets_what_the_problem_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that computes it: layout, causality, window, scale, softcap."""

    def stand_in(q: Any, k: Any, v: Any, **options: Any) -> Any:
        asked.update(options)
        window = None if options["window_size"] == (None, None) else options["window_size"]
        rest = {"scale": options["softmax_scale"], "softcap": options["softcap"], "backend": "reference"}
        positions = {"is_causal": options["causal"], "window": window, "causal_alignment": "bottom_right"}
        return attnswitch.attention(q, k, v, layout="BLHD", **rest, **positions), None

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    vars(module)["flash_attn_func"] = stand_in
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for problem in ("b2.h4/2.s9.d8.bf16.causal.softcap=2.0", "b1.h2.s5x9.d8.fp16.causal-br.window=3,*.scale=0.5"):
        asked: dict[str, Any] = {}
        found = records(problem, "reference", peers=("fa4",))
        assert (found["fa4"].status, found["fa4"].why) == ("measured", None)
    assert asked["window_size"] == (3, 0)


@pytest.mark.parametrize(
    "text",
    [
        "b2.h4/2.s3x64.d16.fp32.causal.mask=fp32:hqk.lengths.dropout=0.1.seeded.grad=qkm",
        "b2.h4/2.s48.d16.fp32.causal.varlen.sinks.alibi.grad",
        "b2.h4.s16.d8.fp64.sinks.lse",
        "b2.h4.s16.d8.fp32.alibi.grad",
        "b2.h4.s16.d8.fp32.causal-br.window=4,0.softcap=3.0.sinks.alibi",
        "b2.h4/2.s3x64.d16.fp32.causal-br.lengths.page=16.sinks.alibi",
        "b3.h4/2.s5x64.d16/8.fp32.causal-br.lengths.varlen.page=16.splits=2.sinks",
    ],
)
def test_the_call_of_a_workload_is_its_problem(text: str) -> None:
    """Both the public call that is timed and a plan's, which ``tune`` times."""
    problem = Problem.parse(text)
    work = workload.of(problem, "cpu")
    operands = work.query, work.key, work.value
    heads = {"sinks": work.sinks, "alibi_slopes": work.alibi_slopes}
    assert [name for name, tensor in heads.items() if tensor is not None] == [
        name for name, said in (("sinks", problem.sinks), ("alibi_slopes", problem.alibi)) if said
    ]
    planned = attnswitch.explain(*operands, **work.keywords())
    assert planned.problem.replace(grads=problem.grads) == problem
    called = attnswitch.plan(problem, device="cpu", backend="tiled")(*operands, **work.arrays())
    said = work.function(*operands, **work.keywords(), backend="tiled")
    for one, other in zip(*(x if problem.lse else (x,) for x in (called, said)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("direction", [None, "forward"])
def test_a_cache_in_pages_is_measured_forward_alone(direction: Direction | None) -> None:
    text = "b2.h4/2.s3x64.d16.fp32.causal-br.lengths.page=16.sinks"
    assert ad_hoc(text, direction).directions == ("forward",)
    with pytest.raises(InvalidProblem, match="no gradient"):
        ad_hoc(text, "training")


def test_a_gradient_that_vanishes_is_held_against_the_others() -> None:
    """With one key the gradient of query is 0, and rounding leaves a little: found on an H100, where it was inf."""
    work = workload.of(Problem.parse("b64.h2.s64.d16.fp32.lengths.grad"), "cpu")
    assert work.key_lengths is not None
    assert int(work.key_lengths[-1]) == 1
    reference = deviation.make(work)
    grads = [torch.zeros_like(leaf) for leaf in work.leaves]
    for (b, h), part in reference.parts.items():
        for grad, answer in zip(grads, part.answers, strict=True):
            grad[b, h] = answer.to(grad.dtype)[0]
    assert reference.deviation(grads) < 1e-6
    grads[0][-1, -1] += 1e-7
    assert 0.0 < reference.deviation(grads) < 1e-3
    grads[0][-1, -1] += 1e-2
    assert reference.deviation(grads) > 1.0


@pytest.mark.parametrize("place", [(0, 0), (1, 3)])
def test_a_deviation_is_seen_and_nan_never_passes(place: tuple[int, int]) -> None:
    work = workload.make(row("b2.h4/2.s9.d8.fp32"), "forward", "cpu")
    answer = candidates.of_backend("sdpa-math", work)()
    reference = deviation.make(work)
    assert reference.wrong((answer,)) == ""
    worse = answer.clone()
    worse[place] *= 1.5
    assert reference.deviation((worse,)) == pytest.approx(0.5, rel=1e-3)
    assert reference.wrong((worse,)) != ""
    worse[1, 1, 4, 4] = math.nan  # in a head of which there is no reference
    assert math.isnan(reference.deviation((worse,)))
    assert reference.wrong((worse,)).endswith("is nan")


@pytest.mark.parametrize("text", ["b1.h1.s8.d8.fp32.mask=fp32.grad=m", "b0.h1.s8.d8.fp32"])
def test_what_is_compared_with_nothing_has_no_deviation(text: str) -> None:
    (found,) = records(text, "sdpa-math", direction="backward" if "grad" in text else "forward").values()
    assert (found.status, found.deviation, found.against) == ("measured", None, None)
    (found,) = records(f"{text}.dropout=0.5", "sdpa-math").values()
    assert found.status == "measured"


def test_dropout_that_drops_nothing_is_wrong() -> None:
    work = workload.make(row("b1.h2.s64.d16.fp32.dropout=0.1"), "forward", "cpu")
    reference = deviation.make(work)
    kept = torch.nn.functional.scaled_dot_product_attention(work.query, work.key, work.value)
    assert reference.wrong((kept,)).endswith("nothing was dropped")
    assert reference.wrong((peers.torch_default(work)(),)) == ""


# -- candidates and records --------------------------------------------------------------------------------------------


def test_backends_that_do_not_run_are_listed_with_their_reason() -> None:
    found = records("b1.h1.s8.d8.fp32.softcap=2.0", "not-yet-written", "sdpa-cudnn", "sdpa-math", "tiled")
    states = {name: record.status for name, record in found.items()}
    assert states == {
        "not-yet-written": "unavailable",
        "sdpa-cudnn": "refused",
        "sdpa-math": "refused",
        "tiled": "measured",
    }
    assert "'not-yet-written' is not known" in (found["not-yet-written"].why or "")
    assert "softcap=2.0" in (found["sdpa-math"].why or "")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_configs_are_candidates_by_their_text(direction: Any) -> None:
    names = "tiled", "sdpa-math", "sdpa-cudnn"
    found = records("b1.h1.s40.d8.fp32", *names, direction=direction, configs=("16x32", "128x"))
    tiles = "16x32", "128x16", "128x32", "128x64", "128x128", "128x256"
    assert list(found) == ["tiled", *(f"tiled {tile}" for tile in tiles), "sdpa-math", "sdpa-cudnn"]
    assert [name for name, record in found.items() if record.status != "measured"] == ["sdpa-cudnn"]
    assert tuple(records("b1.h1.s40.d8.fp32", *names, direction=direction)) == names


def test_a_target_has_configs_as_well() -> None:
    target = "attnswitch.backends.tiled:TiledBackend"
    found = records("b1.h1.s40.d8.fp32", target, configs=("16x32",))
    assert list(found) == [target, f"{target} 16x32"]
    assert {record.status for record in found.values()} == {"measured"}


def test_a_config_that_is_named_is_what_runs() -> None:
    work = workload.make(row("b1.h2.s40.d8.fp32", "tiled"), "forward", "cpu")
    whole, parts = (candidates.of_backend(name, work)() for name in ("tiled", "tiled 16x16"))
    torch.testing.assert_close(whole, parts)
    assert not torch.equal(whole, parts)  # sums in another order
    with pytest.raises(Refused, match="no config '16x17'"):  # and no other instead of one that there is not
        candidates.of_backend("tiled 16x17", work)


def test_auto_is_the_dispatchers_own_choice() -> None:
    assert records("b1.h1.s8.d8.fp32", "auto")["auto"].status == "measured"
    with pytest.raises(Refused, match="no backend takes it"):
        candidates.of_backend("auto", workload.make(row("b1.h1.s8.d8.fp64.dropout=0.1.softcap=2.0"), "forward", "cpu"))


def test_a_fast_wrong_kernel_is_wrong(register: Register) -> None:
    register("saboteur", "saboteurs:ScaledOutput")
    found = records("b1.h2.s64.d16.fp32", "saboteur", "tiled")
    assert {name: record.status for name, record in found.items()} == {"saboteur": "wrong", "tiled": "measured"}
    assert found["saboteur"].ms is not None
    assert "a right result's is from 0 to 0.003" in (found["saboteur"].why or "")


def test_a_candidate_that_raises_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: workload.Workload) -> Any:
        raise RuntimeError("\nno kernel image\nat line 7")

    monkeypatch.setitem(peers.PEERS, "torch", broken)
    found = records("b1.h1.s8.d8.fp32", "tiled", peers=("torch",))
    assert (found["torch"].status, found["torch"].why) == ("failed", "RuntimeError: no kernel image")
    assert found["tiled"].status == "measured"


def test_tensors_that_do_not_fit_are_every_candidates_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(workload, "make", full)
    found = records("b1.h1.s8.d8.fp32", "tiled", peers=("torch",))
    assert {record.why for record in found.values()} == {"out of memory: tried to allocate 1 TiB"}
    assert {record.status for record in found.values()} == {"failed"}


def test_memory_is_for_a_gpu() -> None:
    found = records("b1.h1.s8.d8.fp32", "tiled", kind="memory", direction="backward")
    assert (found["tiled"].status, "of a GPU" in (found["tiled"].why or "")) == ("refused", True)


@pytest.mark.parametrize(
    ("problem", "forward"),
    [
        ("b2.h8/2.s16x32.d64.bf16", 4 * 2 * 8 * 16 * 32 * 64),
        ("b2.h8.s16.d64.bf16.causal", 2 * 2 * 8 * 16 * 16 * 64),
        ("b1.h1.s16.d64/32.bf16", 2 * 16 * 16 * (64 + 32)),
    ],
)
def test_work_is_counted_by_the_convention(problem: str, forward: float) -> None:
    p = Problem.parse(problem)
    assert cost.flops(p) == forward
    assert cost.flops(p, backward=True) == 2.5 * forward


def test_rates_follow_from_times() -> None:
    fast = records("b1.h2.s64.d16.fp32", "tiled")["tiled"]
    assert fast.ms is not None
    assert fast.tflops == pytest.approx(4 * 2 * 64 * 64 * 16 / fast.ms / 1e9)
    assert fast.percent == pytest.approx(100 * (fast.tflops or 0) / LIMITS.tflops)
    step = records("b2.h4/2.s1x64.d16.fp32", "tiled", kind="decode")["tiled"]
    assert step.ms is not None
    assert step.gbps == pytest.approx(2 * 2 * 64 * 32 * 4 / step.ms / 1e6)
    assert step.tflops is None
    assert step.percent == pytest.approx(100 * (step.gbps or 0) / LIMITS.gbps)


@pytest.mark.parametrize("text", ["b2.h4/2.s1x64.d16.fp32.lengths", "b2.h4/2.s1x64.d16.fp32.lengths.page=16"])
def test_keys_that_no_sequence_has_are_not_read(text: str) -> None:
    step = records(text, "tiled", kind="decode")["tiled"]
    assert step.ms is not None
    assert step.gbps == pytest.approx(2 * 2 * (64 + 32) * 16 * 4 / step.ms / 1e6)  # 64 keys and 32


# -- the document ------------------------------------------------------------------------------------------------------


def timed(row: str, candidate: str, ms: float | None, **fields: Any) -> Record:
    status = fields.pop("status", "measured" if ms else "refused")
    return Record("s", row, "b1.h1.s8.d8.fp32", "speed", "forward", candidate, status, ms=ms, **fields)


def test_ratios_are_of_the_first_that_was_measured() -> None:
    found = [
        timed("a", "new", 2.0),
        timed("a", "old", 4.0),
        timed("a", "bad", 0.1, status="wrong"),
        timed("b", "new", 1.0),
        timed("b", "old", 8.0),
        timed("c", "new", None),
        timed("c", "old", 8.0),
    ]
    assert [(entry["row"], entry["of"], entry["ratios"]) for entry in document.ratios(found)] == [
        ("a", "new", {"old": 2.0}),
        ("b", "new", {"old": 8.0}),
    ]
    (mean,) = document.means(found)
    assert (mean["of"], mean["other"], mean["ratio"], mean["rows"]) == ("new", "old", 4.0, 2)


def test_the_document_is_strict_json() -> None:
    found = [timed("a", "new", 2.0, deviation=math.nan, status="wrong")]
    made = document.to_json(
        found,
        device="cpu",
        limits=LIMITS,
        budget=SHORT,
        environment={"torch": "2"},
        command="attnswitch bench",
        seconds=1,
    )
    read = json.loads(json.dumps(made, allow_nan=False))
    assert read["records"][0]["deviation"] == "nan"
    assert read["limits"] == {"tflops": 1.0, "gbps": 10.0, "size": 1024, "dtype": "float32", "copied": 2**26}
