"""Measuring which backend is the fastest for a problem, once on each machine.

trial     one problem: every candidate is verified and tried out, its configs are searched, the best are timed
sight     a trial within an application, at the first call of a class (policy MEASURE)
learn     trials in the background of one (policy LEARN): a thread that asks, within a share of the time
worker    the process that it asks; messages is what they say to each other
problems  what to measure: the catalogue, the shapes of a model, or what an application recorded
session   many problems, one after the other; other processes verify
cases     the case that the verifier gets for a problem
"""
