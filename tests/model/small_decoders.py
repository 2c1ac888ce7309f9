"""Small decoders of random weights, what trains them, and the registered attention beside its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

from attnswitch.integrations.transformers import register

SMALL: dict[str, Any] = {
    **{"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GEMMA: dict[str, Any] = {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
GPT_OSS: dict[str, Any] = {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SMALL, **GEMMA)),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SMALL, **GPT_OSS)),
}


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def llama(implementation: str) -> Any:
    kind: Any = LlamaForCausalLM
    return kind._from_config(LlamaConfig(**SMALL), attn_implementation=implementation)


def losses_of(name: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> list[float]:
    """The losses of three steps of the Trainer in bfloat16."""
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        bf16=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        use_cpu=options.pop("device") == "cpu",
    )
    trainer = transformers.Trainer(model=llama(name), args=arguments, train_dataset=rows, **options)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def call(length_q: int, length_k: int, *, module_is_causal: Any = True, mask: Any = None, **options: Any) -> Any:
    """The registered function, and the same by the formula with all positions visible, on (1, 2, length, 4)."""
    register()
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, n, 4))) for n in (length_q, length_k, length_k))
    module = torch.nn.Module()
    module.is_causal = module_is_causal
    out, weights = ATTENTIONS["attnswitch"](module, q, k, v, mask, **options)
    assert weights is None
    i, j = torch.arange(length_q)[:, None] + (length_k - length_q), torch.arange(length_k)

    def formula(visible: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / 2).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)

    return out, formula, i, j
