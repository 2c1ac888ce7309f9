"""attnswitch as an attention implementation of Hugging Face transformers.

After ``register()``, ``attn_implementation="attnswitch"`` works wherever transformers takes one. What a model asks of
attention is honoured, or refused with ``Unsupported``; nothing is dropped.
"""

from __future__ import annotations

import functools
import re

from transformers import AttentionInterface, AttentionMaskInterface

from attnswitch.errors import InvalidProblem
from attnswitch.integrations.transformers import fit, serving
from attnswitch.integrations.transformers.attention import attention
from attnswitch.integrations.transformers.masks import mask
from attnswitch.integrations.transformers.pages import no_mask, paged
from attnswitch.machine import registry

__all__ = ["register"]


def register(name: str = "attnswitch", backend: str | None = None) -> None:
    """Make ``attn_implementation=name`` mean attnswitch, for attention and for the mask that comes with it.

    Refused with ``Unsupported`` when made, when it is set, or at their first mask or layer: models that cannot
    call a registered attention, and would compute with its mask alone. These are models whose marks support neither
    ``sdpa`` nor flash-attn through the attention interface (MPNet, BLOOM, CodeGen, MPT, Longformer, BigBird, Splinter,
    ...), models that choose layers by name from tables of their own (Falcon, GPT-J, GPT-Neo, Bark, SAM's image encoder,
    ...) and models whose layers never look the attention up. ``output_attentions=True`` is what it is with ``sdpa``: a
    warning, and no weights. Continuous batching goes to ``name-paged``, which is registered as well. Under autocast all
    operands are cast, as torch's are.

    Args:
        name: what models ask for; a name that is registered again changes its meaning.
        backend: as for ``attnswitch.attention``: this one or an error; the planner's choice if None.

    Raises:
        InvalidProblem: the backend is not known, or transformers would read something else into the name.
    """
    if re.search(r"flash|flex_attention|[/|:]|^eager$", name):
        raise InvalidProblem(
            f"name={name!r}: transformers takes 'eager' and names with 'flash', 'flex_attention', '/', ':' or '|' for"
            " its own kinds of attention, which come with other masks; choose another name"
        )
    if backend is not None:
        registry.load(backend)
    AttentionInterface.register(name, functools.partial(attention, backend))
    fit.names.add(name)
    fit.watch()
    # Without a function for the masks every layer is handed None, padded batches included.
    AttentionMaskInterface.register(name, mask)
    if serving.watch():
        serving.names[name] = beside = f"{name}-paged"
        AttentionInterface.register(beside, functools.partial(paged, backend))
        AttentionMaskInterface.register(beside, no_mask)
        fit.names.add(beside)
