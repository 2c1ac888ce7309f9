"""Every model class of the installed transformers, made small: eager attention against attnswitch.

uv run --group model python tests/model/walk.py [--shard 0/2] [FAMILY ...] > rows.jsonl

One row of JSON a class; the last line, on standard error, counts them. Linux: each family is looked at in a process of
its own (a fork), so that one that takes too much memory ends itself alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import logging
import multiprocessing
import pkgutil
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from walk_compare import Outputs, as_finite, off
from walk_models import Subject, parts, prepared, short

from attnswitch import api
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers import register

#: How far two answers in float32 may be apart, by their largest number.
NEAR = 2e-3
#: Bytes of memory beyond which a model is given up as one that could not be made small.
MOST_BYTES = 8 * 2**30
_FORK = multiprocessing.get_context("fork")


class Result(NamedTuple):
    """What came of one class: ``right``, ``refused``, ``wrong``, ``as sdpa`` or ``not built``, and why."""

    family: str
    model: str
    outcome: str
    why: str
    calls: int
    #: Whether ``sdpa`` can be asked for (as it is marked, where the class is right), and whether it computes what eager
    #: attention does; None where not tried.
    sdpa: bool | None
    sdpa_right: bool | None
    seconds: float


def families() -> list[str]:
    return [row.name for row in pkgutil.iter_modules(transformers.models.__path__) if row.ispkg]


def classes(family: str) -> Iterator[type[PreTrainedModel]]:
    """The model classes of one folder of transformers, without the bases that they share."""
    package = importlib.import_module(f"transformers.models.{family}")
    for row in pkgutil.iter_modules(list(package.__path__)):
        if row.name.startswith("modeling_"):
            module = importlib.import_module(f"{package.__name__}.{row.name}")
            for kind in list(vars(module).values()):
                ours = (
                    isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__
                )
                if ours and kind.forward is not torch.nn.Module.forward:
                    yield kind


# -- one class ---------------------------------------------------------------------------------------------------------


class _Calls:
    """How often attention is called while this is entered."""

    def __enter__(self) -> _Calls:
        self.count, self._kept = 0, api.attention

        def noted(*operands: Any, **options: Any) -> Any:
            self.count += 1
            return self._kept(*operands, **options)

        api.attention = noted
        return self

    def __exit__(self, *_: object) -> None:
        api.attention = self._kept


class _Look:
    """One subject with eager attention, against others."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.eager = subject.made("eager")
        self.batches = [subject.batch]
        self.truths = [subject.run(self.eager, subject.batch)]
        without = {name: value for name, value in subject.batch.items() if name != "attention_mask"}
        if len(without) < len(subject.batch):
            with contextlib.suppress(Exception):  # it wants its mask
                self.truths.append(subject.run(self.eager, without))
                self.batches.append(without)

    def outs(self, model: PreTrainedModel) -> list[Outputs]:
        return [self.subject.run(model, batch) for batch in self.batches]

    def off(self, ones: list[Outputs], twos: list[Outputs]) -> list[float]:
        masks = [batch.get("attention_mask") for batch in self.batches]
        return [off(one, two, mask) for one, two, mask in zip(ones, twos, masks, strict=True)]

    def with_sdpa(self) -> tuple[bool, bool | None, list[Outputs]]:
        try:
            outs = self.outs(self.subject.made("sdpa"))
        except Exception:  # it does not support it
            return False, None, []
        return True, max(self.off(self.truths, outs)) < NEAR, outs

    def exact(self, model: PreTrainedModel) -> tuple[list[float], bool]:
        """How far ``model`` is off in float64; and whether eager attention says as much there as in float32.

        Where it takes its softmax in float32, rows of padding are NaN in float64, which says nothing.
        """
        eager, model = self.eager.double(), model.double()
        for each in (eager, model):
            each.set_experts_implementation("eager")  # the usual one multiplies in float32 and less
        doubled = [
            {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in b.items()}
            for b in self.batches
        ]
        truths = [self.subject.run(eager, batch) for batch in doubled]
        outs = [self.subject.run(model, batch) for batch in doubled]
        return self.off(truths, outs), all(map(as_finite, truths, self.truths))


def look(kind: type[PreTrainedModel], subject: Subject) -> Result:
    """Eager attention against attnswitch, for one class."""
    began = time.perf_counter()
    try:
        return _looked(kind, subject, began)
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        return _not_built(_family(kind), kind.__name__, "no more memory", time.perf_counter() - began)


def _looked(kind: type[PreTrainedModel], subject: Subject, began: float) -> Result:
    at = _Look(subject)

    def result(outcome: str, why: str = "", calls: int = 0, sdpa: Any = None, right: Any = None) -> Result:
        where = f"in {subject.kind.__name__}" if subject.part else ""
        why = "; ".join(filter(None, (where, why)))
        return Result(_family(kind), kind.__name__, outcome, why, calls, sdpa, right, time.perf_counter() - began)

    try:
        model = subject.made("attnswitch")
        with _Calls() as calls:
            outs = at.outs(model)
    except Unsupported as error:
        return result("refused", str(error), 0, *at.with_sdpa()[:2])
    except Exception as error:
        if _is_of_memory(error):
            raise
        return result("wrong", short(error), 0, *at.with_sdpa()[:2])
    errors = at.off(at.truths, outs)
    if max(errors) < NEAR:
        return result("right", "", calls.count, bool(kind._supports_sdpa))
    # Choices (experts, codes) flip at a rounding: in double they do not.
    sdpa, right, others = at.with_sdpa()
    why = " ".join(f"{error:.2g}" for error in errors)
    try:
        exact, known = at.exact(model)
        if max(exact) < 1e-6 and known:
            return result("right", f"in float64; {why} in float32", calls.count, sdpa, right)
        why += " in float32, " + " ".join(f"{error:.2g}" for error in exact) + " in float64"
    except Exception as error:  # not every model runs in double
        why += "; float64: " + short(error)
    as_sdpa = bool(others) and max(at.off(others, outs)) < NEAR
    return result("as sdpa" if as_sdpa else "wrong", why, calls.count, sdpa, right)


def _is_of_memory(error: Exception) -> bool:
    """Whether there is no more memory, as Python or torch says it."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _family(kind: type) -> str:
    return kind.__module__.split(".")[2]


# -- all of them -------------------------------------------------------------------------------------------------------


def look_at(family: str) -> Iterator[Result]:
    """Every class of a family. One that cannot be run by itself, or not as it is meant, is run within another."""
    wholes: list[Subject] = []
    rest: dict[type[PreTrainedModel], Result] = {}
    for kind in classes(family):
        began = time.perf_counter()
        try:
            subject = prepared(kind)
        except Exception as error:
            rest[kind] = _not_built(family, kind.__name__, str(error), time.perf_counter() - began)
            continue
        found = look(kind, subject)
        if found.outcome != "not built":
            wholes.append(subject)
        if found.outcome in ("as sdpa", "not built"):
            rest[kind] = found
        else:
            yield found
    for whole in wholes:
        for kind, subject in parts(whole, rest) if rest else ():
            del rest[kind]
            yield look(kind, subject)
    yield from rest.values()


def _not_built(family: str, name: str, why: str, seconds: float) -> Result:
    return Result(family, name, "not built", why, 0, None, None, seconds)


def walk(chosen: list[str], shard: int = 0, shards: int = 1) -> Iterator[Result]:
    """Look at every class of these families."""
    register()
    transformers.logging.set_verbosity(logging.CRITICAL)
    for family in chosen[shard::shards]:
        yield from _apart(family)


def _apart(family: str) -> list[Result]:
    """What a process of its own finds, so far as it comes."""
    reads, writes = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_tell, args=(family, writes))
    child.start()
    writes.close()
    found: list[Result] = []
    with reads, contextlib.suppress(EOFError):
        while True:
            found.append(reads.recv())
    child.join()
    if code := child.exitcode:
        why = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
        found.append(Result(family, "", "not built" if code == -signal.SIGKILL else "wrong", why, 0, None, None, 0.0))
    return found


def _tell(family: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    torch.set_num_threads(1)  # tiny models
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            for row in look_at(family):
                pipe.send(row)
        except ImportError as error:
            pipe.send(_not_built(family, "", short(error), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    began = time.perf_counter()
    counts: collections.Counter[str] = collections.Counter()
    for row in walk(args.families or families(), *map(int, args.shard.split("/"))):
        counts[row.outcome] += 1
        print(json.dumps(row._asdict()), flush=True)
    said = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{counts.total():,} classes: {said} ({versions}, {time.perf_counter() - began:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main()
