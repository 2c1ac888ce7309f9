"""The court's own parts: arrays as they lie, answers within limits, and a backend that is the same before it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attnswitch import child
from attnswitch.errors import InvalidProblem, VerificationError
from attnswitch.machine import registry
from attnswitch.machine.device import Device
from attnswitch.problem import Problem
from attnswitch.verify import Case, MaskRecipe, trial
from attnswitch.verify.court import Court, messages, server, sitting, wire
from attnswitch.verify.court.proxy import Proxy
from attnswitch.verify.court.server import Server
from attnswitch.verify.court.wire import Arena, Layout, Results, View
from attnswitch.verify.judge import examine
from attnswitch.verify.launch.call import call, place_operands
from attnswitch.verify.truth import rows
from attnswitch.verify.truth.exact import Exact

ROWS = np.arange(2 * 3 * 8 * 4, dtype=np.float32).reshape(2, 3, 8, 4)
ARRAYS: dict[str, Any] = {
    "dense": ROWS,
    "turned": ROWS.swapaxes(1, 2),
    "strided": ROWS[:, :, ::2, 1:3],
    "backwards": ROWS[:, ::-1, ::-1],
    "repeated": np.broadcast_to(ROWS[:1], ROWS.shape),
    "one number": np.array(3.5),
    "nothing": ROWS[:, :, :0],
    "bfloat16": ROWS.astype(ml_dtypes.bfloat16)[..., 1:],
    "8 bits": ROWS.astype(ml_dtypes.float8_e4m3fn)[:, 1:],
    "bools": (ROWS > 9)[..., ::3],
    "torch, turned": torch.from_numpy(ROWS).transpose(1, 2),
    "torch, repeated": torch.from_numpy(ROWS)[:1].expand(2, 3, 8, 4),
    "torch, bfloat16": torch.from_numpy(ROWS).to(torch.bfloat16)[:, 1:, :, 1:],
    "torch, 8 bits": torch.from_numpy(ROWS).to(torch.float8_e5m2)[..., 1:],
    "torch, nothing": torch.from_numpy(ROWS)[:0],
    "torch, integers": torch.arange(7)[1::2],
}


def numbers(array: Any) -> Any:
    """Its values, in a type that both ends have."""
    return array.double().numpy() if isinstance(array, torch.Tensor) else array.astype(np.float64)


def strides(array: Any) -> tuple[int, ...]:
    return array.stride() if isinstance(array, torch.Tensor) else array.strides


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_lie_in_the_candidates_memory_as_in_the_callers(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    arena, view = Arena(tmp_path), View(tmp_path)
    _, layout = arena.put((ROWS[0, 0, 0], array))
    seen: Any = view.get(layout, arena.size)
    assert isinstance(seen, torch.Tensor) == isinstance(array, torch.Tensor)
    assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
    assert name.endswith("nothing") or strides(seen) == strides(array)
    np.testing.assert_array_equal(numbers(seen), numbers(array))
    assert not arena.changed()


def test_the_next_inputs_have_the_addresses_of_the_last(tmp_path: Path) -> None:
    arena, view = Arena(tmp_path), View(tmp_path)
    (first,) = arena.put((ROWS,))
    one: Any = view.get(first, arena.size)
    (second,) = arena.put((ROWS + 1,))
    two: Any = view.get(second, arena.size)
    assert one.__array_interface__["data"] == two.__array_interface__["data"]
    np.testing.assert_array_equal(two, ROWS + 1)


def test_inputs_may_only_be_read(tmp_path: Path) -> None:
    arena, view = Arena(tmp_path), View(tmp_path)
    (layout,) = arena.put((ROWS,))
    seen: Any = view.get(layout, arena.size)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1


@pytest.mark.parametrize("name", ARRAYS)
def test_results_come_back_dense(name: str, tmp_path: Path) -> None:
    results = Results(tmp_path)
    (layout,) = results.write((ARRAYS[name],))
    assert layout is not None
    back: Any = results.read(layout, 2**20, layout)
    assert (back.shape, back.dtype) == (ARRAYS[name].shape, ARRAYS[name].dtype)
    np.testing.assert_array_equal(numbers(back), numbers(ARRAYS[name]))


def test_bytes_of_an_array_outlive_who_made_it() -> None:
    content, *_ = wire._flat(np.full(2**16, 7, np.uint8))
    others = [np.zeros(2**16, np.uint8) for _ in range(8)]
    assert (content == 7).all(), len(others)


def test_a_byte_that_was_written_is_seen_wherever_it_is(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    for big in (1, 2**20):  # looked at as one, and one by one
        given = (ROWS, np.zeros(big, np.uint8), ROWS[:, ::-1])
        layouts = [layout for layout in arena.put(given) if layout is not None]
        assert not arena.changed()
        for layout in layouts:
            for place in (layout.start, layout.start + layout.size - 1):
                with (tmp_path / "inputs").open("r+b") as file:
                    file.seek(place)
                    was = file.read(1)
                    file.seek(place)
                    file.write(bytes((was[0] ^ 1,)))
                assert arena.changed(), place
                arena.put(given)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout("numpy", "cpu", "float32", (2**40, 2**40), (), 0, 4), "are the most that is right"),
        (Layout("numpy", "cpu", "float32", (-1, -4), (), 0, 16), "a result of 2 axes"),
        (Layout("numpy", "cpu", "object", (1,), (), 0, 8), "a result of 1 axes of object"),
        (Layout("torch", "cpu", "float32", (1,), (), 0, 4), "of torch on cpu to operands of numpy on cpu"),
        (Layout("numpy", "meta", "float32", (1,), (), 0, 4), "of numpy on meta to operands of numpy on cpu"),
        (Layout("numpy", "cpu", "float32", (1,), (), -8, 4), "a result of 1 axes"),
        (Layout("numpy", "cpu", "float32", (8,), (), 2**40, 32), "0 bytes of a result that has 32"),
    ],
)
def test_what_is_no_result_is_not_read(layout: Layout, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match=why):
        Results(tmp_path).read(layout, 2**10, Layout("numpy", "cpu", "float32", (2,), (4,), 0, 8))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"[]",
        b'{"told": "all is well"}',
        b'{"told": [1]}',
        b'{"verdict": "verified"}',
        b'{"results": [{}]}',
        b'{"ended": "0"}',
        b'{"raised": {"kind": "Unsupported"}}',
        json.dumps({"told": ["x" * 5000]}).encode(),
        b"[" * 4000,
    ],
)
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidProblem):
        messages.decoded(content)


def test_a_backend_says_the_same_before_the_court() -> None:
    here, problem = Device.parse("cpu"), Problem.parse("b1.h4/2.s16.d32.fp16.causal.grad")
    plain = registry.loaded("tiled")
    with sitting(Court(("tiled",))):
        proxy = registry.loaded("tiled")
        assert isinstance(proxy, Proxy)
        for attribute in ("name", "library", "varlen", "paged", "caches", "splits", "sinks", "alibi", "lacks"):
            assert getattr(proxy, attribute) == getattr(plain, attribute), attribute
        for asked in (problem, problem.replace(dropout=0.5, seeded=False)):
            assert proxy.supports(asked, here) == plain.supports(asked, here)
        assert proxy.precision(problem, here) == plain.precision(problem, here)
        assert proxy.regimes(here) == plain.regimes(here)
        assert proxy.toolchain(here) == dict(plain.toolchain(here))
        assert list(map(str, proxy.configs(problem, here))) == list(map(str, plain.configs(problem, here)))
        assert proxy.unavailable() is None
    assert registry.loaded("tiled") is plain


@pytest.mark.parametrize("question", ["configs", "precision"])
def test_a_question_that_raises_does_so_before_the_court(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "from attnswitch.backends.tiled import TiledBackend", "class Asked(TiledBackend):", "    name = 'asked'"
    raising = f"    def {question}(self, *_):\n        raise ValueError('not asked before')\n"
    (tmp_path / "asked_once.py").write_text("\n".join((*lines, raising)))
    monkeypatch.syspath_prepend(tmp_path)
    case = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8)
    told = []
    for court in (Court(), Court(("asked_once:Asked",))):
        with sitting(court):
            (outcome,) = examine(case, ("asked_once:Asked",))
        assert outcome.failure is not None
        told.append((outcome.verdict, outcome.failure.check, "ValueError: not asked before" in outcome.failure.message))
    assert told[0] == told[1]
    assert told[0][2]


def test_processes_are_adopted_as_long_as_it_sits() -> None:
    adopted = []
    for court in (Court(("tiled",)), None, Court(("tiled",))):
        with sitting(court) if court else contextlib.nullcontext():
            adopted.append(adopts_orphans())
        assert not adopts_orphans()
    assert adopted == [True, False, True]


def test_nothing_is_left_where_it_is_given_up_while_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def interrupted(self: Server) -> None:
        made.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt), sitting(Court(("tiled",)), tmp_path):
        pytest.fail("it sat")
    assert [one.ended for one in made] == [True]
    assert list(tmp_path.iterdir()) == []


def test_where_cuda_has_begun_the_court_is_no_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fork of such a process cannot use it, and each of its calls would be told to be wrong."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(child.Child, "forked", lambda *_, **__: pytest.fail("it is a fork"))
    with server.kept():
        server.begin(tmp_path)
        begun = server.taken(tmp_path)
        begun.ask(messages.Ask("about", backend="tiled"), 20.0)
        assert begun.answer().raised is None
        begun.end()


def adopts_orphans() -> bool:
    """Whether a process whose parent ended is now this one's."""
    script = "import os, time; os.fork() and os._exit(0); time.sleep(0.2); print(os.getppid(), flush=True)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    adopts = int(ran.stdout) == os.getpid()
    if adopts:
        os.wait()
    return adopts


def test_kernels_run_where_torch_was_there_before_their_code() -> None:
    case = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8, library="numpy")
    with sitting(Court(("tiled",))):
        proxy: Any = registry.loaded("tiled")
        assert proxy._server.words
        assert examine(case, ("tiled",))[0].verdict == "verified"
        assert not proxy._server.words


@pytest.mark.parametrize("apart", [True, False])
def test_the_reference_is_there_once_the_kernel_ran_where_it_cannot_be_read(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seen = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8, library="numpy"), []
    answer = Server.answer

    def answered(self: Server) -> Any:
        seen.append(exact.called)
        return answer(self)

    class Counted(Exact):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            exact.called = True
            super().__init__(*args, **kwargs)

    exact = SimpleNamespace(called=False)
    monkeypatch.setattr(trial, "Exact", Counted)
    monkeypatch.setattr(Server, "answer", answered)
    with child.hidden() if apart else contextlib.nullcontext(), sitting(Court(("tiled",))):
        assert child.is_hidden() is apart
        assert examine(case, ("tiled",))[0].verdict == "verified"
    assert seen[-2:] == [apart, True]  # the kernel's answer, and that about its conduct
    assert not child.is_hidden()


def test_references_that_disagree_are_nobodys_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8, library="numpy")

    def disagreeing(*_: Any) -> None:
        raise VerificationError("the references disagree")

    monkeypatch.setattr(rows, "cross_check", disagreeing)
    with sitting(Court(("tiled",))), pytest.raises(VerificationError, match="disagree"):
        examine(case, ("tiled",))


def test_a_target_that_cannot_be_loaded_says_why() -> None:
    with sitting(Court(("hostile:Nothing",))):
        missing = registry.load("hostile:Nothing")
    assert "module 'hostile' has no attribute 'Nothing'" in str(missing)


SDPA = """
import torch

def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
"""


PATCHES = """
    torch.absolute = torch.abs
    torch.set_num_threads(1 + torch.get_num_threads())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["at once", "once the judge has compared"])
def test_what_a_kernel_did_is_told_once_whenever_it_is_asked(seconds: float, tmp_path: Path) -> None:
    """The candidate looks by itself where it is not asked anything for a while."""
    (tmp_path / "kernels.py").write_text(SDPA.replace("    return", f"{PATCHES}    return"))
    name = f"{tmp_path}/kernels.py:attention"
    case = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8, library="torch")
    with sitting(Court((name,))):
        proxy: Any = registry.load(name)
        told = []
        for _ in range(2):
            call(case, place_operands(case, trial.Subject(case).data, "cpu"), name)
            time.sleep(seconds)
            told.append(proxy.conduct())
        assert "it replaced torch.absolute" in told[0]
        assert "torch.absolute" not in told[1]
        assert all("it changed torch's threads" in each for each in told)
        assert proxy.conduct() == ""


@pytest.mark.parametrize(
    "case",
    [
        Case(seq_q=9, seq_k=9, dim_qk=16, dim_v=16, heads_kv=2, group=2, causal=True, grads="qkv", data_seed=1),
        Case(seq_q=5, seq_k=9, dim_qk=16, dim_v=16, heads_kv=2, mask=MaskRecipe("float32", "qk"), grads="qkvm"),
        Case(seq_q=5, seq_k=9, dim_qk=16, dim_v=16, heads_kv=2, dropout=0.5, grads="qk", check="fresh-dropout"),
    ],
    ids=str,
)
def test_torch_differentiates_a_function_before_the_court(case: Case, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(SDPA)
    name = f"{tmp_path}/kernels.py:attention"
    with sitting(Court((name,))):
        (outcome,) = examine(case, (name,))
    assert (outcome.verdict, outcome.failure, outcome.reasons) == ("verified", None, ())
    assert {"reference", "conduct"} <= set(outcome.checks)


#: Its output is of a type of its own, which computes where it is copied.
LATE = """
import torch

def right(query, key, value):
    scores = (query.double() @ key.double().transpose(-1, -2)) / query.shape[-1] ** 0.5
    return (scores.softmax(-1) @ value.double()).to(query.dtype)

class Late(torch.Tensor):
    def detach(self):
        return right(*self.of)

def attention(query, key, value):
    out = torch.empty_like(query).as_subclass(Late)
    out.of = query, key, value
    return out
"""


def test_products_are_forbidden_where_results_are_copied_too(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(LATE)
    name = f"{tmp_path}/kernels.py:attention@bhsd"
    case = Case(seq_q=9, seq_k=9, dim_qk=16, dim_v=16, heads_kv=2, library="torch")
    for forbidden in (False, True):
        with sitting(Court((name,), forbidden=forbidden)):
            (outcome,) = examine(case, (name,))
        assert outcome.verdict == ("mismatch" if forbidden else "verified"), outcome
    assert outcome.failure is not None
    assert re.fullmatch(r"it calls torch's own aten::b?mm, which is forbidden", outcome.failure.message)


def test_an_autocast_region_is_around_the_kernel_before_the_court_too() -> None:
    case = Case(seq_q=3, seq_k=5, dim_qk=8, dim_v=8, library="torch", check="autocast")
    name = "saboteurs:CastInAutocast"
    with sitting(Court((name,))):
        (outcome,) = examine(case, (name,))
    assert outcome.failure is not None
    assert outcome.failure.check == "autocast"


ON_A_GPU = """
import torch

def right(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)

def keeps_its_numbers(query, key, value):
    found = right(query, key, value)
    return torch.tensor(found.tolist(), device=query.device).to(query.dtype) if not capturing() else kept(found)

capturing = torch.cuda.is_current_stream_capturing
made = {}

def kept(found):  # those of the first call that was captured
    return made.setdefault(found.shape, torch.zeros_like(found)).clone()

def on_the_default_stream(query, key, value):
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right(query, key, value)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", ["graph", "stream"])
@pytest.mark.parametrize("seated", [True, False])
def test_graphs_and_streams_before_the_court(check: str, seated: bool, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(ON_A_GPU)
    wrong = {"graph": "keeps_its_numbers", "stream": "on_the_default_stream"}[check]
    case = Case(seq_q=65, seq_k=70, dim_qk=32, dim_v=32, dtype="float16", library="torch", check=check)
    case = case.replace(batch=2, placing=case.placing.replace(key="expanded-batch"))
    found = {}
    for function in ("right", wrong):
        name = f"{tmp_path}/kernels.py:{function}@bhsd"
        with sitting(Court((name,))) if seated else contextlib.nullcontext():
            (outcome,) = examine(case, (name,), "cuda:0")
        found[function] = outcome.verdict if outcome.failure is None else outcome.failure.check
    assert found == {"right": "verified", wrong: check}
