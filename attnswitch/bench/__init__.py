"""Backends timed side by side with their peers, in one run.

``suites`` reads what is measured, ``workload`` makes a row's tensors, ``candidates`` and ``peers`` make calls of them,
``steps`` runs them, ``deviation`` holds each result against the answer, ``noise`` says what dropout adds, ``run`` puts
it together and yields ``record``s, ``document`` writes them down, ``table`` as CSV. ``compare`` holds two runs against
each other, ``plots`` draws one. The protocol of the clock is ``attnswitch.bench.measure``. ``beside`` times one backend
among the others for ``verify --speed``. ``overhead`` stands apart: it times small calls, by the host's clock.
"""
