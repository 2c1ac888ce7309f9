"""Every backend of the registry on every small row of the catalogue: verified, or refused before anything launches."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

import attnswitch
from attnswitch import BackendUnavailable, Problem, Unsupported
from attnswitch.machine import registry
from attnswitch.planning import planner
from attnswitch.verify import AUTO, Case, MaskRecipe, check

ROWS = tomllib.loads((Path(__file__).parents[2] / "fixtures" / "problems.toml").read_text())["problem"]
PROBLEMS = {row["name"]: Problem.parse(row["problem"]) for row in ROWS}
SMALL = [row["name"] for row in ROWS if "small" in row["tags"]]
MODELS = [row["name"] for row in ROWS if "model" in row["tags"]]
DEVICES = ("cpu", "h200", "a100", "t4")


def case_of(problem: Problem, library: str) -> Case:
    """The problem with data: what ``Case.problem`` inverts. Raises ``ValueError`` for what a case cannot say."""
    mask = None
    if problem.mask is not None:
        mask = MaskRecipe(problem.mask.dtype, problem.mask.axes, kind="random")
    lengths = tuple(n % (problem.seq_k + 1) for n in range(problem.seq_k, problem.seq_k + 3 * problem.batch, 3))
    case = Case(
        batch=problem.batch,
        heads_kv=problem.heads_kv,
        group=problem.group,
        seq_q=problem.seq_q,
        seq_k=problem.seq_k,
        dim_qk=problem.dim_qk,
        dim_v=problem.dim_v,
        dtype=problem.dtype,
        causal=problem.causal,
        alignment=problem.alignment,
        window=problem.window,
        lengths=lengths if problem.key_lengths else None,
        mask=mask,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout=problem.dropout,
        dropout_seed=77 if problem.seeded else None,
        lse=problem.lse,
        grads=problem.grads,
        library=library,
    )
    if case.problem() != problem.replace(deterministic=False):
        raise ValueError(f"{problem} has facts that a case leaves out")
    return case


def operands_of(problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays and keywords of a call that asks for exactly ``problem``."""
    dtype = getattr(torch, problem.dtype)
    shapes = (
        (problem.batch, problem.heads_q, problem.seq_q, problem.dim_qk),
        (problem.batch, problem.heads_kv, problem.seq_k, problem.dim_qk),
        (problem.batch, problem.heads_kv, problem.seq_k, problem.dim_v),
    )
    arrays = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    mask = None
    if problem.mask_shape is not None and problem.mask is not None:
        mask = torch.zeros(problem.mask_shape, dtype=getattr(torch, problem.mask.dtype))
    for letter, array in zip("qkvm", (*arrays, mask), strict=True):
        if letter in problem.grads and array is not None:
            array.requires_grad_()
    options = {
        "attn_mask": mask,
        "dropout_p": problem.dropout,
        "is_causal": problem.causal,
        "scale": problem.scale,
        "causal_alignment": problem.alignment,
        "window": problem.window,
        "softcap": problem.softcap,
        "key_lengths": [problem.seq_k] * problem.batch if problem.key_lengths else None,
        "return_lse": problem.lse,
        "deterministic": problem.deterministic,
        "seed": 77 if problem.seeded else None,
    }
    return tuple(arrays), options


def fits(name: str, problem: Problem) -> bool:
    """Whether the backend says that it takes the problem here."""
    return attnswitch.explain(problem, device=attnswitch.Device.cpu(), backend=name).chosen is not None


PAIRS = [pytest.param(PROBLEMS[row], name, id=f"{row}-{name}") for row in SMALL for name in registry.names()]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch interprets it: compiling takes half a minute a row (``test_flex`` has one)."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    backend = importlib.import_module("attnswitch.backends.installed.flex")
    monkeypatch.setattr(backend, "compiled", lambda function: function)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be compiled, and so nothing launched."""

    def compiled(plan: Any) -> Any:
        pytest.fail(f"{plan.backend} was compiled for {plan.problem}")

    monkeypatch.setattr(planner, "compiled", compiled)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_reads_and_writes_itself(row: dict[str, Any]) -> None:
    problem = PROBLEMS[row["name"]]
    assert Problem.parse(str(problem)) == problem
    assert row["tags"]
    assert set(row["tags"]) <= {"small", "model", "grad", "mask"}
    assert ("grad" in row["tags"]) == bool(problem.grads and "small" in row["tags"])
    assert ("mask" in row["tags"]) == (problem.mask is not None and "small" in row["tags"])


def test_names_and_problems_are_unique() -> None:
    assert len(PROBLEMS) == len(ROWS) == len({row["problem"] for row in ROWS})
    assert len(SMALL) + len(MODELS) == len(ROWS)
    assert len(SMALL) > 30


@pytest.mark.parametrize(("problem", "backend"), PAIRS)
def test_a_backend_is_right_or_refuses(problem: Problem, backend: str, request: pytest.FixtureRequest) -> None:
    if fits(backend, problem):
        outcome = check(case_of(problem, "torch"), backend)
        assert (outcome.verdict, outcome.failure) == ("verified", None)
        assert outcome.chosen == attnswitch.plan(problem, backend=backend).backend == backend
        return
    request.getfixturevalue("no_launch")
    arrays, options = operands_of(problem)
    with pytest.raises((Unsupported, BackendUnavailable), match=f"backend '{backend}' was asked for") as raised:
        attnswitch.attention(*arrays, **options, backend=backend)
    if isinstance(raised.value, Unsupported):
        assert raised.value.plan is not None
        memory = {role: getattr(problem, role) for role in ("query", "key", "value", "attn_mask")}
        assert raised.value.plan.problem.replace(**memory) == problem
    with pytest.raises((Unsupported, BackendUnavailable), match=f"backend '{backend}' was asked for"):
        attnswitch.plan(problem, backend=backend)


@pytest.mark.parametrize(("problem", "backend"), PAIRS)
def test_a_backend_takes_numpy_arrays_too(problem: Problem, backend: str) -> None:
    """The library of the arrays changes nothing; gradients through ``attention_backward``."""
    every = "m" if "m" in problem.grads else ""
    problem = problem.replace(grads=f"qkv{every}" if problem.grads and not unseeded(problem) else "")
    if fits(backend, problem) and not unseeded(problem):
        outcome = check(case_of(problem, "numpy"), backend)
        assert (outcome.verdict, outcome.failure) == ("verified", None)
    else:
        assert unseeded(problem) or check(case_of(problem, "numpy"), backend).verdict in ("refused", "unavailable")


def unseeded(problem: Problem) -> bool:
    """Dropout by a backend's own generator, whose mask only torch's autograd repeats."""
    return problem.dropout > 0 and not problem.seeded


@pytest.mark.parametrize("name", SMALL)
def test_the_dispatchers_choice_is_right(name: str) -> None:
    outcome = check(case_of(PROBLEMS[name], "torch"), AUTO)
    assert (outcome.verdict, outcome.failure) == ("verified", None)
    assert outcome.chosen == attnswitch.plan(PROBLEMS[name]).backend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_every_backend_answers_a_models_problem(name: str, device: str, no_launch: None) -> None:
    plan = attnswitch.explain(PROBLEMS[name], device=device)
    assert {candidate.backend for candidate in plan.candidates} == set(registry.names())
    assert tuple(candidate.backend for candidate in plan.candidates) == planner.ordered(plan.problem, plan.device)
    assert plan.problem == PROBLEMS[name]
    if PROBLEMS[name].softcap and device == "t4":  # no kernel for Turing here has one, and the plan says so
        assert plan.chosen is None
    else:
        assert plan.backend is not None
    for candidate in plan.candidates:
        assert bool(plan.why_not(candidate)) == (candidate is not plan.chosen)
        assert candidate.backend in str(plan)
