"""Floating-point operations that a dense Llama needs, to tell saved work from speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefillcli.plan.plan import Plan
from prefillcli.plan.trie import TokenArray


def plain_flops(config: Any, prompts: Sequence[TokenArray]) -> float:
    """All prompts, each by itself, all layers for all tokens. The head is left out."""
    tokens = sum(len(p) for p in prompts)
    pairs = sum(len(p) * (len(p) + 1) / 2 for p in prompts)
    return float(config.num_hidden_layers * (tokens * _linear(config) + pairs * _pair(config)))


def walk_flops(config: Any, plan: Plan) -> float:
    """A plan's packs: tokens once, and of the last layer the projections of queries, keys and values alone."""
    tokens, pairs = 0, 0.0
    for pack in plan.packs:
        tokens += len(pack.tokens)
        for node, start in enumerate(pack.starts):
            length = pack.offsets[node + 1] - pack.offsets[node]
            pairs += length * start + length * (length + 1) / 2
    layers = config.num_hidden_layers - 1
    return float(layers * (tokens * _linear(config) + pairs * _pair(config)) + tokens * _projections(config))


def _projections(config: Any) -> float:
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return float(2 * config.hidden_size * heads * config.head_dim)


def _linear(config: Any) -> float:
    rest = config.num_attention_heads * config.head_dim + 3 * config.intermediate_size  # output, gate, up, down
    return _projections(config) + float(2 * config.hidden_size * rest)


def _pair(config: Any) -> float:
    """Of one query with one key, over all heads."""
    return float(4 * config.num_attention_heads * config.head_dim)
