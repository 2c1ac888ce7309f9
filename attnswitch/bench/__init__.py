"""Backends timed side by side with their peers; and what a problem has to cost, before anything runs.

run         rows measured one after the other, as records; document writes them down, table as CSV
suites      what is measured; workload makes a row's tensors
candidates  calls of a workload, by backends and by peers; varlen_peers has those of sequences without padding
steps       one step of an application; deviation holds its result against the answer, noise says what dropout adds
measure     the clock of a device, candidates in turn; loops has the application's, timed the pace of one call by it
compare     two runs held against each other; plots draws one
beside      one backend among the others, for ``verify --speed``
choice      whether the choice is right, on problems that drawn draws
generate    tokens per second of a model
resident    resident memory of a call on the CPU
overhead    what a small call costs beside torch's own
estimate    what a problem has to cost; traffic counts its bytes
ranks       the same of a sequence dealt among ranks: splits have its parts, links what a transfer takes, pace what a
            call does, and rings the clock of it all
"""
