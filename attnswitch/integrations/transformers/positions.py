"""Positions that begin anew within a row: sequences one after another, of which nothing else tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnswitch.integrations.transformers.masks import is_made
from attnswitch.integrations.transformers.sequences import Lengths

__all__ = ["lengths_of"]

#: What positions are marked by: their version, and what they said; and a mask: the versions of both, and what it does.
_SAID, _MIXES = "_attnswitch_said", "_attnswitch_mixes"


def lengths_of(positions: Any, mask: torch.Tensor | None, length_q: int, length_k: int) -> Lengths | None:
    """The sequences of a single row, if its positions begin anew and the mask does not keep them apart already.

    flash-attn's layers in transformers do so too. A mask that somebody else made means what it says. The host waits for
    a GPU here, once for all layers, so no graph looks: neither one of torch.compile, nor a CUDA graph that is captured.
    """
    if torch.compiler.is_compiling() or length_q == 1 or length_q != length_k or type(positions) is not torch.Tensor:
        return None
    if mask is not None and not (is_made(mask) and mask.shape[-2:] == (length_q, length_k)):
        return None
    if tuple(positions.shape) != (1, length_q) or positions.is_floating_point() or positions.is_meta:
        return None
    lengths = _sequences(positions)
    return lengths if lengths is not None and (mask is None or _mixes(mask, lengths, positions)) else None


def _sequences(positions: torch.Tensor) -> Lengths | None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    version = None if positions.is_inference() else positions._version
    before = getattr(positions, _SAID, None)
    if before is not None and version is not None and before[0] == version:
        said: Lengths | None = before[1]
        return said
    said = _read(positions[0].cpu().numpy())
    if version is not None:
        setattr(positions, _SAID, (version, said))
    return said


def _read(positions: Any) -> Lengths | None:
    """A sequence goes on in steps of one, and where another begins positions step back, or stay.

    Steps ahead are another thing, and so is one position for all.
    """
    steps = np.diff(positions)
    ends = np.flatnonzero(steps != 1)
    starts = np.concatenate([[0], ends + 1, [len(positions)]])
    longest = int(np.diff(starts).max())
    if len(ends) == 0 or longest == 1 or steps.max() > 1:
        return None
    offsets = torch.from_numpy(starts.astype(np.int32))
    return Lengths(offsets, offsets, longest, longest)


def _mixes(mask: torch.Tensor, lengths: Lengths, positions: torch.Tensor) -> bool:
    """Whether a mask lets a query see another sequence's keys.

    A sequence of one token is what padding looks like: where there are no others but the first, the mask says it all.
    So it does where positions go on from one key that it lets see to the next: they were counted without the padding.
    """
    starts = torch.as_tensor(lengths.cu_seq_lens_q, device=mask.device)
    if len(starts) < 3 or int(starts[1:].diff().max()) == 1:
        return False
    lasting = not (mask.is_inference() or positions.is_inference())
    held = (mask._version, positions._version) if lasting else None
    before = getattr(mask, _MIXES, None)
    if lasting and before is not None and before[0] is positions and before[1] == held:
        return bool(before[2])
    which = torch.bucketize(torch.arange(mask.shape[-1], device=mask.device), starts, right=True)
    found = bool((mask & (which[:, None] != which)).any()) and not _counted(mask, positions)
    if lasting:
        setattr(mask, _MIXES, (positions, held, found))
    return found


def _counted(mask: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether positions count the keys that a mask lets see, whatever stands between these.

    A row that sees all is one of padding, which transformers lets see something.
    """
    seen = (mask & ~mask.all(-1, keepdim=True)).flatten(0, -2).any(0)
    counted = positions[0, seen.to(positions.device)]
    return len(counted) > 0 and bool((counted.diff() == 1).all())
