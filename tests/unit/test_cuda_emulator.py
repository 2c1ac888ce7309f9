"""The emulator does what a GPU does, and says what a GPU does not: races, barriers not met, memory never written."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attnswitch.problem.philox import ROUNDS, philox4x32

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

#: All that a source expects to be told.
SIZES = {"WARPS": 2, "RESIDENT": 1, "STORAGE": "float", "PHILOX_ROUNDS": ROUNDS}
HEAD = '#include "numbers.cuh"\n#include "philox.cuh"\n'
SHARED = "float* const shared = reinterpret_cast<float*>(shared_memory());\n"
IN_OUT = "const float* in = (const float*)a.query.at; float* out = (float*)a.lse;\n"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def run(folder: Path, body: str, *arrays: Any, threads: int = 64, shared: int = 1024, blocks: int = 1) -> None:
    """Run ``body`` as a kernel with the arrays as query, lse, base and delta."""
    source = folder / "test.cu"
    source.write_text(f"{HEAD}KERNEL test(const Arguments a) {{\n{body}\n}}\n")
    a = arguments.Arguments()
    for name, array in zip(("query", "lse", "base", "delta"), arrays, strict=False):
        if name == "query":
            a.query.at = array.ctypes.data
        else:
            setattr(a, name, array.ctypes.data)
    emulator.load(str(source), "test", SIZES).run(threads, blocks, a, shared)


# -- what a GPU does ---------------------------------------------------------------------------------------------------


def test_the_fields_lie_where_the_source_has_them(tmp_path: Path) -> None:
    names = [name for name, *_ in arguments.Arguments._fields_]
    found = np.zeros(len(names) + 1, np.int64)
    body = "i64* out = (i64*)a.lse; if (thread_index()) return;\n"
    body += "".join(f"out[{n}] = __builtin_offsetof(Arguments, {name});\n" for n, name in enumerate(names))
    body += f"out[{len(names)}] = sizeof(Arguments);"
    run(tmp_path, body, np.zeros(1), found)
    offsets = [getattr(arguments.Arguments, name).offset for name in names]
    assert found.tolist() == [*offsets, ctypes.sizeof(arguments.Arguments)]


def test_threads_meet_at_barriers(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32)
    out = np.zeros((3, 64), np.float32)
    body = SHARED + IN_OUT + "const int t = thread_index();\n"
    body += "store_shared(shared + t, in[t] + block_index()); barrier();\n"
    body += "out[64 * block_index() + t] = load_shared(shared + 63 - t);"
    run(tmp_path, body, values, out, blocks=3)
    np.testing.assert_array_equal(out, values[::-1] + np.arange(3)[:, None])


def test_lanes_exchange_values(tmp_path: Path) -> None:
    out = np.zeros(64, np.float32)
    run(
        tmp_path,
        IN_OUT + "out[thread_index()] = shuffle_xor(in[thread_index()], 5);",
        np.arange(64, dtype=np.float32),
        out,
    )
    np.testing.assert_array_equal(out, np.arange(64) ^ 5)


@pytest.mark.parametrize(("storage", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bit_types_round_as_they_should(tmp_path: Path, storage: str, dtype: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = np.zeros(2**16, np.float32)
    body = "const u16* in = (const u16*)a.query.at; float* out = (float*)a.lse;\n"
    run(
        tmp_path,
        body + f"for (int n = thread_index(); n < 65536; n += 64) out[n] = widen({storage}{{in[n]}});",
        bits,
        wide,
    )
    with np.errstate(all="ignore"):
        _check_rounding(tmp_path, storage, dtype, bits, wide)


def _check_rounding(folder: Path, storage: str, dtype: Any, bits: Any, wide: Any) -> None:
    np.testing.assert_array_equal(wide, bits.view(dtype).astype(np.float32))
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    near = wide[np.isfinite(wide)]
    ties = near[:-1] / 2 + near[1:] / 2  # neighbours in bits are neighbours in size
    numbers = np.concatenate([numbers, ties, [65519.996, 65520.0, 0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(
        np.float32
    )
    narrow = np.zeros(len(numbers), np.uint16)
    body = "const float* in = (const float*)a.query.at; u16* out = (u16*)a.lse;\n"
    body += f"for (int n = thread_index(); n < {len(numbers)}; n += 64) out[n] = narrow_{storage}(in[n]).bits;"
    run(folder, body, numbers, narrow)
    expected = numbers.astype(dtype)
    np.testing.assert_array_equal(narrow.view(dtype).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(("storage", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_matrices_are_loaded_and_multiplied(tmp_path: Path, storage: str, dtype: Any) -> None:
    """c += a b, all three laid out as the instructions of PTX have them."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    both = np.concatenate([a.ravel(), b.ravel()])
    out = np.ones((16, 8), np.float32)
    body = """
    const u16* in = (const u16*)a.query.at; float* out = (float*)a.lse;
    u16* const shared = (u16*)shared_memory();
    const int lane = thread_index();
    for (int n = lane; n < 384; n += 32) store_shared(shared + n, in[n]);
    warp_barrier();
    u32 left[4], right[4];
    load_matrices(left, shared + lane % 16 * 16 + lane / 16 * 8);
    load_matrices_transposed(right, shared + 256 + lane % 16 * 8);
    float* const upper = out + lane / 4 * 8 + 2 * (lane % 4);
    float* const lower = upper + 64;
    """
    run(
        tmp_path,
        body + f"multiply_accumulate<{storage}>(upper[0], upper[1], lower[0], lower[1], left, right[0], right[1]);",
        both,
        out,
        threads=32,
    )
    np.testing.assert_allclose(out, 1 + a.astype(np.float64) @ b.astype(np.float64), rtol=1e-6)


def test_copies_arrive_when_they_are_waited_for(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    out = np.zeros((3, 4), np.float32)
    body = SHARED + IN_OUT + "if (thread_index()) return;\n"
    body += "copy_async<16>(shared, in, 16); copy_commit(); copy_async<16>(shared + 4, in + 4, 8); copy_commit();\n"
    body += "for (int n = 0; n < 4; n++) out[n] = shared[n];\ncopy_wait<1>();\n"
    body += "for (int n = 0; n < 4; n++) out[4 + n] = shared[n] + (shared[4] == shared[4]);\ncopy_wait<0>();\n"
    body += "for (int n = 0; n < 4; n++) out[8 + n] = shared[4 + n];"
    run(tmp_path, body, values, out)
    assert np.isnan(out[0]).all()
    assert out[1].tolist() == [0, 1, 2, 3]
    assert out[2].tolist() == [4, 5, 0, 0]


def test_philox_is_the_one_of_the_contract(tmp_path: Path) -> None:
    out = np.zeros((64, 4), np.uint32)
    body = "const Words w = philox(thread_index(), 7, 3, 1, 0xdeadbeef, 0x12345678);\n"
    body += "for (int n = 0; n < 4; n++) ((u32*)a.lse)[4 * thread_index() + n] = w.at[n];"
    run(tmp_path, body, np.zeros(1), out)
    expected = np.stack(philox4x32((np.arange(64), 7, 3, 1), (0xDEADBEEF, 0x12345678)), -1)
    np.testing.assert_array_equal(out, expected)


# -- what a GPU does not say -------------------------------------------------------------------------------------------


def test_memory_that_was_never_written_is_nan(tmp_path: Path) -> None:
    out = np.zeros(64, np.float32)
    run(tmp_path, SHARED + IN_OUT + "out[thread_index()] = load_shared(shared + thread_index());", np.zeros(1), out)
    assert np.isnan(out).all()


RACES = [
    ("store_shared(shared + t, 1.f); out[t] = load_shared(shared + (t + 1) % 64);", "a race"),
    ("out[t] = load_shared(shared + (t + 1) % 64); store_shared(shared + t, 1.f);", "a race"),
    ("store_shared(shared + t, 1.f); warp_barrier(); out[t] = load_shared(shared + (t + 32) % 64);", "a race"),
    ("copy_async<16>(shared + t / 2 * 4, in, 0); copy_commit(); copy_wait<0>();", "a race"),
    ("copy_async<16>(own, in, 0); copy_commit(); barrier(); copy_wait<0>(); out[t] = load_shared(mirror);", "a race"),
    ("if (t < 32) barrier();", "some threads never reach"),
    ("if (t % 2) barrier(); else warp_barrier();", "some threads never reach"),
    ("if (t % 2) warp_barrier(); else out[t] = shuffle_xor(1.f, 1);", "different instructions"),
    ("store_shared(shared + 256 + t, 1.f);", "shared memory is left"),
    ("store_shared(shared - 1 - t, 1.f);", "shared memory is left"),
    ("store_shared(shared + (1 << 28), 1.f);", "shared memory is left"),  # it goes no further
    ("u32 to[4]; load_matrices(to, shared + (1 << 28));", "shared memory is left"),
    ("copy_async<16>(own, in + 1, 16); copy_commit(); copy_wait<0>();", "odd address"),
]
ORDERED = [
    "store_shared(shared + t, 1.f); barrier(); out[t] = load_shared(shared + (t + 1) % 64);",
    "out[t] = load_shared(shared + (t + 1) % 64); barrier(); store_shared(shared + t, 1.f);",
    "store_shared(shared + t, 1.f); warp_barrier(); out[t] = load_shared(shared + (t ^ 1));",
    "out[t] = load_shared(shared) + load_shared(shared + t);",
    "copy_async<16>(own, in, 0); copy_commit(); copy_wait<0>(); barrier(); out[t] = load_shared(mirror);",
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel with all of them, chosen by number."""
    source = tmp_path_factory.mktemp("cases") / "cases.cu"
    bodies = (body for body in [*(body for body, _ in RACES), *ORDERED])
    switch = "".join(f"case {n}: {body} break;\n" for n, body in enumerate(bodies))
    begin = "const int t = thread_index(); float* const own = shared + 4 * t; float* const mirror = shared + 63 - t;\n"
    text = f"{HEAD}KERNEL cases(const Arguments a) {{\n{SHARED}{IN_OUT}{begin}switch (a.keys) {{\n{switch}}}\n}}\n"
    source.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(source.parent))
        return emulator.load(str(source), "cases", SIZES)


def run_case(cases: Any, number: int) -> None:
    values, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    a = arguments.Arguments(keys=number)
    a.query.at, a.lse = values.ctypes.data, out.ctypes.data
    cases.run(64, 1, a, 1024)


@pytest.mark.parametrize(("body", "message"), RACES)
def test_what_a_gpu_would_do_at_random_is_an_error(cases: Any, body: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_case(cases, RACES.index((body, message)))


@pytest.mark.parametrize("body", ORDERED)
def test_what_barriers_order_is_none(cases: Any, body: str) -> None:
    run_case(cases, len(RACES) + ORDERED.index(body))


def test_a_kernel_that_failed_can_run_again(tmp_path: Path) -> None:
    out = np.zeros(64, np.float32)
    with pytest.raises(RuntimeError):
        run(tmp_path, "if (thread_index() < 32) barrier();", np.zeros(1), out)
    run(tmp_path, IN_OUT + "barrier(); out[thread_index()] = 1;", np.zeros(1), out)
    assert (out == 1).all()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    emulator.unavailable.cache_clear()
    assert "g++" in emulator.unavailable()
    emulator.unavailable.cache_clear()
