"""What the cost model says of the ways that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefillcli.models.shape import Flops, _flops, _head, _layers, prefill_flops, seen_pairs
from prefillcli.plan.plan import Plan
from prefillcli.plan.trie import TokenArray


def predicted_speedup(
    target: Any, draft: Any, tokens: int, kept: int, *, flops: Callable[[Any, int], Flops] = prefill_flops
) -> float:
    """F_target(tokens) / (F_draft(tokens) + F_target(kept)): the draft reads a prompt, the target its kept tokens.

    `target` and `draft` are text configurations. Attention shrinks with the square of what is kept, so on long prompts
    this is more than `ratio_speedup`.
    """
    return flops(target, tokens).total / (flops(draft, tokens).total + flops(target, kept).total)


def plain_flops(config: Any, prompts: Sequence[TokenArray]) -> float:
    """The operations of all prompts, each by itself, with all layers for all tokens. The head is left out."""
    return sum(prefill_flops(config, len(prompt), head_tokens=0).total for prompt in prompts)


def ratio_speedup(
    target: Any, draft: Any, tokens: int, keep: float, *, flops: Callable[[Any, int], Flops] = prefill_flops
) -> float:
    """1 / (r + keep) with r = F_draft / F_target over the whole prompt.

    Equation 3 of "SpecPrefill on Unified Memory" without its overhead. SpecPrefill's figure 9 is this with `table5`.
    """
    return 1 / (flops(draft, tokens).total / flops(target, tokens).total + keep)


def table5(config: Any, tokens: int, *, head_tokens: int | None = None) -> Flops:
    """Table 5 to the letter, for one prompt of `tokens`: every query with every key, the head over all tokens.

    With `head_tokens` the head is applied to so many of them. Raises NoCostModel for a configuration with layers other
    than attention, or without the usual sizes.
    """
    layers = _layers(config)
    return _flops(
        config, layers, tokens, [float(tokens) ** 2] * len(layers), tokens if head_tokens is None else head_tokens
    )


def answer_flops(config: Any, plan: Plan, *, ahead: int = 0) -> float:
    """The operations that `walk_flops` leaves out, for the last token of each prompt: in the last layer and the head.

    `ahead` more tokens are decoded behind each prompt, through all layers and the head.
    """
    layers = _layers(config)
    head = _head(config)
    token = [layer.mlp + layer.inputs + layer.output for layer in layers]
    total = 0.0
    for pack in plan.packs:
        for node, _ in pack.reads:
            seen = pack.starts[node] + pack.offsets[node + 1] - pack.offsets[node]
            total += head + token[-1] + seen_pairs(seen - 1, 1, layers[-1].window) * layers[-1].pair
            total += ahead * (head + sum(token))
            total += sum(seen_pairs(seen, ahead, layer.window) * layer.pair for layer in layers) if ahead else 0.0
    return total
