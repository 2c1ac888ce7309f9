"""attnswitch installed under timm and open_clip, which call torch's function: forward and backward against torch's own.

uv run --group model pytest tests/model
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import attnswitch

SMALL: dict[str, Any] = {
    **{"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 32, "depth": 2, "num_heads": 4},
}


def vit(**options: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return VisionTransformer(**SMALL, **options), (torch.randn(3, 3, 32, 32),)


def relative() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Its positions are a mask that is learned."""
    return VisionTransformerRelPos(**SMALL, rel_pos_type="bias"), (torch.randn(3, 3, 32, 32),)


def clip() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Images, and texts that are read from left to right; layers are torch's ``MultiheadAttention``."""
    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=9, vocab_size=50, width=32, heads=4, layers=2)
    return CLIP(16, vision, text), (torch.randn(3, 3, 32, 32), torch.randint(1, 50, (3, 9)))


#: What makes each model, and how often it attends.
MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]], int]] = {
    "vit": (vit, 2),
    "vit, normed queries and keys, pooled by attention": (lambda: vit(qk_norm=True, global_pool="map"), 3),
    "vit, relative positions": (relative, 2),
    "clip": (clip, 4),
}


def run(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of the parameters."""
    found = model(*inputs)
    outputs = [found] if isinstance(found, torch.Tensor) else [x for x in found if x.ndim]
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(x * torch.randn(x.shape, generator=generator)).sum() for x in outputs]).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [x.detach() for x in outputs], [x for x in gradients if x is not None]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest distance of two of them, over the size of the second or a thousandth of the largest of all."""
    sizes = [float(x.norm()) for x in expected]
    errors = [float((x - y).norm()) for x, y in zip(found, expected, strict=True)]
    return max(error / max(size, 1e-3 * max(sizes)) for error, size in zip(errors, sizes, strict=True))


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_installed(name: str, training: bool, backend: str | None) -> None:
    torch.manual_seed(0)
    make, attentions = MODELS[name]
    model, inputs = make()
    model.train(training)
    outputs, gradients = run(model, inputs)
    with attnswitch.installed(backend), attnswitch.record() as recording:
        ours, our_gradients = run(model, inputs)
    assert sum(recording.problems.values()) == attentions
    assert all("q" in problem.grads for problem in recording.problems)
    assert any("m" in problem.grads for problem in recording.problems) == (name == "vit, relative positions")
    assert off(ours, outputs) < 1e-5
    assert off(our_gradients, gradients) < 1e-4
