"""The process that candidates are forked from, one after another: it has the libraries loaded, and no kernel's code.

    python -m attnswitch.verify.court.forks READ WRITE FOLDER [KERNELS]

The first three are a ``Child``'s; without the last, candidates are asked in words alone. So a candidate that dies is
followed by a new one in no time, and none finds anything of the one before. It may be a fork itself, of a judge that
was not told yet what to try.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import NoReturn

from attnswitch import child
from attnswitch.verify.court import candidate, limits, messages
from attnswitch.verify.court.messages import Answer

__all__ = ["main", "serve"]


def main() -> None:
    """What a new process does."""
    serve(child.begin())


def serve(parent: child.Parent) -> NoReturn:
    """Candidates until the other end closes the connection."""
    asks, answers, folder, kernels = parent
    if kernels:
        importlib.import_module("torch")  # of which nothing runs here: a fork has no threads
    before = limits.held()
    gc.freeze()  # candidates look through none of it for garbage
    while True:
        number = os.fork()
        if number == 0:
            try:
                os.setpgid(0, 0)
                child.end_with_parent()
                candidate.serve(asks, answers, folder, bool(kernels))
            finally:
                os._exit(1)
        _, status = os.waitpid(number, 0)
        limits.restored(before)  # which a candidate may lower for its parent
        answers.send_bytes(messages.encoded(Answer(ended=os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    main()
