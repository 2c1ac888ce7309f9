"""``timed``: the pace of a call by the application's clock, on a device of this machine."""

from __future__ import annotations

import attnswitch
from attnswitch.bench import workload
from attnswitch.bench.loops import loops
from attnswitch.bench.measure import Budget, current
from attnswitch.bench.pace import Pace, chosen_for, extra, forward_of, shortened, step_of, work
from attnswitch.errors import Unsupported
from attnswitch.machine.device import Device
from attnswitch.problem import Problem

__all__ = ["timed"]


def timed(problem: Problem, where: str, budget: Budget | None = None) -> Pace:
    """Milliseconds of ``problem`` on ``where``, as torch spells it, by the backend of the choice.

    The forward is ``attention`` with its lse, the backward ``attention_backward`` from output and lse, as a rank calls
    them. Calls that are longer than ``pace.LONGEST`` are timed as ``pace.shortened`` has them. Raises ``Unsupported``
    where nothing takes the problem, or it does not fit in memory.
    """
    short = shortened(forward_of(problem))
    grads = step_of(problem).grads
    with current(where):
        try:
            tensors = workload.of(short.replace(grads=grads), where)
            operands = [x.detach() for x in (tensors.query, tensors.key, tensors.value)]
            said = {name: value for name, value in tensors.keywords().items() if name != "seed"}
            out, lse = attnswitch.attention(*operands, **said)
            calls = {"forward": lambda: attnswitch.attention(*operands, **said)}
            if grads:
                kept = said | {"out": out, "lse": lse}
                kept = {name: value for name, value in kept.items() if name not in ("return_lse", "dropout_p")}
                calls["backward"] = lambda: attnswitch.attention_backward(tensors.grad_out, *operands, **kept)
            times = loops(calls, where, budget=budget)
        except (MemoryError, RuntimeError) as error:
            raise Unsupported(f"{short} cannot be timed on {where}: {error}") from None
    more = work(problem) / work(short)
    forward, backward = (times[name].median * more if name in times else 0.0 for name in ("forward", "backward"))
    device = Device.parse(where)
    backends = chosen_for(problem, device)
    held = extra(problem, device, backends)
    return Pace(forward, backward, backends, "measured", f"calls timed here, on {device}", held)
