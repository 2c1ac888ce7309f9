"""What was measured and verified on this machine, remembered from one process to the next.

    signature  who says so: the device, the software, and a hash of the backend's source
    record     a time or a verdict, and the line of JSON that it is on disk
    classes    which problems a time, and a fault, holds for
    store      the file: many processes append to it at once
    exchange   files that are carried from machine to machine: whole, or refused
    view       the records that hold here, indexed for the planner

Wisdom chooses among backends that take a problem, and can take one away that was found wrong. Where it is wrong
itself it costs time, and never an answer.
"""
