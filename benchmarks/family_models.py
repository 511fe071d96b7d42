"""Pairs of target and draft with random weights, of three families, with about the ratios of the paper's pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefillcli.prefill.forest import ATTENTION, register

VOCABULARY = 8_000
_HYBRID = ["mamba", "moe", "mamba", "moe", "mamba", "attention", "moe", "mamba", "moe", "mamba", "moe"]
_SMALL_HYBRID = ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "mamba"]


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the paper's table of predictions, at 20 % and 16K tokens."""

    pair: str
    r: float
    predicted: float
    measured: float
    gap: float


@dataclass(frozen=True, slots=True)
class Family:
    """Configurations of a target and a draft, and what the paper has of such a pair."""

    name: str
    kind: str
    target: dict[str, Any]
    draft: dict[str, Any]
    paper: Published


FAMILIES = {
    each.name: each
    for each in (
        Family(
            "qwen3_next",
            "gated attention, delta nets, MoE",
            {
                "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 64, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
                "linear_value_head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
                "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            },
            {
                "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1,
                "head_dim": 64, "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 64,
                "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 1,
                "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
            },
            Published("Qwen3.5 2B / 122B", 0.02, 4.5, 4.11, 1.1),
        ),
        Family(
            "nemotron_h",
            "Mamba-2, attention without rotations, MoE",
            {
                "hidden_size": 512, "layers_block_type": 2 * _HYBRID, "num_hidden_layers": 2 * len(_HYBRID),
                "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_num_heads": 16,
                "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 128, "n_routed_experts": 16,
                "num_experts_per_tok": 4, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
                "intermediate_size": 1024,
            },
            {
                "hidden_size": 128, "layers_block_type": _SMALL_HYBRID, "num_hidden_layers": len(_SMALL_HYBRID),
                "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "mamba_num_heads": 4,
                "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 1, "chunk_size": 128,
                "intermediate_size": 512,
            },
            Published("Nemotron-H 4B / 120B", 0.03, 4.3, 2.17, 2.0),
        ),
        Family(
            "gpt_oss",
            "sliding windows of 128, MoE",
            {
                "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512,
                "sliding_window": 128,
            },
            {
                "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 256,
                "sliding_window": 128,
            },
            Published("GPT-OSS 20B / 120B", 0.17, 2.7, 1.28, 2.1),
        ),
    )
}  # fmt: skip


def random_model(family: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A model of the family with seeded weights, ready for the walk."""
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, max_position_embeddings=1 << 17, eos_token_id=None, pad_token_id=0, **sizes
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return model.eval().requires_grad_(False)
