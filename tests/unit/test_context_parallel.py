"""Context parallelism: a causal sequence dealt among ranks, forward and backward, is what one call makes of it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ring
import torch
from launched import ended
from parts import Whole
from torch import distributed as dist

from attnswitch.verify import Case
from attnswitch.verify.launch.layouts import host

emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
RANKS = 4
RESULTS = ("out", "lse", *ring.GRADIENTS)
CASE = Case(batch=2, heads_kv=2, group=2, seq_q=93, seq_k=93, dim_qk=16, dim_v=24, causal=True, lse=True, grads="qkv")


class Way(NamedTuple):
    """Who computes the forward and the backward, and what these take."""

    forward: str
    backward: str
    library: str = "torch"
    device: str = "cpu"
    grad_lse: bool = True
    dim_v: int = CASE.dim_v
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


WAYS = {
    "reference": Way("reference", "reference", "numpy", dtypes=("float64", "float32", "float16")),
    "tiled": Way("tiled", "tiled", "numpy", dtypes=("float64", "float32", "bfloat16")),
    "flash": Way("sdpa-flash", "sdpa-flash", grad_lse=False, dim_v=16),
    "math": Way("tiled", "sdpa-math", grad_lse=False),
}
if torch.cuda.is_available():
    WAYS |= {name: Way(name, name, device="cuda") for name in ("cuda", "triton")}


def case_of(way: Way, dtype: str) -> Case:
    """Its lse has a gradient where the backward takes one."""
    return CASE.replace(dtype=dtype, library=way.library, lse=way.grad_lse, dim_v=way.dim_v)


def dealt(whole: Whole, way: Way, hiding: ring.Hiding = ring.causal) -> dict[str, Any]:
    """What four ranks come to, one after another."""
    q, k, v, grad_out, grad_lse = whole.arrays(way.device)
    cuts = ring.chunks(whole.case.seq_q, RANKS)
    merged: dict[int, Any] = {}
    grads: list[dict[int, Any]] = [{}, {}, {}]
    shards = [ring.shard(k, v, cuts, rank, RANKS) for rank in range(RANKS)]
    for rank in range(RANKS):
        mine = ring.held(rank, RANKS)
        arriving = [shards[(rank - step) % RANKS] for step in range(RANKS)]
        merged |= ring.attend({i: q[:, :, cuts[i]] for i in mine}, arriving, hiding, backend=way.forward)
        rows = {
            i: (
                q[:, :, cuts[i]],
                *merged[i],
                grad_out[:, :, cuts[i]],
                grad_lse[:, :, cuts[i]] if way.grad_lse else None,
            )
            for i in mine
        }
        for arrived in arriving:
            ring.add(grads, ring.backward(rows, arrived, hiding, backend=way.backward))
    forward = [{i: both[n] for i, both in merged.items()} for n in range(2)]
    return {name: joined(x) for name, x in zip(RESULTS, (*forward, *grads), strict=True)}


def joined(chunks: Mapping[int, Any]) -> Any:
    return np.concatenate([host(chunks[i]).astype(np.float64) for i in sorted(chunks)], 2)


def check(whole: Whole, way: Way, results: dict[str, Any]) -> None:
    cuts = ring.chunks(whole.case.seq_q, RANKS)
    whole.check(results, whole.precision(way.backward, way.device), cuts, cuts)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, way in WAYS.items() for dtype in way.dtypes])
def test_four_ranks_are_the_whole(name: str, dtype: str) -> None:
    whole, way = Whole.of(case_of(WAYS[name], dtype)), WAYS[name]
    check(whole, way, dealt(whole, way))


@pytest.mark.parametrize("window", [(5, 0), (30, 2)], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_a_window_over_chunks_is_a_mask_between_them(name: str, window: tuple[int, int]) -> None:
    """Rows that see nothing of a chunk, though others do, are among the parts."""
    way = WAYS[name]
    whole = Whole.of(case_of(way, way.dtypes[-1]).replace(window=window))
    cuts, seen = ring.chunks(whole.case.seq_q, RANKS), whole.answer.visible[0, 0]
    assert any(0 < seen[rows, keys].any(-1).mean() < 1 for rows in cuts for keys in cuts)

    def hiding(mine: int, other: int) -> dict[str, Any] | None:
        mask = np.ascontiguousarray(seen[cuts[mine], cuts[other]])
        if not mask.any():
            return None
        return {"attn_mask": torch.from_numpy(mask).to(way.device) if way.library == "torch" else mask}

    check(whole, way, dealt(whole, way, hiding))


@pytest.mark.slow
@pytest.mark.skipif(emulator.unavailable() is not None, reason="no g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_cuda_emulated(dtype: str) -> None:
    way = Way("cuda", "cuda")
    whole = Whole.of(case_of(way, dtype).replace(batch=1, seq_q=32, seq_k=32))
    check(whole, way, dealt(whole, way))


def test_the_work_is_even() -> None:
    for rank in range(RANKS):
        seen = [
            ring.causal(mine, other)
            for mine in ring.held(rank, RANKS)
            for owner in range(RANKS)
            for other in ring.held(owner, RANKS)
        ]
        assert seen.count({"is_causal": True}) == 2
        assert seen.count({"is_causal": False}) == 2 * RANKS - 1


# -- two processes -----------------------------------------------------------------------------------------------------

WORLD = 2
BETWEEN = CASE.replace(library="torch", seq_q=88, seq_k=88)  # chunks of equal length, as messages are
BACKEND = "tiled"


def passed_on(tensor: Any) -> Any:
    """``tensor`` to the next rank, and its like from the one before."""
    rank = dist.get_rank()
    sent, received = dist.isend(tensor, (rank + 1) % WORLD), torch.empty_like(tensor)
    dist.recv(received, (rank - 1) % WORLD)
    assert sent is not None
    sent.wait()
    return received


def apart(message: Any, owner: int) -> ring.Shard:
    """Keys and values of a message, which has them side by side, one chunk after the other."""
    pairs = (both.split([BETWEEN.dim_qk, BETWEEN.dim_v], -1) for both in message.chunk(2, 2))
    return dict(zip(ring.held(owner, WORLD), pairs, strict=True))


def together(pairs: Mapping[int, tuple[Any, Any]]) -> Any:
    """The message of a shard."""
    return torch.cat([torch.cat(pair, -1) for pair in pairs.values()], 2)


def process(rank: int, folder: Path) -> None:
    """One rank. Its queries stay; keys and values go round, twice; the second time their gradients go with them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=240))
    q, k, v, *upstream = Whole.of(BETWEEN).arrays()
    cuts, mine = ring.chunks(BETWEEN.seq_q, WORLD), ring.held(rank, WORLD)
    message = together(ring.shard(k, v, cuts, rank, WORLD))
    owners = [(rank - step) % WORLD for step in range(WORLD)]

    results: dict[int, Any] = {}
    for owner in owners:
        found = ring.attend({i: q[:, :, cuts[i]] for i in mine}, [apart(message, owner)], backend=BACKEND)
        results = ring.merged(results, found)
        message = passed_on(message)

    rows = {i: (q[:, :, cuts[i]], *results[i], *(x[:, :, cuts[i]] for x in upstream)) for i in mine}
    queries: dict[int, Any] = {}
    travelling = torch.zeros(message.shape, dtype=torch.float64)
    for owner in owners:
        dq, dk, dv = ring.backward(rows, apart(message, owner), backend=BACKEND)
        ring.add([queries], [dq])
        for j, (key, value) in apart(travelling, owner).items():
            if j in dk:
                key += dk[j]
                value += dv[j]
        message, travelling = passed_on(message), passed_on(travelling)
    forward = [{i: both[n] for i, both in results.items()} for n in range(2)]
    keys = [{j: pair[n] for j, pair in apart(travelling, rank).items()} for n in range(2)]
    torch.save(dict(zip(RESULTS, (*forward, queries, *keys), strict=True)), folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
def test_two_processes_are_the_whole(tmp_path: Path) -> None:
    """This file as a program: pytest's own name of it cannot be imported in another process."""
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in range(WORLD)
    ]
    try:
        errors = [one.communicate(timeout=300)[1].decode() for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * WORLD, "\n".join(errors)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    whole, cuts = Whole.of(BETWEEN), ring.chunks(BETWEEN.seq_q, WORLD)
    results = {name: joined(found[0][name] | found[1][name]) for name in RESULTS}
    whole.check(results, whole.precision(BACKEND), cuts, cuts)


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]))
    ended()
