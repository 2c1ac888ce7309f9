"""What was measured and verified on this machine, remembered from one process to the next.

    signature  what a record depends on: the device, the software, and a hash of the backend's source
    record     a time or a verdict, and the line of JSON that holds it on disk
    classes    which problems a time or a fault holds for
    compact    which records are kept where there are too many
    store      the file, to which many processes append at once
    exchange   files to carry from machine to machine, taken as a whole or refused
    view       the records that hold here, indexed for the planner

Wisdom chooses among the backends that take a problem, and excludes those that were wrong on it. Wrong wisdom makes a
call slower; it never changes the answer.
"""
