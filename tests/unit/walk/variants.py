"""Tiny models whose attention has another form than the usual one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prefillcli.walk.forest import register
from tests.unit.walk.families import make_model

#: Keys and values of different widths, made of latents that all heads share.
LATENT: dict[str, Any] = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "num_key_value_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
#: Widths that the compiled kernel takes, and no experts: one that is chosen otherwise hides what attention does.
IN_HALF: dict[str, Any] = {
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,
    "mlp_layer_types": ["dense"] * 3,
}

#: Attention within parts of 40 tokens, and layers without positions whose queries grow with their depth.
LOCAL: dict[str, Any] = {
    "attention_chunk_size": 40,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 16,
    "attn_scale": 0.5,
    "num_local_experts": 4,
    "intermediate_size_mlp": 96,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", LATENT | EXPERTS),
    "deepseek_v3": ("deepseek_v3", LATENT | EXPERTS),
    "deepseek_v3 without a query rank": ("deepseek_v3", LATENT | EXPERTS | {"q_lora_rank": None}),
    "minicpm3": ("minicpm3", LATENT),
    "llama4_text": ("llama4_text", LOCAL),
    "llama4_text that ends in full attention": ("llama4_text", LOCAL | {"no_rope_layers": [1, 1, 0]}),
    "llama4_text in large parts": ("llama4_text", LOCAL | {"attention_chunk_size": 150, "moe_layers": []}),
}


def make_variant(variant: str, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """A model of the variant, with `changes` of its configuration."""
    family, own = VARIANTS[variant]
    register()
    return make_model(family, dtype, **{**own, **changes})
