"""Attention over ranks, certified: each case whole in float64, and dealt among the processes of a launcher.

Every process of ``torchrun`` has a ``Supervisor``, whose worker holds the process group and may die or stall. That of
rank 0 has the ``Conductor`` besides, which draws cases, gives each to all ranks, and judges what comes together.
"""

from attnswitch.verify.ranks.conductor import Conductor
from attnswitch.verify.ranks.kills import measure
from attnswitch.verify.ranks.run import joined, methods_of, plan, run

__all__ = ["Conductor", "joined", "measure", "methods_of", "plan", "run"]
