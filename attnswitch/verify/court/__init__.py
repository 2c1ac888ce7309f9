"""The court: a backend's kernels run in a process that is given inputs alone, and the judge sits in another.

    proxy      the backend as the judge's process has it         candidate  the process in which its kernels run
    server     what the judge has of the process ...             forks      ... that candidates are forked from
    messages   what judge and candidate say to each other        wire       arrays as they lie, in memory of both
    traces     what kernels leave behind in their process        processes  what they start, seen from outside
    sitting    which backends stand before it                limits     of resources, held against kernels

The judge draws, knows the right answer and gives the verdict. What it reads of the candidate are numbers in a file and
JSON within limits, never objects: nothing that a kernel does to its own process reaches it. Both are the same user's,
so that this is no sandbox.
"""

from attnswitch.verify.court.sitting import Court, begun, conduct, meanwhile, replayed, seated, sitting

__all__ = ["Court", "begun", "conduct", "meanwhile", "replayed", "seated", "sitting"]
