"""torch's own attention kernels, as four backends that never fall back to one another.

``torch.nn.functional.scaled_dot_product_attention`` picks among them by process-wide switches and tells nobody. Here
each is called by its operator: thread-safe, with the lse where the operator has one. ``base`` holds what they share,
``masks`` turns every way of hiding positions into the one mask an operator takes, ``compose`` and ``kernel`` do so on a
GPU by one kernel, ``operands`` makes aligned copies, ``backward`` starts from output and lse, ``memory`` counts bytes,
``arguments`` says the rest of a call, ``biased`` launches the two operators that take masks as they add them, and
``autocast`` keeps its regions out. ``reasons`` says what an operator does not do, ``divergences.toml`` what it does and
gets wrong.
"""
