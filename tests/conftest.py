"""Shared by every test: no wisdom, no call before, the saboteur backends for the length of a test, and commands."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnswitch.call import alike, attend
from attnswitch.call.launch import Request
from attnswitch.errors import Unsupported
from attnswitch.machine import registry
from attnswitch.machine.device import release
from attnswitch.planning import planner
from attnswitch.wisdom import view

TORCH = release(version("torch"))
for folder in ("saboteurs", "unit"):  # modules that tests share
    sys.path.insert(0, str(Path(__file__).parent / folder))
for size in ("COLUMNS", "LINES"):  # processes of pytest-xdist have a terminal's, which rich would keep for good
    os.environ.pop(size, None)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves a GPU's memory to other processes


def forget_plans() -> None:
    """Drop everything remembered about backends."""
    registry.forget()
    planner.forget()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a ``device``, and names none itself, runs on each that torch sees here: cpu, and cuda."""
    own = {name.strip() for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "device" in metafunc.fixturenames and "device" not in own:
        import torch

        metafunc.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])


def _names(given: Any) -> Any:
    return given.split(",") if isinstance(given, str) else given


@pytest.fixture(scope="session")
def kept_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the CUDA backend compiled in this run, in any of its processes: named by content, so that it is shared."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "builds"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _of_later_torch() -> Iterator[None]:
    """With a torch before 2.11, what is refused for a fault of that torch is skipped: its tests are of later ones."""
    try:
        yield
    except Unsupported as refused:
        if TORCH >= (2, 11) or "divergence " not in str(refused):
            raise
        pytest.skip(str(refused))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _of_later_torch():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _of_later_torch():
        yield


@pytest.fixture(autouse=True)
def no_wisdom(
    tmp_path_factory: pytest.TempPathFactory, kept_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder of its own for what a test measures: what this machine knows is none of its business."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "cuda").symlink_to(kept_builds)
    monkeypatch.setenv("ATTNSWITCH_CACHE_DIR", str(folder))
    monkeypatch.setenv("XDG_DATA_DIRS", str(folder / "system"))
    view.reload()
    yield folder
    view.reload()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """``register(name, "module:Class")`` puts a backend in front of the table for the length of a test."""

    def add(name: str, target: str) -> None:
        monkeypatch.setattr(registry, "TABLE", (registry.Row(name, target, "the tests"), *registry.TABLE))
        forget_plans()

    yield add
    monkeypatch.undo()
    forget_plans()


@pytest.fixture
def nothing_before() -> Iterator[None]:
    """No call is like one before."""
    attend.forget()
    alike.forget()
    yield
    attend.forget()
    alike.forget()


@pytest.fixture
def emulated(nothing_before: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA kernels run in their emulator, and no plan of theirs outlives the test."""
    monkeypatch.setenv("ATTNSWITCH_CUDA_EMULATE", "1")
    planner.forget()
    yield
    planner.forget()


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by the variant of each launch of the emulator."""
    emulator = importlib.import_module("attnswitch.backends.cuda.launching.emulator")
    seen: list[Any] = []
    launch = emulator.launch

    def noting(variant: Any, *passed: Any) -> None:
        seen.append(variant)
        launch(variant, *passed)

    monkeypatch.setattr(emulator, "launch", noting)
    return seen


@pytest.fixture
def as_launcher() -> Callable[[Callable[..., None]], Any]:
    """What the driver's launches are, around what takes a stream and the addresses of parameters."""
    driver = importlib.import_module("attnswitch.backends.cuda.launching.driver")

    class Launcher(driver.Launcher):  # type: ignore[misc, name-defined]
        def __init__(self, send: Callable[..., None]) -> None:
            self.send = send

        def __missing__(self, stream: int) -> Callable[[int, None], int]:
            def launch(at: int, _: None) -> int:
                self.send(stream, *(address for address in driver.Parameters.from_address(at) if address))
                return 0

            return launch

    return Launcher


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch, as_launcher: Callable[[Any], Any]) -> Callable[[], None]:
    """Has what CUDA kernels' launches send to a GPU run in the emulator from then on."""
    torch = importlib.import_module("torch")
    launching = "attnswitch.backends.cuda.launching"
    arguments, emulator, run, tensor_maps = (
        importlib.import_module(f"{launching}.{name}") for name in ("arguments", "emulator", "run", "tensor_maps")
    )
    monkeypatch.setenv(emulator.VARIABLE, "1")
    maps: dict[int, Any] = {}

    def pointer(tensor_map: Any) -> int:
        maps[id(tensor_map)] = tensor_map
        return id(tensor_map)

    def sender(variant: Any, blocks: int, index: int, *, beside: bool = False) -> Any:
        def send(stream: int, *pointers: int) -> None:
            passed = tuple(maps[each] for each in pointers[:-1])
            emulator.launch(variant, blocks, arguments.Arguments.from_address(pointers[-1]), passed)

        return as_launcher(send)

    def blank(size: int, *_: Any) -> Any:
        array = torch.full((size,), run.workspace.BLANK, dtype=torch.uint8)
        return run.workspace.Places(array.data_ptr(), size, array)

    def start() -> None:
        monkeypatch.setattr(run, "sender", sender)
        monkeypatch.setattr(tensor_maps.TensorMap, "pointer", property(pointer))
        monkeypatch.setattr(run.memory, "on_cpu", lambda _: False)
        monkeypatch.setattr(run.workspace, "blank", blank)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17, raising=False)

    return start


@pytest.fixture
def built(nothing_before: None, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one for each launch that is built. No call is like one before: a cache that is full forgets all."""
    seen: list[object] = []
    build = Request.build

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments)
        return build(*arguments, **named)

    monkeypatch.setattr(Request, "build", counted)
    return seen


class Ran(NamedTuple):
    """How a command ended, and what it wrote to both of its outputs."""

    code: int
    out: str


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Callable[..., Ran]]:
    """``command("tune")("--device", "cpu")`` runs ``attnswitch tune --device cpu`` here, in an empty folder."""
    main: Callable[[], None] = importlib.import_module("attnswitch.cli.app").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")

    def of(name: str) -> Callable[..., Ran]:
        def call(*arguments: str) -> Ran:
            monkeypatch.setattr(sys, "argv", ["attnswitch", name, *arguments])
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                main()
            text = "".join(capsys.readouterr())
            assert "Traceback" not in text
            return Ran(int(end.value.code or 0), text)

        return call

    return of


@pytest.fixture
def entered() -> Callable[[Callable[[], Any]], list[tuple[str, str]]]:
    """Which Python functions a call enters, in that order: the module and the name of each."""

    def by(call: Callable[[], Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        def look(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                found.append((str(frame.f_globals.get("__name__")), frame.f_code.co_name))

        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(None)
        return found

    return by
