"""Functions in files as targets: how they are found, read, named on the command line, and run in other processes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnswitch import Problem
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend
from attnswitch.machine.device import Device
from attnswitch.machine.registry import Missing
from attnswitch.planning import planner
from attnswitch.verify import Case, check, load
from attnswitch.verify.session import apart

PLAIN = """
import torch


def attention(query, key, value, is_causal=False):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def doubled(query, key, value, is_causal=False):
    return 2 * attention(query, key, value, is_causal)
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """A name is of the folder of one test."""
    registry.forget()
    planner.forget()
    yield
    registry.forget()
    planner.forget()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``written(text)`` makes ``kernels.py`` in the current folder, an empty one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "kernels.py"
        path.write_text(text)
        return path

    return write


def loaded(name: str) -> Any:
    found = registry.load(name)
    assert isinstance(found, Backend), found
    return found


def refused(name: str) -> str:
    found = registry.load(name)
    assert isinstance(found, Missing)
    return found.reason


# -- the file and the function -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.py:attention", "absent.py is not a file: expected a file of Python"),
        (
            "kernels.py:none",
            "kernels.py has no 'none': expected one of attention, Class, later, several, anything",
        ),
        ("kernels.py:number", "number in kernels.py is not callable: expected a function of arrays"),
        ("kernels.py:Class", "Class in kernels.py is a class"),
        ("kernels.py:Class.other", "kernels.py has no 'Class.other': expected one of method"),
        ("kernels.py:later", "later in kernels.py is a coroutine function (async def)"),
        ("kernels.py:several", "several in kernels.py is a generator function"),
        ("kernels.py:anything", "anything() has the signature (*args, **kwargs): expected parameters with names"),
        ("kernels.py:built", "built() has no signature that Python can read: wrap it in a def"),
        (
            "kernels.py:needs",
            "needs() needs 'rotary', which a function like torch does not have: give it a default, or",
        ),
        ("kernels.py:keyless@torch", "keyless() has no parameter for key: expected key or k"),
        ("kernels.py:both@bhsd", "both() has both query and q: expected one of them"),
        ("kernels.py:windows@bhsd", "windows() has both window_size and left_window_size: expected one of them"),
        (
            "kernels.py:plain",
            "plain() may take (B, H, L, D) or (B, L, H, D), which its parameters do not tell: add --like",
        ),
        ("kernels.py:plain@flash-attn-varlen", "plain() has no parameter for cu_seqlens_q"),
        ("kernels.py:plain@paged", "plain() needs 'k', which a function like paged does not have"),
        ("kernels.py:plain@flash", "like 'flash' is not known; expected one of torch, flash-attn, flash-attn-varlen"),
        (
            "kernels.py:plain@bhsd+jax",
            "'jax' in like 'bhsd+jax': expected one of torch, numpy, cupy, gqa, deterministic, empty, asserts",
        ),
        ("kernels.py:plain@bhsd+numpy+torch", "like 'bhsd+numpy+torch' names numpy and torch: expected one library"),
    ],
)
def test_what_is_no_function_is_refused_by_name(name: str, said: str, written: Callable[[str], Path]) -> None:
    written("""
import torch
number = 3
def attention(query, key, value, is_causal=False): ...
class Class:
    def method(self): ...
async def later(q, k, v): ...
def several(q, k, v): yield q
def anything(*args, **kwargs): ...
built = torch.nn.functional.scaled_dot_product_attention
def needs(query, key, value, rotary, is_causal=False): ...
def keyless(query, value, is_causal=False): ...
def both(query, q, k, v, is_causal=False): ...
def windows(q, k, v, window_size=(-1, -1), left_window_size=None): ...
def plain(q, k, v): ...
""")
    told = refused(name)
    assert said in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def attention(", "kernels.py cannot be imported: SyntaxError: '(' was never closed"),
        (
            "import no_such_module",
            "kernels.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise SystemExit(0)", "kernels.py cannot be imported: SystemExit: 0"),
        ("1 / 0", "kernels.py cannot be imported: ZeroDivisionError"),
        ("a = '\\0'; x = \x00", "kernels.py cannot be imported: "),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_sentence(text: str, said: str, written: Callable[[str], Path]) -> None:
    before = set(sys.modules)
    written(text)
    assert said in refused("kernels.py:attention")
    assert not [name for name in sys.modules.keys() - before if name.startswith("attnswitch_function")]


@pytest.mark.parametrize(
    ("function", "like", "library"),
    [
        ("def f(query, key, value, attn_mask=None): ...", "torch", "torch"),
        ("def f(query, key, value, *, is_causal): ...", "torch", "torch"),
        ("f = lambda query, key, value, is_causal: 0", "torch", "torch"),
        ("def g(q, k, v, causal, window_size=(-1, -1), softmax_scale=None): ...\nf = functools.partial(g, causal=True)",
         "flash-attn", "torch"),
        ("def f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k): ...", "flash-attn-varlen", "torch"),
        ("def f(q, k_cache, v_cache, block_table, cache_seqlens): ...", "paged", "torch"),
        ("def f(Query, Key, Value, key_lengths): ...", "attnswitch", "torch"),
        ("def f(query: np.ndarray, key: np.ndarray, value: np.ndarray, is_causal=False): ...", "torch", "numpy"),
        ("def f(query: 'cupy.ndarray', key, value, is_causal=False): ...", "torch", "cupy"),
        ("class f(torch.nn.Module):\n  def forward(self, query, key, value, is_causal): ...\nf = f().forward",
         "torch", "torch"),
    ],
)  # fmt: skip
def test_what_a_function_is_like_follows_from_its_parameters(
    function: str, like: str, library: str, written: Callable[[str], Path]
) -> None:
    written(f"import functools, torch\nimport numpy as np\n{function}")
    backend = loaded("kernels.py:f")
    assert backend.notice.startswith(f"f() is called like {like} (deduced from its parameters; --like says otherwise)")
    assert (backend.library, backend.reading.like.name) == (library, like)
    assert backend.name == "kernels.py:f"


def test_what_is_named_is_not_deduced(written: Callable[[str], Path]) -> None:
    written("def f(query, key, value, is_causal=False): ...")
    backend = loaded("kernels.py:f@bshd+numpy")
    assert backend.notice == "f() is called like bshd, with numpy: query, key, value, is_causal"


def test_a_parameter_that_is_not_known_has_its_default(written: Callable[[str], Path]) -> None:
    written("""
def attention(query, /, key, value, warps=4, *rest, is_causal, **options):
    assert (warps, rest, options) == (4, (), {})
    return query * 0 + value.mean(2, keepdim=True)
""")
    case = Case(seq_q=1, seq_k=1, dim_qk=8, dim_v=8)
    assert check(case, "kernels.py:attention").verdict == "verified"


def test_neighbours_are_imported_and_behind_all_others(written: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "beside_kernels.py").write_text("SCALE = 2\n")
    (tmp_path / "typing.py").write_text("raise SystemExit('not this one')\n")
    written("import typing\nfrom beside_kernels import SCALE\ndef f(query, key, value, is_causal=False): ...")
    before = list(sys.path)
    backend = loaded("kernels.py:f")
    assert sys.path == before
    source = backend.toolchain(Device.cpu())["kernels.py"]
    (tmp_path / "beside_kernels.py").write_text("SCALE = 3\n")
    assert backend.toolchain(Device.cpu())["kernels.py"] != source
    sys.modules.pop("beside_kernels")


def test_what_a_file_prints_does_not_stand_in_documents(
    written: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    written("print('hello')\ndef f(query, key, value, is_causal=False): ...")
    loaded("kernels.py:f")
    assert capsys.readouterr() == ("", "hello\n")


def test_triton_is_interpreted_where_there_is_no_gpu(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    written("def f(query, key, value, is_causal=False):\n  import triton.language as tl")
    backend, problem = loaded("kernels.py:f"), Problem.parse("b1.h1.s8.d16.fp32")
    assert (backend.emulation, backend.builds_per_shape) == ({"TRITON_INTERPRET": "1"}, True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "kernels.py imports Triton, and the arrays are on the CPU" in backend.supports(problem, Device.cpu())[0]
    assert backend.supports(problem, Device.named("h100")) == ()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.supports(problem, Device.cpu()) == ()
    (reason,) = backend.supports(problem.replace(dtype="bfloat16"), Device.cpu())
    assert reason.startswith("dtype bfloat16: Triton's interpreter multiplies its bits as integers")
    assert backend.supports(problem.replace(dtype="bfloat16"), Device.named("h100")) == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton has a driver where there is a GPU")
@pytest.mark.parametrize("place", ["kernels", "beside_kernels"])
def test_a_file_may_ask_triton_for_its_device_where_there_is_no_gpu(
    place: str, written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton: Any = pytest.importorskip("triton")
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    written("import os\nfrom beside_kernels import *")
    (tmp_path / f"{place}.py").write_text("""
import triton
from triton.runtime import driver
DEVICE = triton.runtime.driver.active.get_active_torch_device()
BACKEND = driver.active.get_current_target().backend
def f(query, key, value, is_causal=False, device=DEVICE, backend=BACKEND): ...
""")
    parameters = loaded("kernels.py:f").reading.signature.parameters
    assert (str(parameters["device"].default), parameters["backend"].default) == ("cpu", "cpu")
    sys.modules.pop("beside_kernels", None)


TUNED = """
import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.autotune(configs=[triton.Config({"WIDTH": 16}), triton.Config({"WIDTH": 8})], key=["keys"])
@triton.jit
def _row(query, key, value, out, scale, keys, WIDTH: tl.constexpr):
    head, row, columns = tl.program_id(1), tl.program_id(0), tl.arange(0, WIDTH)
    at = (head * tl.num_programs(0) + row) * WIDTH + columns
    q, most, total, sums = tl.load(query + at), -float("inf"), 0.0, tl.zeros([WIDTH], tl.float32)
    for j in range(keys):
        there = (head * keys + j) * WIDTH + columns
        score = tl.sum(q * tl.load(key + there)) * scale
        above = tl.maximum(most, score)
        kept, weight = tl.exp(most - above), tl.exp(score - above)
        total, sums, most = total * kept + weight, sums * kept + weight * tl.load(value + there), above
    tl.store(out + at, sums / total)


def attention(q, k, v, scale):
    if q.dtype is not torch.float32 or q.shape[3] != 16 or v.shape[3] != 16:
        raise NotImplementedError("float32 with 16 columns")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q, device=DEVICE)
    _row[q.shape[2], q.shape[0] * q.shape[1]](q, k, v, out, scale, k.shape[2])
    return out
"""


@pytest.mark.slow
def test_an_autotuned_kernel_takes_its_first_config_where_there_is_no_gpu(written: Callable[[str], Path]) -> None:
    pytest.importorskip("triton")
    name = f"{written(TUNED)}:attention@bhsd"
    right = apart.check(Case(batch=2, seq_q=3, seq_k=5, dim_qk=16, dim_v=16), name)
    assert (right.verdict, right.failure) == ("verified", None)
    refused = apart.check(Case(seq_q=3, seq_k=5, dim_qk=16, dim_v=16, dtype="bfloat16"), name)
    assert "Triton's interpreter multiplies its bits as integers" in refused.reasons[0]


# -- the commands ------------------------------------------------------------------------------------------------------

QUICK = ("--quick", "--longest", "40", "--no-isolate", "--no-corpus", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--like", "bhsd"), "--like bhsd: it says how a function is called; name that with --function FILE.py:NAME"),
        (("--function", "kernels:attention"), "--function kernels:attention: expected FILE.py:NAME, such as"),
        (("--function", "kernels.py:attention@torch", "--like", "torch"), "leave out one"),
        (("--function", "kernels.py:attention", "--like", "flash"), "like 'flash' is not known; expected one of torch"),
        (("--function", "kernels.py:none"), "is a function in a file, and kernels.py has no 'none'"),
        (("--backend", "absent.py:f"), "absent.py is not a file"),
        (("--function", "ker\x1b[31mnels.py:f"), r"a path with '\x1b' cannot be told apart"),
        (
            ("--function", "a:b/kernels.py:f"),
            "a path with ':' cannot be told apart from what follows it: link the file under another",
        ),
    ],
)
def test_what_is_said_wrongly_ends_the_command(
    arguments: tuple[str, ...], said: str, written: Callable[[str], Path], command: Any
) -> None:
    written(PLAIN)
    ran = command("verify")(*QUICK, *arguments)
    assert (ran.code, said in ran.out) == (2, True), ran.out
    assert "\x1b[31m" not in ran.out


def test_a_function_is_verified_and_told_how_it_is_called(written: Callable[[str], Path], command: Any) -> None:
    written(PLAIN)
    ran = command("verify")(*QUICK, "--examples", "12", "--function", "kernels.py:attention", "--like", "torch")
    assert ran.code == 0, ran.out
    assert "kernels.py:attention@torch: attention() is called like torch, with torch: query, key, value" in ran.out
    assert "every result is within its error bound" in ran.out


#: Of some lengths, whose heads may be shared.
PICKY = """
import torch


def attention(query, key, value, is_causal=False, enable_gqa=False):
    if query.shape[2] % 4 != 1:
        raise NotImplementedError("too\\n[b]long")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)
"""


def test_who_refuses_most_is_asked_why(written: Callable[[str], Path], command: Any) -> None:
    """In a line, whatever the kernel says."""
    written(PICKY)
    ran = command("verify")(*QUICK, "--examples", "30", "--function", "kernels.py:attention", "--like", "torch")
    assert ran.code == 0, ran.out
    mostly = "refused by kernels.py:attention@torch on cpu, mostly: "
    (line,) = [line for line in ran.out.splitlines() if line.startswith(mostly)]
    assert re.search(r"\d+ times attention\(\) raises NotImplementedError: too \[b\]long", line), line


@pytest.mark.slow
def test_a_relative_path_is_found_by_a_worker_and_its_case_replayed(
    written: Callable[[str], Path], command: Any, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    written(PLAIN).rename(tmp_path / "own" / "kernels.py")
    quick = ("--quick", "--longest", "8", "--device", "cpu", "--corpus", "cases", "--workers", "1")
    ran = command("verify")(*quick, "--examples", "20", "--max-failures", "1", "--function", "own/kernels.py:doubled")
    assert ran.code == 1, ran.out
    (path,) = (tmp_path / "cases").glob("*.json")
    assert load(path).backend == "own/kernels.py:doubled"
    assert f"attnswitch replay cases/{path.name} --backend own/kernels.py:doubled" in ran.out
    (tmp_path / "own" / "kernels.py").write_text("open('sprung', 'w').close()\n" + PLAIN)
    registry.forget()
    refused = command("replay")(str(path))
    assert (refused.code, "name it yourself, --backend own/kernels.py:doubled" in refused.out) == (2, True)
    assert not (tmp_path / "sprung").exists()
    again = command("replay")(str(path), "--backend", "own/kernels.py:doubled", "--json")
    (document,) = json.loads(again.out)
    assert (again.code, document["result"], (tmp_path / "sprung").exists()) == (1, "FAILED", True)
    fixed = command("replay")(str(path), "--backend", "own/kernels.py:attention", "--emit-pytest", "test_it.py")
    assert (fixed.code, fixed.out.split()[0]) == (0, "FIXED")
    text = (tmp_path / "test_it.py").read_text()
    assert '"own/kernels.py:attention"' in text
    assert "own/kernels.py has to be there, seen from the folder in which the test runs." in text


def test_a_name_is_a_target_and_known_once_it_was_asked_for(written: Callable[[str], Path]) -> None:
    name = f"{written(PLAIN)}:attention"
    assert registry.is_function(name)
    assert not registry.is_known(name)
    registry.load(name)
    assert registry.is_known(name)
    assert os.path.isabs(name)
    assert not registry.is_function("package.module:Class")
