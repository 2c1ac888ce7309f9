"""The process that candidates are forked from, one after another: it has the libraries loaded, and no kernel's code.

    python -m attnswitch.verify.court.forks READ WRITE FOLDER

The arguments are a ``Child``'s. So a candidate that dies is followed by a new one in no time, and none finds anything
of the one before.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

from attnswitch import child
from attnswitch.verify.court import candidate, messages
from attnswitch.verify.court.messages import Answer

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Candidates until the other end closes the connection."""
    asks, answers, folder, _ = child.begin()
    importlib.import_module("torch")  # of which nothing runs here: a fork has no threads
    while True:
        number = os.fork()
        if number == 0:
            try:
                os.setpgid(0, 0)
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                candidate.serve(asks, answers, folder)
            finally:
                os._exit(1)
        _, status = os.waitpid(number, 0)
        answers.send_bytes(messages.encoded(Answer(ended=os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    main()
