"""Operands beside memory that nobody may touch, and what happens to a kernel that reads on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attnswitch import arrays
from attnswitch.verify import Case, MaskRecipe, check
from attnswitch.verify.drawing.case import Placing
from attnswitch.verify.launch import fenced
from attnswitch.verify.launch.call import place_operands
from attnswitch.verify.session import apart
from attnswitch.verify.trial import Subject

pytestmark = pytest.mark.skipif(bool(fenced.lacking("cpu")), reason=fenced.lacking("cpu"))
sys.path.append(str(Path(__file__).parents[1] / "saboteurs"))
PAGE = 4096


def made(shape: tuple[int, ...], kind: Any) -> Any:
    return (np.arange(np.prod(shape)) % 2).reshape(shape).astype(kind)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("kind", [np.float64, ml_dtypes.bfloat16, np.float16, np.bool_, np.int8, np.int32])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 1, 1), (3, 0, 4), (1, 2, 1000, 3)])
def test_values_lie_at_the_fence(shape: tuple[int, ...], kind: Any, end: bool, library: str) -> None:
    values = made(shape, kind)
    placed = fenced.beside_fence(values, end, library, "cpu")
    assert isinstance(placed, torch.Tensor if library == "torch" else np.ndarray)
    back = arrays.passage(placed, library, "numpy")
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()
    if values.size:
        begins, step = arrays.address(placed), 4 if kind is np.int32 else 16
        assert begins % (step if end else PAGE) == 0
        assert not end or 0 <= -(begins + values.nbytes) % PAGE < step
    placed[...] = 0  # it is the caller's to write to


#: 60 bytes, which 4 more bring to the next 16.
TOUCH = """
import ctypes, numpy as np
from attnswitch.verify.launch.fenced import beside_fence

placed = beside_fence(np.zeros((3, 5), np.float32), {end}, "numpy", "cpu")
begins = placed.__array_interface__["data"][0]
ctypes.string_at(begins + 63 + {beyond} if {end} else begins - {beyond}, 1)
"""


@pytest.mark.parametrize("end", [False, True])
def test_a_byte_beyond_ends_the_process(end: bool) -> None:
    codes = [
        subprocess.run([sys.executable, "-c", TOUCH.format(end=end, beyond=beyond)], check=False).returncode
        for beyond in (0, 1)
    ]
    assert codes[0] == 0
    assert codes[1] in (-signal.SIGSEGV, -signal.SIGBUS)


OPERANDS = ("query", "key", "value", "attn_mask", "key_lengths", "grad_out", "grad_lse", "sinks", "alibi_slopes")
OF_FORMS = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "key_scale", "value_scale", "tree_mask")
PAGED = Case(batch=2, seq_q=3, seq_k=8, page=4, lengths=(3, 8), alignment="bottom_right", data_seed=3)
#: Cases of each form of the call, and what it has beside query, key and value.
FORMS = {
    "dense": (
        Case(group=2, seq_q=5, seq_k=9, mask=MaskRecipe("bool", "bhqk", 4, "random"), grads="qkv"),
        {"attn_mask"},
    ),
    "float mask": (Case(seq_q=5, seq_k=9, mask=MaskRecipe("float32", "k", 1, "random"), lengths=(7,)), {"key_lengths"}),
    "heads": (Case(heads_kv=3, seq_q=5, seq_k=9, sinks="normal", alibi="batch"), {"sinks", "alibi_slopes"}),
    "tokens first": (Case(heads_kv=3, seq_q=5, seq_k=9, layout="BLHD"), set()),
    "packed": (
        Case(batch=2, heads_kv=3, seq_q=5, seq_k=9, query_lengths=(5, 2), lengths=(9, 4), data_seed=4),
        {"cu_seqlens_q", "cu_seqlens_k"},
    ),
    "pages": (PAGED, {"block_table", "key_lengths"}),
    "8 bits": (PAGED.replace(cache="int8", scales="page"), {"key_scale", "value_scale"}),
    "tree": (PAGED.replace(tree="random"), {"tree_mask"}),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("placing", ["at-start", "at-end"])
@pytest.mark.parametrize("name", FORMS)
def test_every_array_of_a_call_lies_there(name: str, placing: str, library: str) -> None:
    case, besides = FORMS[name]
    case = case.replace(placing=Placing(*[placing] * 5), library=library)
    placed = place_operands(case, Subject(case).data, "cpu")
    looked = set()
    for role in (*OPERANDS, *OF_FORMS):
        array = getattr(placed, role)
        if array is None:
            continue
        looked.add(role)
        array = arrays.passage(array, library, "numpy")
        begins = arrays.address(array)
        assert array.flags.c_contiguous, role
        assert begins % PAGE == 0 if placing == "at-start" else -(begins + array.nbytes) % PAGE < 16, role
    assert looked >= {"query", "key", "value", *besides}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["tiled", "sdpa-math"])
def test_a_right_backend_is_looked_at(backend: str, library: str) -> None:
    outcome = check(Case(seq_q=5, seq_k=9, library=library, grads="qkv", check="fences"), backend)
    assert outcome.verdict == "verified", outcome
    assert "fences" in outcome.checks


@pytest.mark.slow
def test_a_read_beyond_is_a_finding_of_this_check_alone() -> None:
    case = Case(seq_q=4, seq_k=4, library="numpy")
    with apart.pool("cpu", "saboteurs:ReadsOn", 60.0) as workers:
        (quiet,) = workers.examine(case, ("saboteurs:ReadsOn",), "cpu")
        (found,) = workers.examine(case.replace(check="fences"), ("saboteurs:ReadsOn",), "cpu")
    assert quiet.verdict == "verified"
    assert found.failure is not None
    assert found.failure.check == "crash"
    assert found.failure.message == "the process died of SIGSEGV, with operands beside which there is no memory"


ON_GPU = """
import numpy as np, torch
from attnswitch.verify.launch.fenced import beside_fence

placed = beside_fence(np.arange(15, dtype=np.float32), {end}, "torch", "cuda:0")
assert (placed.cpu() == torch.arange(15)).all()
first = {beyond} + 15 if {end} else -{beyond}
memory = type("Memory", (), {{"__cuda_array_interface__": {{
    "shape": (1,), "typestr": "<f4", "data": (placed.data_ptr() + 4 * first, False), "version": 3}}}})()
(torch.as_tensor(memory, device="cuda:0") + 1).cpu()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("end", [False, True])
def test_a_number_beyond_ends_the_context_of_a_gpu(end: bool) -> None:
    """The one place behind 15 numbers is there, as they end at a multiple of 16 bytes from where memory does."""
    runs = [
        subprocess.run([sys.executable, "-c", ON_GPU.format(end=end, beyond=beyond)], capture_output=True, check=False)
        for beyond in (0, 1)
    ]
    assert [run.returncode for run in runs] == [0, 1], runs
    assert b"illegal memory access" in runs[1].stderr


def test_a_system_without_memory_for_a_fence_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("attnswitch.verify.launch.fenced.mmap.mmap", refused)
    outcome = check(Case(seq_q=5, seq_k=9, check="fences"), "tiled")
    assert outcome.verdict == "verified", outcome
    assert "fences" not in outcome.checks
