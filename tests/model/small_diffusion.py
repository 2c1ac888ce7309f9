"""Diffusion models of random weights, small enough for a test: what makes each, what it is given, how often it attends.

The first two call diffusers' dispatch of attention, the others ``F.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)

__all__ = ["MODELS", "Small"]


class Small(NamedTuple):
    """A model and its inputs, the same each time."""

    kind: Any
    config: dict[str, Any]
    inputs: Callable[[Callable[..., torch.Tensor]], dict[str, torch.Tensor]]
    attentions: int

    def make(self, device: str = "cpu") -> tuple[Any, dict[str, torch.Tensor]]:
        """The model, in evaluation, and the keywords of a call; the same numbers on every device."""
        torch.manual_seed(0)
        model, inputs = self.kind(**self.config).eval(), self.inputs(torch.randn)
        return model.to(device), {name: x.to(device) for name, x in inputs.items()}


MODELS = {
    "flux": Small(
        FluxTransformer2DModel,
        {
            **{"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32},
            "axes_dims_rope": [4, 4, 8],
        },
        lambda randn: {
            "hidden_states": randn(2, 16, 4),
            "encoder_hidden_states": randn(2, 5, 32),
            "pooled_projections": randn(2, 32),
            "timestep": torch.tensor([1.0, 0.5]),
            "img_ids": randn(16, 3),
            "txt_ids": randn(5, 3),
        },
        2,
    ),
    "wan": Small(
        WanTransformer3DModel,
        {
            **{"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4},
            **{"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2},
            **{"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32},
        },
        lambda randn: {
            "hidden_states": randn(1, 4, 2, 8, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": randn(1, 6, 16),
        },
        4,
    ),
    "unet": Small(
        UNet2DConditionModel,
        {
            **{"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32)},
            **{"layers_per_block": 1, "cross_attention_dim": 24, "attention_head_dim": 4, "norm_num_groups": 8},
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        lambda randn: {
            "sample": randn(2, 4, 8, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": randn(2, 5, 24),
            "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5]),
        },
        8,
    ),
    "sd3": Small(
        SD3Transformer2DModel,
        {
            **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8},
            **{"num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32},
            **{"pooled_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 8},
            **{"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        },
        lambda randn: {
            "hidden_states": randn(2, 4, 8, 8),
            "encoder_hidden_states": randn(2, 5, 32),
            "pooled_projections": randn(2, 16),
            "timestep": torch.tensor([3.0, 5.0]),
        },
        3,
    ),
    "cogvideox": Small(
        CogVideoXTransformer3DModel,
        {
            **{"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4},
            **{"time_embed_dim": 2, "text_embed_dim": 8, "num_layers": 1, "sample_width": 8, "sample_height": 8},
            **{"sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 6},
        },
        lambda randn: {
            "hidden_states": randn(1, 2, 4, 8, 8),
            "encoder_hidden_states": randn(1, 6, 8),
            "timestep": torch.tensor([2]),
        },
        1,
    ),
}
