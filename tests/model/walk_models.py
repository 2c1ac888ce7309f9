"""Model classes of transformers made small, with a batch that each takes, by itself or as a part of another."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from walk_batches import batches as possible
from walk_compare import Outputs, outputs
from walk_configs import ATTEMPTS, small

__all__ = ["Subject", "made", "parts", "prepared", "short"]

#: A model is cut down further, or given up, above so many weights.
MOST = 150_000_000
#: Seconds of this process after which nothing else is tried: what is built does not depend on the machine's load.
PATIENCE = 15.0


class Subject(NamedTuple):
    """A class that can be run, by itself or as a part of a model that can."""

    kind: type[PreTrainedModel]
    config: Any
    batch: dict[str, Any]
    #: Where it is in that model, as ``named_modules`` has it; "" for a model by itself.
    part: str = ""

    def made(self, implementation: str) -> PreTrainedModel:
        """The model, of random weights that are the same at every call."""
        return made(self.kind, self.config, implementation)

    def run(self, model: PreTrainedModel, batch: dict[str, Any]) -> Outputs:
        """What the model, or the part of it, makes of ``batch``, which stays as it is."""
        found: list[Outputs] = []
        at = model.get_submodule(self.part)
        hook = at.register_forward_hook(lambda _module, _args, out: found.append(outputs(copy.deepcopy(out))))
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                model(**copy.deepcopy(batch))
        finally:
            hook.remove()
        return {f"{number}{name}": x for number, out in enumerate(found) for name, x in out.items()}


def made(kind: Any, config: Any, implementation: str) -> PreTrainedModel:
    """A model of random weights that are the same at every call."""
    torch.manual_seed(0)
    with no_init_weights():
        model: PreTrainedModel = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or not weight.numel():
                near = 1.0 if name.endswith("weight") else 0.0
                weight.copy_(near + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                fan = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.2 / fan**0.5))
        for name, kept in model.named_buffers():
            # Frozen norms have copied what no initialisation filled.
            if name.endswith((".weight", ".running_var")):
                kept.fill_(1.0)
            elif name.endswith((".bias", ".running_mean")):
                kept.zero_()
    model.train(False)
    return model


def prepared(kind: Any) -> Subject:
    """A small config and a batch that the model takes with eager attention. Raises ``ValueError`` that says why not."""
    errors: list[str] = []
    began = time.process_time()
    for attempt in ATTEMPTS:
        if time.process_time() - began > PATIENCE:
            break
        try:
            config = small(kind.config_class, attempt)
            with torch.device("meta"), no_init_weights():
                weights = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
        except Exception as error:  # told in the result
            errors.append("config: " + short(error))
            continue
        if weights > MOST:
            errors.append(f"config: {weights:,} weights")
            continue
        try:
            model = made(kind, config, "eager")
        except Exception as error:
            errors.append("model: " + short(error))
            continue
        torch.manual_seed(0)
        for batch in possible(model):
            if time.process_time() - began > PATIENCE:
                break
            subject = Subject(kind, config, batch)
            try:
                out = subject.run(model, batch)
            except Exception as error:
                errors.append(f"run with {', '.join(batch)}: " + short(error))
                continue
            if any(bool(x.isfinite().any()) for x in out.values()):
                return subject
            errors.append("run: no finite output")
    ran = [error for error in errors if not re.search(r"missing \d|have to specify|unexpected keyword", error)]
    raise ValueError((ran or errors or ["no inputs to try"])[0])


def parts(whole: Subject, wanted: Collection[type[PreTrainedModel]]) -> Iterator[tuple[Any, Subject]]:
    """The classes of ``wanted`` that are part of another model and called by it, each where it is first."""
    model = whole.made("eager")
    found: dict[Any, Subject] = {}
    for path, module in model.named_modules():
        if path and type(module) in wanted and type(module) not in found:
            subject = whole._replace(part=path)
            if subject.run(model, whole.batch):
                found[type(module)] = subject
    yield from found.items()


def short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
