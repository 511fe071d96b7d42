"""Models with random weights: speed and memory do not depend on the weights' values."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from prefillcli.walk.forest import ATTENTION, register

#: Llama shapes by their rough number of parameters.
SHAPES = {
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "100M-mha": {
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
    },
    "narrow": {
        "hidden_size": 128,
        "intermediate_size": 8192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 8_000,
    },
    "600M": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 17, "num_attention_heads": 12},
}


def random_llama(size: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama of `size` with tied embeddings of 32,000 tokens (8,000 for 25M) and seeded weights.

    It has four K,V heads where its shape does not say how many.
    """
    usual = {"num_key_value_heads": 4, "vocab_size": 8_000 if size == "25M" else 32_000}
    return _llama(dtype, **{**usual, **SHAPES[size]})


def random_draft(vocabulary: int, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama of two layers and two heads: at 16,384 tokens 2.3 % of the operations of "100M"."""
    return _llama(
        dtype,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocabulary,
    )


def _llama(dtype: torch.dtype, **shape: int) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=1 << 17, tie_word_embeddings=True)
    model: PreTrainedModel = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    return model.eval().requires_grad_(False)
