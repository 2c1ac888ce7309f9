"""What a call costs beside torch's own, by the clock of the host or of a loop.

``rows`` says what is called, ``operands`` makes its tensors, ``ways`` the calls of one row, ``clock`` times them in
turn, ``costs`` puts it together, ``document`` writes it down.
"""
