"""Context parallelism: one sequence over several ranks. Who holds what, what is left to compute, and the two ways."""

from typing import Literal, get_args

__all__ = ["METHODS", "Method"]

#: Keys and values go round the ranks, or ranks trade rows for heads.
Method = Literal["ring", "all-to-all"]
METHODS: tuple[Method, ...] = get_args(Method)
