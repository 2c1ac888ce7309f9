"""What backends are known to get wrong, with the saved cases that show it, for a run to see whether they still do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnswitch.machine import divergences, registry
from attnswitch.machine.device import Device
from attnswitch.machine.divergences import Divergence
from attnswitch.machine.registry import Missing
from attnswitch.verify.session.corpus import Saved
from attnswitch.verify.session.plan import Target

__all__ = ["cases"]


def cases(target: Target, every: Sequence[Saved]) -> Iterator[tuple[str, Divergence, Saved]]:
    """Backend, divergence and case, for each divergence that is refused on the device as it is here."""
    device = Device.parse(target.device)
    by_name = {saved.path.name: saved for saved in every}
    for name in target.backends:
        backend = registry.load(name) if name in registry.names() else Missing("")
        source = "" if isinstance(backend, Missing) else backend.divergences
        for entry in divergences.load(source) if source else ():
            if name in entry.backend and entry.reason is not None and entry.on(device):
                for file in entry.cases:
                    saved = by_name.get(file)
                    if saved is not None and saved.backend == name and saved.device.split(":")[0] == device.kind:
                        yield name, entry, saved
