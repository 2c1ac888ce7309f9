"""Attention of libraries that a user has installed, as thin backends: one file a library, which calls its public API.

``package`` knows whether a library is there without importing it, ``takes`` turns what one takes into reasons, and
``base`` has the rest that they share: operands that fit, rows that see nothing, gradients by the library's autograd. A
library is imported when a kernel of its backend is compiled, and never for a plan.
"""
