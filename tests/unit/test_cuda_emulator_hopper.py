"""The emulator does what Hopper's asynchronous instructions do, and reports what a GPU would do at random."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attnswitch.problem.philox import ROUNDS

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
arguments = importlib.import_module("attnswitch.backends.cuda.launching.arguments")
tensor_maps = importlib.import_module("attnswitch.backends.cuda.launching.tensor_maps")

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")

SIZES = {"WARPS": 8, "RESIDENT": 1, "STORAGE": "bf16", "PHILOX_ROUNDS": ROUNDS, "BLOCK_M": 128, "BLOCK_N": 64}
HEAD = """#include "hopper/wgmma.cuh"
struct Shared {
    alignas(1024) T tile[4][64 * 64];
    alignas(1024) float numbers[1024];
    Barrier full[2], free[2];
};
// Sums of a warpgroup to rows of 64.
DEVICE void put(float* out, const float (&sums)[32]) {
    const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane / 4;
    for (int n = 0; n < 32; n++) out[(row + n / 2 % 2 * 8) * 64 + n / 4 * 8 + lane % 4 * 2 + n % 2] = sums[n];
}
// Rows as registers hold a left operand, and the same from shared memory.
DEVICE void take(u32 (&to)[4][4], const float* in) {
    const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane / 4;
    for (int k = 0; k < 4; k++)
        for (int r = 0; r < 4; r++) {
            const float* const at = in + (row + r % 2 * 8) * 64 + k * 16 + r / 2 * 8 + lane % 4 * 2;
            to[k][r] = pack_pair<T>(at[0], at[1]);
        }
}
"""
BEGIN = """
    Shared& shared = *reinterpret_cast<Shared*>(shared_panels());
    const int t = thread_index(), group = t / 128;
    float* const out = (float*)a.lse;
    const float* const in = (const float*)a.base;
    float sums[32] = {};
    u32 left[4][4] = {};
    const u32 origin = shared_address(&shared) >> 4;
    const Matrix tile0(origin), tile1(origin + 512);
    if (t == 0) {
        for (int n = 0; n < 2; n++) shared.full[n].init(1), shared.free[n].init(1);
        publish_barriers();
    }
    barrier();
"""
#: Loads of rows 0 and 64 on, by the first thread.
LOAD = "if (t == 0) load_tile<64, 64>(shared.tile[0], map, shared.full[0], 0, 0, 0);\n"
LOAD += "if (t == 0) load_tile<64, 64>(shared.tile[1], map, shared.full[1], 64, 0, 0);\n"
WAIT = "shared.full[0].wait(0), shared.full[1].wait(0);\n"
MULTIPLY = "begin_products(); product_nt<64, 64>(sums, tile0, tile1); commit_products();\n"
ALL = f"{LOAD}{WAIT}if (group == 0) {{ {MULTIPLY} wait_products<0>(); put(out, sums); }}\n"

#: What a kernel does, and what is told of it; nothing where it is right.
CASES: dict[str, tuple[str, str]] = {
    "a b^T": (ALL, ""),
    "a^T b": (
        LOAD + WAIT + "if (group == 0) { begin_products(); product_tn<64, 64, false>(sums, tile0, tile1);"
        " commit_products(); wait_products<0>(); put(out, sums); }",
        "",
    ),
    "a in registers": (
        LOAD + WAIT + "take(left, in); if (group == 0) { begin_products(); product_nn<64, 64>(sums, left, tile1);"
        " commit_products(); wait_products<0>(); put(out, sums); }",
        "",
    ),
    "a b": (
        LOAD + WAIT + "if (group == 0) { begin_products(); product_nn<64, 64>(sums, tile0, tile1);"
        " commit_products(); wait_products<0>(); put(out, sums); }",
        "",
    ),
    "a in shared memory by its own threads": (
        LOAD
        + WAIT
        + "take(left, in); if (group == 0) { store_packed(shared.tile[2], left); show_writes(); meet_at(1, 128);"
        " begin_products(); product_nn<64, 64>(sums, Matrix(origin + 1024), tile1);"
        " commit_products(); wait_products<0>(); put(out, sums); }",
        "",
    ),
    "the same, not shown": (
        LOAD + WAIT + "take(left, in); if (group == 0) { store_packed(shared.tile[2], left); meet_at(1, 128);"
        " begin_products(); product_nn<64, 64>(sums, Matrix(origin + 1024), tile1);"
        " commit_products(); wait_products<0>(); }",
        "not shown",
    ),
    "a tile that was not waited for": (LOAD + f"if (group == 0) {{ {MULTIPLY} wait_products<0>(); }}", "a race"),
    "a tile loaded again while it is multiplied": (
        LOAD + WAIT + f"if (group == 0) {{ {MULTIPLY} }} meet_at(1, 256);\n"
        "if (t == 128) load_tile<64, 64>(shared.tile[0], map, shared.full[0], 0, 0, 0);\n"
        "if (group == 0) wait_products<0>(); shared.full[0].wait(1);",
        "a race",
    ),
    "the same after it was multiplied": (
        LOAD + WAIT + f"if (group == 0) {{ {MULTIPLY} wait_products<0>(); }} meet_at(1, 256);\n"
        "if (t == 128) load_tile<64, 64>(shared.tile[0], map, shared.full[0], 0, 0, 0);\nshared.full[0].wait(1);",
        "",
    ),
    "freed by an mbarrier": (
        LOAD + WAIT + f"if (group == 0) {{ {MULTIPLY} wait_products<0>(); if (t < 1) shared.free[0].arrive(); }}\n"
        "meet_at(1, 256); if (t == 128) { shared.free[0].wait(0);"
        " load_tile<64, 64>(shared.tile[0], map, shared.full[0], 0, 0, 0); shared.full[0].wait(1); }",
        "",
    ),
    "what a thread wrote was not shown": (
        "store_shared(shared.tile[0] + 16 * t, T{}); barrier();\n"
        f"if (group == 0) {{ {MULTIPLY} wait_products<0>(); }}",
        "not shown",
    ),
    "shown before the barrier": (
        "for (int n = t; n < 2 * 64 * 64; n += 256) store_shared(shared.tile[0] + n, T{}); show_writes(); barrier();\n"
        f"if (group == 0) {{ {MULTIPLY} wait_products<0>(); }}",
        "",
    ),
    "one tile, cleared by two warpgroups that each multiply it": (
        LOAD + WAIT + "clear_rows<64, 64>(shared.tile[1], 40); meet_at(1 + group, 128);\n"
        f"{MULTIPLY} wait_products<0>(); if (group == 0) put(out, sums);",
        "",
    ),
    "the same, where one of them does not wait for its own": (
        LOAD + WAIT + f"clear_rows<64, 64>(shared.tile[1], 40);\n{MULTIPLY} wait_products<0>();",
        "a race",
    ),
    "the same, loaded again when one of them has multiplied it": (
        LOAD + WAIT + "clear_rows<64, 64>(shared.tile[1], 40); meet_at(1 + group, 128);\n"
        f"{MULTIPLY} wait_products<0>(); meet_at(1 + group, 128);"
        "if (t == 0) load_tile<64, 64>(shared.tile[1], map, shared.full[1], 0, 0, 0); shared.full[1].wait(1);",
        "a race",
    ),
    "two write different numbers": ("store_shared(shared.numbers, float(group));", "a race"),
    "a left operand is rewritten too early": (
        LOAD + WAIT + "if (group == 0) { begin_products(); product_nn<64, 64>(sums, left, tile1); commit_products();"
        " left[0][0] = 1; wait_products<0>(); }",
        "left operand",
    ),
    "sums are written too early": (
        LOAD + WAIT + f"if (group == 0) {{ {MULTIPLY} sums[3] = 1; wait_products<0>(); }}",
        "sums of a product under way",
    ),
    "no fence": (LOAD + WAIT + "if (group == 0) product_nt<64, 64>(sums, tile0, tile1);", "wgmma.fence"),
    "products at the end": (LOAD + WAIT + f"if (group == 0) {{ {MULTIPLY} }}", "products were still under way"),
    "copies at the end": (LOAD, "copies were still under way"),
    "a barrier that was not made": (
        "shared.full[0].state = 0; if (t == 0) shared.full[0].arrive();",
        "not initialised",
    ),
    "a barrier that copies do not know": (
        "Barrier& own = *reinterpret_cast<Barrier*>(shared.numbers); if (t == 0) { own.init(1);"
        " load_tile<64, 64>(shared.tile[0], map, own, 0, 0, 0); }",
        "not made known to copies",
    ),
    "one phase after another": ("if (t < 2) shared.free[0].arrive(); if (t < 2) shared.free[0].wait(1);", ""),
    "more than it waits for": (
        "if (t == 0) { shared.full[0].expect(64); shared.full[0].arrive(); }",
        "more arrive at an mbarrier",
    ),
    "nobody arrives": ("if (t == 0) shared.full[0].wait(0);", "some threads never reach"),
    "others are waited for": ("meet_at(1, t < 128 ? 256 : 128);", "different numbers"),
    "lanes apart": (
        LOAD + WAIT + "if (group == 0 && t % 2) wait_products<0>(); else begin_products();",
        "different instructions",
    ),
    "additions": (
        "if (t < 32) { store_shared(shared.numbers + t, 1.f); show_writes(); warp_barrier();"
        " if (t == 0) add_floats(out, shared.numbers, 32), commit_additions(), wait_additions(); }",
        "",
    ),
    "additions of what was not shown": (
        "if (t < 32) { store_shared(shared.numbers + t, 1.f); warp_barrier();"
        " if (t == 0) add_floats(out, shared.numbers, 32), commit_additions(), wait_additions(); }",
        "not shown",
    ),
    "numbers rewritten while they are added": (
        "if (t < 32) { store_shared(shared.numbers + t, 1.f); show_writes(); warp_barrier();"
        " if (t == 0) add_floats(out, shared.numbers, 32), commit_additions(); warp_barrier();"
        " store_shared(shared.numbers + t, 2.f); if (t == 0) wait_additions(); }",
        "a race",
    ),
    "additions at the end": (
        "if (t < 32) { store_shared(shared.numbers + t, 1.f); show_writes(); warp_barrier();"
        " if (t == 0) add_floats(out, shared.numbers, 32), commit_additions(); }",
        "additions were still under way",
    ),
    "numbers side by side": (
        "if (t == 0) shared.full[0].expect(256), copy_bytes(shared.numbers, in, 256, &shared.full[0].state);\n"
        "shared.full[0].wait(0); if (t < 64) out[t] = load_shared(shared.numbers + t);",
        "",
    ),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel with all of them, chosen by number."""
    source = tmp_path_factory.mktemp("cases") / "cases.cu"
    switch = "".join(f"case {n}: {{ {body} break; }}\n" for n, (body, _) in enumerate(CASES.values()))
    body = f"{{\n{BEGIN}switch (a.keys) {{\n{switch}}}\n}}"
    source.write_text(f"{HEAD}KERNEL cases(CONSTANT TensorMap map, CONSTANT Arguments a) {body}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNSWITCH_CACHE_DIR", str(source.parent))
        return emulator.load(str(source), "cases", SIZES)


def run(kernels: Any, name: str) -> tuple[Any, Any, Any]:
    """The operand (100 rows, 64 columns), numbers, and what the kernel made of them."""
    rng = np.random.default_rng(7)
    operand = rng.standard_normal((100, 64)).astype(ml_dtypes.bfloat16)
    numbers = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16).astype(np.float32)
    out = np.zeros((64, 64), np.float32)
    a = arguments.Arguments(keys=list(CASES).index(name))
    a.lse, a.base = out.ctypes.data, numbers.ctypes.data
    place = tensor_maps.TensorMap("bfloat16", operand.ctypes.data, (1, 1, *operand.shape), (12800, 12800, 128), 64)
    kernels.run(256, 1, a, 4 * 8192 + 8192 + ctypes.sizeof(ctypes.c_uint64) * 4, maps=(place.emulated,))
    return operand.astype(np.float64), numbers.astype(np.float64), out


@pytest.mark.parametrize("name", [name for name, (_, told) in CASES.items() if told])
def test_what_a_gpu_would_do_at_random_is_an_error(kernels: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=CASES[name][1]):
        run(kernels, name)


@pytest.mark.parametrize("name", [name for name, (_, told) in CASES.items() if not told])
def test_what_is_ordered_is_none(kernels: Any, name: str) -> None:
    run(kernels, name)


def test_products_are_those_of_the_tiles(kernels: Any) -> None:
    """Rows past the operand's last are 0."""
    operand, numbers, out = run(kernels, "a b^T")
    first, second = operand[:64], np.vstack([operand[64:], np.zeros((28, 64))])
    np.testing.assert_allclose(out, first @ second.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(kernels, "a^T b")[2], first.T @ second, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(kernels, "a b")[2], first @ second, rtol=1e-5, atol=1e-5)
    for name in ("a in registers", "a in shared memory by its own threads"):
        np.testing.assert_allclose(run(kernels, name)[2], numbers @ second, rtol=1e-5, atol=1e-5)
    shared = run(kernels, "one tile, cleared by two warpgroups that each multiply it")[2]
    np.testing.assert_allclose(shared[:, :40], (first @ second.T)[:, :40], rtol=1e-5, atol=1e-5)
    assert (shared[:, 40:] == 0).all()


def test_numbers_arrive_and_are_added(kernels: Any) -> None:
    _, numbers, out = run(kernels, "numbers side by side")
    np.testing.assert_array_equal(out.ravel()[:64], numbers.ravel()[:64])
    _, _, added = run(kernels, "additions")
    assert added.ravel()[:33].tolist() == [1.0] * 32 + [0.0]
