"""Measuring which backend is the fastest for a problem, once a machine.

trial     one problem: every candidate verified, tried out, its configs searched, then timed in turn
sight     a trial within an application, at the first call of a class (policy MEASURE)
problems  what there is to measure: the catalogue, a model's shapes, what an application recorded
session   one problem after the other, the verifier's part in a process of its own
"""
