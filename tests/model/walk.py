"""Every model class of the installed transformers, made small: eager attention against attnswitch.

uv run --group model python tests/model/walk.py [--shard 0/2] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import json
import logging
import pkgutil
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from walk_batches import batches as possible
from walk_configs import SHRINK, small

from attnswitch import api
from attnswitch.errors import Unsupported
from attnswitch.integrations.transformers import register

#: A model is cut down further, or given up, above so many weights.
MOST = 40_000_000
#: In this order, until one can be made and run: by what widths are divided, negative for fewer heads of the same width,
#: and the most layers of a kind, 0 for as many as the default has.
ATTEMPTS: tuple[tuple[int, int], ...] = ((SHRINK, 2), (-16, 2), (-4, 2), (SHRINK, 0), (1, 2))
#: Seconds after which no other attempt is made.
PATIENCE = 3.0


class Result(NamedTuple):
    """What came of one class: ``right``, ``refused``, ``wrong``, ``as sdpa`` or ``not built``, and why."""

    family: str
    model: str
    outcome: str
    why: str
    calls: int
    #: Whether ``sdpa`` can be asked for, and whether it computes what eager attention does; None where not tried.
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
                if ours and "forward" in dir(kind) and not re.search("Pre[Tt]rained(Audio|Model$)", kind.__name__):
                    yield kind


# -- one class ---------------------------------------------------------------------------------------------------------


def _made(kind: Any, config: Any, implementation: str) -> PreTrainedModel:
    """A model of random weights that are the same at every call."""
    torch.manual_seed(0)
    with no_init_weights():
        model: PreTrainedModel = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                near = 1.0 if name.endswith("weight") else 0.0
                weight.copy_(near + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                fan = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.2 / fan**0.5))
    model.train(False)
    return model


def _tensors(out: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(out, torch.Tensor):
        if out.is_floating_point() or out.is_complex():
            yield at, out
    elif isinstance(out, dict):
        for name, value in out.items():
            if name not in ("past_key_values", "cache_params", "rope_deltas"):
                yield from _tensors(value, f"{at}.{name}")
    elif isinstance(out, (list, tuple)):
        for number, value in enumerate(out):
            yield from _tensors(value, f"{at}.{number}")


def _run(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**copy.deepcopy(batch))
    return {name: x for name, x in _tensors(out) if x.numel()}


def _off(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], batch: dict[str, Any]) -> float:
    """The largest difference, by the largest number of that output; rows that are padding are not looked at."""
    mask = batch.get("attention_mask")
    worst = 0.0 if one.keys() == two.keys() else float("inf")
    for name, x in one.items():
        y = two.get(name)
        if y is None or y.shape != x.shape:
            return float("inf")
        flat = mask is not None and mask.ndim == 2 and x.ndim > 1 and len(x) == len(mask)
        if mask is not None and flat and 0 <= x.shape[1] - mask.shape[1] <= 1:
            # One more is a token that the model puts behind the others.
            seen = torch.nn.functional.pad(mask, (0, x.shape[1] - mask.shape[1]), value=1).bool()
            x, y = x[seen], y[seen]
        x, y = x.to(torch.complex128), y.to(torch.complex128)
        x, y = torch.view_as_real(x), torch.view_as_real(y)
        # What eager attention makes NaN or infinite says nothing of another's numbers.
        known = x.isfinite()
        scale = x[known].abs().max().item() if known.any() else 0.0
        error = (x - y)[known].abs()
        if error.numel():
            largest = error.max().item()
            worst = max(worst, largest / (scale + 1e-6) if largest == largest else float("inf"))
    return worst


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


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _prepared(kind: Any) -> tuple[Any, PreTrainedModel, dict[str, Any], dict[str, torch.Tensor]]:
    """A small config, the model with eager attention, a batch that it takes and what comes out."""
    errors: list[str] = []
    began = time.perf_counter()
    for factor, layers in ATTEMPTS:
        if time.perf_counter() - began > PATIENCE:
            break
        try:
            config = small(kind.config_class, factor, layers)
            with torch.device("meta"), no_init_weights():
                weights = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
        except Exception as error:  # told in the result
            errors.append("config: " + _short(error))
            continue
        if weights > MOST:
            errors.append(f"config: {weights:,} weights")
            continue
        try:
            model = _made(kind, config, "eager")
        except Exception as error:
            errors.append("model: " + _short(error))
            continue
        torch.manual_seed(0)
        for batch in possible(model):
            try:
                out = _run(model, batch)
            except Exception as error:
                errors.append(f"run with {', '.join(batch)}: " + _short(error))
                continue
            if any(bool(x.isfinite().any()) for x in out.values()):
                return config, model, batch, out
            errors.append("run: no finite output")
    ran = [error for error in errors if not re.search(r"missing \d|have to specify|unexpected keyword", error)]
    raise ValueError((ran or errors or ["no inputs to try"])[0])


def look(kind: Any) -> Result:
    """Eager attention against attnswitch, for one class."""
    began = time.perf_counter()
    family = kind.__module__.split(".")[2]

    def result(outcome: str, why: str = "", calls: int = 0, sdpa: Any = None, right: Any = None) -> Result:
        return Result(family, kind.__name__, outcome, why, calls, sdpa, right, time.perf_counter() - began)

    try:
        config, eager, batch, expected = _prepared(kind)
    except Exception as error:
        return result("not built", str(error))
    batches = [batch]
    if "attention_mask" in batch:
        batches.append({name: value for name, value in batch.items() if name != "attention_mask"})
    truths = [expected]
    for other in batches[1:]:
        try:
            truths.append(_run(eager, other))
        except Exception:  # it wants its mask
            batches.remove(other)

    def with_sdpa() -> tuple[bool, bool | None, list[dict[str, torch.Tensor]]]:
        try:
            model = _made(kind, config, "sdpa")
            outs = [_run(model, batch) for batch in batches]
        except Exception:  # it does not support it
            return False, None, []
        return True, all(_off(a, b, c) < 2e-3 for a, b, c in zip(truths, outs, batches, strict=True)), outs

    try:
        model = _made(kind, config, "attnswitch")
        with _Calls() as calls:
            outs = [_run(model, batch) for batch in batches]
    except Unsupported as error:
        return result("refused", str(error), 0, *with_sdpa()[:2])
    except Exception as error:
        sdpa, right, _ = with_sdpa()
        return result("wrong", _short(error), 0, sdpa, right)
    errors = [_off(a, b, c) for a, b, c in zip(truths, outs, batches, strict=True)]
    if max(errors) < 2e-3:
        return result("right", "", calls.count)
    # Choices (experts, codes) flip at a rounding: in double they do not.
    sdpa, right, others = with_sdpa()
    why = " ".join(f"{error:.2g}" for error in errors)
    try:
        pair = [m.double() for m in (eager, model)]
        doubled = [{n: v.double() if v.is_floating_point() else v for n, v in b.items()} for b in batches]
        truly = [_run(pair[0], b) for b in doubled]
        exact = [_off(truth, _run(pair[1], b), b) for truth, b in zip(truly, doubled, strict=True)]
        # Eager attention that takes its softmax in float32 has NaN there for rows of padding, which says nothing.
        known = all(
            bool((x.isfinite() | ~before[name].isfinite()).all())
            for truth, before in zip(truly, truths, strict=True)
            for name, x in truth.items()
        )
        if max(exact) < 1e-6 and known:
            return result("right", f"in float64; {why} in float32", calls.count)
        why += " in float32, " + " ".join(f"{error:.2g}" for error in exact) + " in float64"
    except Exception as error:  # not every model runs in double
        why += "; float64: " + _short(error)
    if others and all(_off(a, b, c) < 2e-3 for a, b, c in zip(others, outs, batches, strict=True)):
        return result("as sdpa", why, calls.count, sdpa, right)
    return result("wrong", why, calls.count, sdpa, right)


def walk(chosen: list[str], shard: int = 0, shards: int = 1) -> Iterator[Result]:
    """Look at every class of these families."""
    register()
    transformers.logging.set_verbosity(logging.CRITICAL)
    for family in chosen[shard::shards]:
        try:
            kinds = list(classes(family))
        except ImportError as error:
            yield Result(family, "", "not built", _short(error), 0, None, None, 0.0)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in kinds:
                yield look(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    for row in walk(args.families or families(), *map(int, args.shard.split("/"))):
        counts[row.outcome] += 1
        print(json.dumps(row._asdict()), flush=True)
    print(dict(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
