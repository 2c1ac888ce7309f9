"""Stands for ``attnswitch.tune.worker`` where a test says in SCRIPT what it does; it takes as long as it is told to.

"answer": two steps of STEP seconds, with a rest between, then times by which tiled is the fastest. "busy": the same,
after it has found another program at work. "die", "mute": it does so when it is asked. "absent": it cannot start. Each
step is written to STEPS, with when it began and ended. SIGNATURES has those of the backends: nothing here loads any.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

from attnswitch import child
from attnswitch.tune.messages import Answer, Ask, Say
from attnswitch.wisdom import view
from attnswitch.wisdom.record import Time

MS = {"sdpa-flash": 4.0, "sdpa-math": 5.0, "tiled": 1.0, "reference": 9.0}


def main() -> None:
    script = os.environ["SCRIPT"]
    parent = child.begin()
    if script == "absent":
        sys.exit("it has no memory left")
    parent.events.send(Say.READY)
    while True:
        try:
            ask: Ask = parent.requests.recv()
        except EOFError:
            return
        if script == "die":
            os._exit(7)
        if script == "mute":
            time.sleep(600)
        if script == "busy":
            parent.events.send(Say.BUSY)
            assert parent.requests.recv() is Say.GO
        step()
        parent.events.send(Say.REST)
        assert parent.requests.recv() is Say.GO
        step()
        parent.events.send(Answer(tuple(record(ask, name) for name in MS)))


def step() -> None:
    begun = time.monotonic()
    time.sleep(float(os.environ["STEP"]))
    with open(os.environ["STEPS"], "a", encoding="utf-8") as steps:
        steps.write(f"{begun} {time.monotonic()}\n")


def record(ask: Ask, backend: str) -> Time:
    signature, ms = pickle.loads(Path(os.environ["SIGNATURES"]).read_bytes())[backend], MS[backend]
    return Time(ask.problem, backend, "", ms, ms, ms, 9, ask.threads or 1, signature, view.now())


if __name__ == "__main__":
    main()
