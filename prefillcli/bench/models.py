"""Random-weight models to measure with: speed and memory do not depend on what the weights say."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from prefillcli.prefill.forest import ATTENTION, register

#: Llama shapes by their rough number of parameters.
SHAPES = {
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}


def random_llama(size: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama of `size` with four K,V heads, tied embeddings of 32,000 tokens (8,000 for 25M) and seeded weights."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[size],
        num_key_value_heads=4,
        vocab_size=32_000 if size != "25M" else 8_000,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    return model.eval().requires_grad_(False)
