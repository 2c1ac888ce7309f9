"""Which backend computes a problem, and why.

planner    from a problem and a device to a choice, a plan, and the kernel that was chosen
field      the backends of a device, each asked about the problem when the choice wants to know
candidate  one of them, with what speaks against it and what is known of its speed
choice     the rule by which one is chosen
policy     what that may rest on
forecast   what a call is expected to take where nothing was measured
waiting    the classes that policy LEARN has met and not measured
plan       the choice with all the others and why, to be read and to be called
"""
