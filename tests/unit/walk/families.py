"""Real architectures with small random weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 211
WINDOW = 40  # sliding windows shorter than the prompts, and no multiple of a chunk

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 4},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
}

#: Families that differ most from one another. The others run with the matrix.
_COMMON = ("llama", "gemma2", "gpt_oss", "qwen3_moe")
each_family = pytest.mark.parametrize(
    "family", [name if name in _COMMON else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES]
)


def make_config(family: str, **changes: object) -> object:
    """The family's configuration at test size."""
    sizes = {**_SIZES, **FAMILIES.get(family, {}), **changes}
    if "kv_lora_rank" in sizes:  # the width of its heads has two parts with settings of their own
        del sizes["head_dim"]
    return AutoConfig.for_model(family, **sizes)


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """A model of `family` whose logits spread over a few units, so that a wrong key would show."""
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)  # some families draw weights of one dimension themselves, like decays
        model = AutoModelForCausalLM.from_config(make_config(family, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            elif "sinks" in name or "bias" in name:
                weight.normal_(0, 1, generator=generator)
    made: nn.Module = model.to(dtype).requires_grad_(False)
    return made
