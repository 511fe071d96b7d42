"""What the cost model says of the ways that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefillcli.models.shape import Flops, prefill_flops
from prefillcli.plan.trie import TokenArray


def predicted_speedup(
    target: Any, draft: Any, tokens: int, kept: int, *, flops: Callable[[Any, int], Flops] = prefill_flops
) -> float:
    """F_target(tokens) / (F_draft(tokens) + F_target(kept)): the draft reads a prompt, the target its kept tokens.

    `target` and `draft` are text configurations. Attention shrinks with the square of what is kept, so on long prompts
    this is more than `prefillcli.models.shape.ratio_speedup`.
    """
    return flops(target, tokens).total / (flops(draft, tokens).total + flops(target, kept).total)


def plain_flops(config: Any, prompts: Sequence[TokenArray]) -> float:
    """The operations of all prompts, each by itself, with all layers for all tokens. The head is left out."""
    return sum(prefill_flops(config, len(prompt), head_tokens=0).total for prompt in prompts)
