"""Plans: the choice, every reason, devices that are not here, and plug-ins that are broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import attnswitch
from attnswitch import BackendUnavailable, Device, InvalidProblem, Plan, Problem, Unsupported
from attnswitch.machine import registry
from attnswitch.machine.backend import Backend, Config
from attnswitch.planning import planner

GIB, KIB = 2**30, 2**10
INSTALLED = (
    "torch-varlen",
    "torch-flex",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "xformers",
    "flashinfer",
    "sage",
)
OWN = ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "triton", "cuda", "sdpa-math", "tiled", "reference")
BUILT_IN = (*OWN, *INSTALLED)


def gpu(name: str, capability: tuple[int, int], torch: str = "2.15.0", cudnn: str = "9.30.0") -> Device:
    return Device("cuda", name, capability, 100, 80 * GIB, 200 * KIB, (("torch", torch), ("cudnn", cudnn)))


H200, A100, T4 = gpu("H200", (9, 0)), gpu("A100", (8, 0)), gpu("T4", (7, 5))
RTX4090 = gpu("RTX 4090", (8, 9))


def reasons(plan: Plan, backend: str) -> str:
    (candidate,) = (c for c in plan.candidates if c.backend == backend)
    return "\n".join(plan.why_not(candidate))


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["b2.h4.s64.d32.fp32", "b1.h2.s8.d8.fp32.softcap=2.0", "b1.h2.s8.d8.fp16.dropout=0.5"])
@pytest.mark.parametrize("device", [Device.cpu(), H200, T4], ids=str)
def test_every_backend_is_there_with_a_reason(text: str, device: Device) -> None:
    plan = attnswitch.explain(text, device=device)
    assert tuple(c.backend for c in plan.candidates) == planner.ordered(plan.problem, device)
    assert set(planner.ordered(plan.problem, device)) == set(registry.names()) == set(BUILT_IN)
    for candidate in plan.candidates:
        why = plan.why_not(candidate)
        assert why == () if candidate is plan.chosen else all(why) and why
        assert all(line in str(plan) for line in (candidate.backend, *why))
    assert str(plan.problem) in str(plan)
    assert str(device) in str(plan)


def test_the_first_that_fits_is_chosen_and_the_others_stand_behind() -> None:
    plan = attnswitch.plan("b2.h4.s64.d32.fp32")
    assert plan.backend == "sdpa-flash"
    assert "first in the declared order" in plan.why
    assert reasons(plan, "tiled") == "it takes the problem, but stands behind sdpa-flash in the declared order"


@pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-math", "tiled", "reference"])
def test_a_backend_that_is_asked_for_wins(backend: str) -> None:
    plan = attnswitch.plan("b2.h4.s64.d32.fp32", backend=backend)
    assert plan.backend == backend
    assert plan.why == f"forced by backend={backend!r}"
    other = "tiled" if backend != "tiled" else "reference"
    assert reasons(plan, other) == f"it takes the problem, but backend={backend!r} was asked for"


def test_a_backend_that_is_asked_for_and_refuses() -> None:
    text = "b2.h4.s64.d32.fp32.softcap=2.0.dropout=0.5.seeded"
    with pytest.raises(Unsupported, match="backend 'sdpa-flash' was asked for on cpu") as caught:
        attnswitch.plan(text, backend="sdpa-flash")
    for part in (text, "softcap=2.0", "seed", "dropout_p=0.5", "leave backend out, or use one of: tiled, reference"):
        assert part in str(caught.value)
    assert caught.value.plan is not None
    assert caught.value.plan.backend is None
    assert "it takes the problem, but another backend was asked for" in reasons(caught.value.plan, "tiled")
    assert attnswitch.explain(text, backend="sdpa-flash").chosen is None


def test_a_backend_that_is_asked_for_and_is_not_available() -> None:
    cpu = Device("cpu", "a machine without a GPU", versions=(("torch", "2.15.0"),), present=True)
    if attnswitch.explain("b1.h1.s4.d8.fp16", device=cpu, backend="sdpa-cudnn").candidates[0].unavailable is None:
        with pytest.raises(Unsupported, match="the arrays are on cpu"):  # this machine has a GPU
            attnswitch.plan("b1.h1.s4.d8.fp16", device=cpu, backend="sdpa-cudnn")
        return
    with pytest.raises(
        BackendUnavailable, match=r"'sdpa-cudnn' was asked for .* cannot run here: torch .*\nleave backend out"
    ):
        attnswitch.plan("b1.h1.s4.d8.fp16", device=cpu, backend="sdpa-cudnn")


def test_nothing_takes_it() -> None:
    text = "b2.h4.s64.d320.fp64.softcap=2.0"
    with pytest.raises(Unsupported, match="no backend takes this problem") as caught:
        attnswitch.plan(text, device=H200)
    assert all(name in str(caught.value) for name in BUILT_IN)
    plan = attnswitch.explain(text, device=H200)
    assert plan.chosen is None
    assert plan.why == "no backend takes it"
    assert caught.value.plan == plan


def test_a_call_and_its_description_have_one_plan() -> None:
    q, k = np.zeros((2, 4, 8, 16), np.float32), np.zeros((2, 2, 8, 16), np.float32)
    plan = attnswitch.plan(q, k, k, is_causal=True, key_lengths=[3, 8])
    assert plan == attnswitch.plan("b2.h4/2.s8.d16.fp32.causal.lengths")


# -- hardware that is not here -----------------------------------------------------------------------------------------

#: In place of a name: whichever of those that take it has the least forecast.
FORECAST = "forecast"
CHOICES = [
    ("b2.h16.s1024.d128.bf16.causal", H200, FORECAST, {}),
    ("b2.h16.s1024.d128.bf16.causal.grad", H200, FORECAST, {}),
    ("b1.h32/8.s1x8192.d128.bf16", H200, FORECAST, {}),
    ("b1.h32/8.s1x8192.d128.bf16", A100, "sdpa-cudnn", {}),
    ("b2.h16.s1024.d128.bf16.causal", A100, "sdpa-cudnn", {}),
    (
        "b2.h16.s1024.d64.fp16",
        T4,
        "sdpa-efficient",
        {"sdpa-cudnn": "needs compute capability 8.0", "sdpa-flash": "sm_75"},
    ),
    ("b2.h16.s1024.d64.bf16", T4, "sdpa-math", {"sdpa-efficient": "dtype bfloat16"}),
    ("b2.h16.s1024.d64.fp32", A100, "sdpa-efficient", {"sdpa-cudnn": "dtype float32", "sdpa-flash": "dtype float32"}),
    ("b2.h16.s1024.d64.fp32.grad", H200, FORECAST, {}),
    ("b2.h16.s1024.d64.fp32.dropout=0.1.grad", H200, FORECAST, {}),
    ("b2.h16.s1024.d64.fp32.mask=fp32.grad", H200, FORECAST, {}),
    ("b2.h16.s1024.d64.fp64", H200, FORECAST, {"sdpa-efficient": "dtype float64", "triton": "dtype float64"}),
    ("b2.h16.s1024.d256.bf16.grad", H200, FORECAST, {}),
    ("b2.h16.s1024.d256.bf16", A100, "sdpa-flash", {"sdpa-cudnn": "head dimension 256: at most 128"}),
    ("b2.h16.s1024.d512.bf16", H200, FORECAST, {"sdpa-cudnn": "at most 256", "sdpa-flash": "at most 256"}),
    ("b2.h16.s1024.d192/128.bf16", A100, "sdpa-efficient", {"sdpa-flash": "head dimensions 192 and 128 differ"}),
    ("b2.h16.s1024.d64.fp16.mask=bool", H200, FORECAST, {"sdpa-flash": "needs a mask"}),
    ("b2.h16.s1024.d64.fp16.mask=bool.grad", H200, FORECAST, {"sdpa-flash": "needs a mask"}),
    ("b2.h16.s1024.d64.fp16.lengths", T4, "sdpa-efficient", {}),
    ("b2.h16.s1024.d64.fp16.mask=fp32", H200, FORECAST, {"sdpa-cudnn": "float32", "sdpa-efficient": "float32"}),
    ("b2.h16.s1024.d64.fp16.mask=fp16.grad=m", H200, FORECAST, {"sdpa-cudnn": "gradient of attn_mask"}),
    ("b2.h16.s512x1024.d64.fp16.causal", T4, "sdpa-efficient", {}),
    ("b2.h16.s512x1024.d64.fp16.causal", gpu("A100", (8, 0), cudnn="9.10.0"), "sdpa-cudnn", {"sdpa-flash": "diagonal"}),
    ("b2.h16.s1024.d64.fp16.scale=0.0", H200, FORECAST, {"sdpa-cudnn": "scale=0.0", "sdpa-flash": "scale=0.0"}),
    (
        "b2.h16.s1000.d64.fp16",
        gpu("RTX 4090", (8, 9), cudnn="9.15.0"),
        "sdpa-flash",
        {"sdpa-cudnn": "multiples of 128"},
    ),
    (
        "b2.h16/4.s1024.d64.fp32",
        gpu("A100", (8, 0), torch="2.14.0"),
        "triton",
        {"sdpa-efficient": "before torch 2.15"},
    ),
    ("b2.h16.s1024.d64.fp16.deterministic.grad", H200, FORECAST, {"sdpa-flash": "dQ"}),
    (
        "b2.h16.s1024.d64.fp64.deterministic.grad",
        H200,
        "cuda",
        {"sdpa-math": "deterministic=True", "triton": "float64"},
    ),
    ("b2.h16.s1024.d64.fp32.softcap=30.0", T4, "cuda", {"triton": "needs compute capability 8.0"}),
    ("b2.h16.s1024.d64.fp16.softcap=30.0", H200, FORECAST, {"sdpa-flash": "softcap=30.0"}),
    ("b2.h16.s1024.d64.fp16.softcap=30.0.grad", H200, FORECAST, {"sdpa-flash": "softcap=30.0"}),
    (
        "b2.h16.s1024.d64.fp16.softcap=30.0",
        T4,
        None,
        {"triton": "needs compute capability 8.0", "cuda": "compute capability 8.0"},
    ),
    ("b2.h16.s1024.d224.fp16.grad", RTX4090, "sdpa-efficient", {"sdpa-flash": "shared memory of RTX 4090"}),
    (
        "b2.h16.s1024.d64.fp16",
        gpu("H200", (9, 0), torch="2.15.0+cpu"),
        "cuda",  # for arrays of CuPy
        {"sdpa-cudnn": "built without CUDA", "triton": "built without CUDA"},
    ),
    ("b70000.h1.s128.d64.fp16.grad", H200, FORECAST, {"sdpa-cudnn": "65535", "sdpa-efficient": "65535"}),
    ("b2.h16.s1024.d64.fp16.dropout=0.5.seeded", H200, FORECAST, {"sdpa-cudnn": "seed", "tiled": "arrays are on cuda"}),
]


@pytest.mark.parametrize(("text", "device", "chosen", "why_not"), CHOICES, ids=[f"{c[1].name}-{c[0]}" for c in CHOICES])
def test_plans_for_absent_hardware(text: str, device: Device, chosen: str | None, why_not: dict[str, str]) -> None:
    plan = attnswitch.explain(text, device=device)
    if chosen == FORECAST:
        expected = {c.backend: c.expected for c in plan.candidates if c.fits and not c.heavy and c.expected is not None}
        chosen = min(expected, key=lambda name: expected[name])
    assert plan.backend == chosen, str(plan)
    for backend, reason in why_not.items():
        assert reason in reasons(plan, backend)
    assert all(c.unavailable is None for c in plan.candidates)


@pytest.mark.parametrize(
    ("capability", "torch", "cudnn", "taken"),
    [
        ((9, 0), "2.11.0", "9.18.1", False),
        ((9, 0), "2.11.0", "9.19.0", True),
        ((9, 0), "2.15.0", "9.19.0.56", True),
        ((9, 0), "2.10.0", "9.19.0", False),
        ((9, 0), "2.15.0", "9.20.0", False),
        ((9, 0), "2.15.0", "9.22.1", False),
        ((10, 0), "2.15.0", "9.26.0", False),
    ],
)
def test_gradients_of_wide_heads_by_cudnn(capability: tuple[int, int], torch: str, cudnn: str, taken: bool) -> None:
    device = gpu("a GPU", capability, torch=torch, cudnn=cudnn)
    for dims in ("160", "136", "160/128"):
        found = reasons(attnswitch.explain(f"b2.h4.s128.d{dims}.bf16.grad", device=device), "sdpa-cudnn")
        assert ("only 192/128 and 256/256" in found) is not taken
    assert "only 192/128" not in reasons(
        attnswitch.explain("b2.h4.s128.d192/128.bf16.grad", device=device), "sdpa-cudnn"
    )


def test_known_devices_by_name() -> None:
    assert Device.parse("h200").capability == (9, 0)
    assert Device.parse("NVIDIA RTX 4090") == Device.named("rtx-4090")
    assert Device.parse("cpu") == Device.cpu() == Device.named("CPU")
    assert str(Device.parse("t4")) == "cuda (T4, sm_75)"
    assert not Device.parse("t4").present
    assert attnswitch.plan("b2.h16.s1024.d64.fp16", device="t4").backend == "sdpa-efficient"


@pytest.mark.parametrize("text", ["", "h300", "cuda:x", "cuda:-1", "cuda:", "cpu:0", "cuda:0 ", "gpu", "h100 or h200"])
def test_an_unknown_device(text: str) -> None:
    with pytest.raises(InvalidProblem, match=f"device {text!r} is not known; expected cpu, cuda.*h200"):
        Device.parse(text)


def test_a_gpu_that_is_not_in_this_machine() -> None:
    with pytest.raises(InvalidProblem, match=r"device cuda:63 cannot be read on this machine \(torch: .*; cupy: "):
        Device.parse("cuda:63")


@pytest.mark.parametrize("device", [3, ["cpu"]])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(InvalidProblem, match="device"):
        attnswitch.explain("b1.h1.s4.d8.fp32", device=device)


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.11.0+cu130", (2, 11, 0)), ("9.30", (9, 30)), ("2.16.0a0", (2, 16, 0))]
)
def test_versions_are_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert Device("cuda", "x", versions=(("torch", text),)).version("torch") == numbers
    assert Device("cuda", "x").version("torch") is None


# -- plug-ins ----------------------------------------------------------------------------------------------------------


class Plugin(Backend):
    """A plug-in that does nothing wrong and takes nothing."""

    name: ClassVar[str] = "plugin"
    library: ClassVar[str] = "numpy"
    autograd: ClassVar[bool] = False

    def unavailable(self) -> str | None:
        return None

    def reasons(self, problem: Problem, device: Device) -> Any:
        return ("it never does",)

    def configs(self, problem: Problem, device: Device) -> Iterator[Any]:
        yield Config()

    def precision(self, problem: Problem, device: Device) -> Any:
        raise NotImplementedError

    def compile(self, problem: Problem, device: Device, config: Any) -> Any:
        raise NotImplementedError


class NotABackend:
    name = "plugin"


def fails(error: BaseException) -> Callable[..., Any]:
    def method(*_: Any) -> Any:
        raise error

    return method


SupportsRaises = type("SupportsRaises", (Plugin,), {"reasons": fails(ZeroDivisionError("halved"))})
UnavailableRaises = type("UnavailableRaises", (Plugin,), {"unavailable": fails(OSError("no driver"))})
InitExits = type("InitExits", (Plugin,), {"__init__": fails(SystemExit("no licence"))})
InitRaises = type("InitRaises", (Plugin,), {"__init__": fails(RuntimeError("no licence"))})
NoConfigs = type("NoConfigs", (Plugin,), {"reasons": lambda *_: (), "configs": lambda *_: iter(())})
ReasonsInAList = type("ReasonsInAList", (Plugin,), {"reasons": lambda *_: ["it never does"]})
ReasonsInASentence = type("ReasonsInASentence", (Plugin,), {"reasons": lambda *_: "it never does"})
NoHash = type("NoHash", (Plugin,), {"reasons": lambda *_: (), "configs": lambda *_: iter([{"block": 64}])})


Remarks = type(
    "Remarks", (Plugin,), {"reasons": lambda *_: (), "remarks": lambda *given: (f"by {given[3] or 'the first'}",)}
)
RemarksRaise = type("RemarksRaise", (Plugin,), {"reasons": lambda *_: (), "remarks": fails(KeyError("tile"))})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``installed(name=target, ...)`` installs a package ``extra`` with these entry points for the length of a test."""

    def forget() -> None:
        for remembered in (*vars(registry).values(), *vars(planner).values()):
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
        planner.forget()

    def add(package: str = "extra", **points: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name.replace('_', '-')} = {target}\n" for name, target in points.items())
        (folder / "entry_points.txt").write_text(f"[attnswitch.backends]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield add
    monkeypatch.undo()
    forget()


BROKEN = {
    f"{__name__}:SupportsRaises": "it failed while planning: ZeroDivisionError: halved",
    f"{__name__}:UnavailableRaises": "OSError: no driver",
    f"{__name__}:NoConfigs": "StopIteration",
    f"{__name__}:ReasonsInAList": "",  # taken for what they mean, or refused: not a crash
    f"{__name__}:ReasonsInASentence": "",
    f"{__name__}:InitRaises": "RuntimeError: no licence",
    f"{__name__}:InitExits": "SystemExit: no licence",
    f"{__name__}:NotABackend": "is not a Backend: see attnswitch.machine.backend",
    f"{__name__}:Missing": "AttributeError",
    f"{__name__}": "it could not be loaded from extra",
    "no_such_package.backend:Backend": "it could not be loaded from extra (no_such_package.backend:Backend): ",
}


@pytest.mark.parametrize("target", BROKEN)
def test_a_broken_plug_in_is_a_reason_and_not_a_crash(target: str, installed: Callable[..., None]) -> None:
    installed(plugin=target)
    q = np.zeros((1, 1, 2, 4), np.float32)
    assert attnswitch.attention(q, q, q).shape == q.shape
    plan = attnswitch.explain("b1.h1.s4.d8.fp32")
    assert plan.backend == "sdpa-flash"
    assert BROKEN[target] in reasons(plan, "plugin")
    assert BROKEN[target] in str(plan)
    assert reasons(plan, "plugin")
    assert "it takes the problem" not in reasons(plan, "plugin")
    with pytest.raises((Unsupported, BackendUnavailable), match="'plugin' was asked for") as caught:
        attnswitch.attention(q, q, q, backend="plugin")
    assert BROKEN[target] in str(caught.value)


def test_an_odd_plug_in_behind_the_chosen_one_breaks_nothing(installed: Callable[..., None]) -> None:
    installed(plugin=f"{__name__}:NoHash")
    q = np.zeros((1, 1, 2, 4), np.float32)
    assert attnswitch.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize(
    ("target", "remark"),
    [("Remarks", "by the first"), ("RemarksRaise", "it failed while planning: KeyError: 'tile'"), ("Plugin", None)],
)
def test_what_a_backend_says_of_how_it_computes(
    target: str, remark: str | None, installed: Callable[..., None]
) -> None:
    installed(plugin=f"{__name__}:{target}")
    plan = attnswitch.explain("b1.h1.s4.d8.fp32", backend="plugin")
    (candidate,) = (candidate for candidate in plan.candidates if candidate.backend == "plugin")
    assert plan.remarks(candidate) == (() if remark is None else (remark,))
    assert candidate.fits == (remark is not None)
    if remark is not None:
        assert str(plan).splitlines()[-1].strip() == remark


def test_a_plug_in_stands_behind_and_is_listed(installed: Callable[..., None]) -> None:
    installed(plugin=f"{__name__}:Plugin")
    assert registry.names() == (*BUILT_IN, "plugin")
    from attnswitch.api import backends

    assert backends()["plugin"] is None


def test_a_plug_in_whose_name_is_taken(installed: Callable[..., None]) -> None:
    installed(tiled=f"{__name__}:Plugin", other=f"{__name__}:Plugin")
    installed("extra_two", other=f"{__name__}:InitRaises")
    assert registry.names()[: len(BUILT_IN)] == BUILT_IN
    assert set(registry.names()[len(BUILT_IN) :]) in (
        {"tiled@extra", "other", "other@extra_two"},
        {"tiled@extra", "other", "other@extra"},
    )
    assert attnswitch.plan("b1.h1.s4.d8.fp32", backend="tiled").backend == "tiled"
    with pytest.raises(Unsupported, match="it never does"):
        attnswitch.plan("b1.h1.s4.d8.fp32", backend="tiled@extra")


def test_the_list_of_backends_survives_a_broken_plug_in(installed: Callable[..., None]) -> None:
    installed(plugin=f"{__name__}:UnavailableRaises", gone="no_such_package:Backend")
    sys.modules.pop("no_such_package", None)
    states = attnswitch.backends()
    assert states["plugin"] == "OSError: no driver"
    assert "no_such_package" in (states["gone"] or "")
    assert states["tiled"] is None
