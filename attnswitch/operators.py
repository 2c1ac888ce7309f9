"""Registers ``torch.ops.attnswitch``, which calls register when they need it, for programs that were saved with it.

``torch.export.load`` and ``torch._inductor.aoti_load_package`` look operators up by name before any call is made:

    import attnswitch.operators
    program = torch.export.load("model.pt2").module()
"""

from attnswitch.call import operators as _operators  # noqa: F401

__all__: list[str] = []
