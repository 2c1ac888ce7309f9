"""The process in which kernels run: it takes jobs from a connection and tells what happens.

    python -m attnswitch.verify.session.worker READ WRITE FOLDER DEVICE

The first three are a ``Child``'s. A kernel that crashes or hangs takes this process with it and nothing else; the
journal in the folder says which case it was.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attnswitch import child
from attnswitch.errors import AttnswitchError, VerificationError
from attnswitch.verify import terms
from attnswitch.verify.court import begun, sitting
from attnswitch.verify.drawing.case import Case
from attnswitch.verify.judge import crash, examine
from attnswitch.verify.outcome import Outcome
from attnswitch.verify.session import journal
from attnswitch.verify.session.events import Event, Lost
from attnswitch.verify.session.explore import Examine, Job, carry_out
from attnswitch.verify.session.provenance import provenance
from attnswitch.verify.terms import Terms

__all__ = ["main", "recording"]

#: Bytes of a GPU's memory that a worker keeps between two cases.
_KEPT = 2**29


def recording(path: Path | None) -> Examine:
    """``examine`` that writes each launch to the journal first, if there is one."""
    count = 0

    def launch(case: Case, backends: Sequence[str], device: str, only: bool = False) -> list[Outcome]:
        def before(backend: str) -> None:
            nonlocal count
            count += 1
            if path is not None:
                journal.write(path, journal.Entry(count, backend, case))

        try:
            return examine(case, backends, device, only=only, before=before)
        except Exception:
            raise
        except BaseException as error:  # of a kernel, which has no say in when a worker ends
            if path is None and isinstance(error, KeyboardInterrupt):  # of the user
                raise
            if len(backends) == 1:
                return [Outcome(case, backends[0], device, "mismatch", failure=crash(error))]
            return [outcome for backend in backends for outcome in launch(case, (backend,), device, only)]
        finally:
            if device != "cpu":
                _share(device)

    return launch


def _share(device: str) -> None:
    """Give memory back that the allocators keep: the other workers of a GPU need it for cases of great lengths."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved(device) > _KEPT:
        torch.cuda.empty_cache()
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and cupy.get_default_memory_pool().total_bytes() > _KEPT:
        cupy.get_default_memory_pool().free_all_blocks()


def main() -> None:
    """Jobs until the other end closes the connection."""
    jobs, events, folder, (device,) = child.begin()
    child.adopt()
    faulthandler.disable()
    lost = False

    def tell(event: Event) -> None:
        nonlocal lost
        events.send(event)
        lost = lost or isinstance(event, Lost)

    seats = ExitStack()
    try:
        demanded: Terms = jobs.recv()
    except EOFError:
        os._exit(0)
    court = demanded.court.on(device)
    import torch  # now and not in the first case

    seats.enter_context(begun(court, folder))
    torch.zeros(1, device=device)  # a GPU takes a while to start
    seats.enter_context(sitting(court, folder))
    events.send(provenance())
    while not lost:
        try:
            job: Job = jobs.recv()
        except EOFError:
            break
        try:
            with terms.within(demanded):
                carry_out(job, recording(journal.path(folder)), tell)
        except AttnswitchError as error:
            events.send(error)
        except Exception:  # the verifier's own mistake, for the conductor to raise; the trace would not travel
            events.send(VerificationError(f"the verifier failed in a worker process:\n{traceback.format_exc()}"))
    seats.close()
    events.close()
    os._exit(0)  # destructors of a lost device may crash or hang


if __name__ == "__main__":
    main()
