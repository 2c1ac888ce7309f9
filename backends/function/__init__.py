"""Functions in files of a user's as backends: ``FILE.py:FUNCTION``, or ``FILE.py:FUNCTION@LIKE``.

    target     the name taken apart, and the file imported    likes      the manners of a call that are known
    signature  what each parameter of a function says         takes      why a problem is not taken
    operands   inputs as arguments, and what comes back       backend    the ``Backend`` and its ``Kernel``
    interpreted   kernels in Triton where there is no GPU

A file is imported where its target is asked for by name, and never for the sake of another file that names it.
"""
