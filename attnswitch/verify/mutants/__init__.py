"""Faulty variants of the tiled backend: what the verifier must catch, by which it is itself tested.

Each is a backend that the registry reaches by its target: ``attnswitch.verify.mutants:bool-mask-inverted``.
"""

from attnswitch.verify.mutants.catalogue import FAMILIES, Excluded, Mutant, backend, excluded, mutants

__all__ = ["FAMILIES", "Excluded", "Mutant", "backend", "excluded", "mutants"]


def __getattr__(name: str) -> type:
    """The backend class of the mutant called ``name``."""
    if any(mutant.name == name for mutant in mutants()):
        return backend(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and there is no mutant of that name")
