"""What of a budget is for texts behind prompts: K,V of all layers, while prompts are scored and while they are written
on.

A pack whose K,V are kept takes those of all layers beside the residual stream: on a CUDA device in host memory, else
in the budget itself. When it is scored, the residual stream is gone, and texts take its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from prefillcli.decode.row_attention import whole_steps
from prefillcli.models.law import FREE_SHARE, MemoryLaw
from prefillcli.plan.pack import Limits
from prefillcli.runtime.memory import available_memory

TextsOf = Literal["all", "some", "later"]
"""Behind which prompts texts are written: all, or some by their scores. Later: what is kept of a pack cannot be used,
because who is wanted is known only after other packs, or because prompts are not read to the end as they are."""

LEAST_KEPT = 16  # tokens of a pack; less is nothing
HELD_BESIDE_KEPT = 1 / 8  # of the budget, at least, for what is held from pack to pack beside a pack that is kept
PINNED_ROUNDING = 2  # torch rounds the size of pinned memory up to a power of two
LEAVING_LAYERS = 2  # whose K,V are on a CUDA device at a time: of the one that is computed, and a copy that leaves
SOME_SHARE = 0.1  # of the prompts that texts are written behind, where only their scores tell
PACK_OVERHEAD = 1 / 8  # what a pack costs beside its tokens, in chunks


@dataclass(frozen=True, slots=True)
class KeepOrAgain:
    """Whether K,V survive scoring, or prompts that are wanted are read again, and why."""

    kept: bool
    reason: str


def limits_with_texts(
    limits: Limits,
    law: MemoryLaw,
    *,
    room: int,
    device: torch.device,
    text_tokens: int,
    offloaded: bool = False,
    share: float = 1.0,
) -> Limits:
    """Limits with room for texts of `text_tokens` each, in `room` bytes: the budget without what packs of any size
    take. K,V that are held from pack to pack are in it, or `offloaded`. `share` is the part of the free host memory
    that may be used, if K,V leave a device. `kept_tokens` is 0 where not even a small prompt fits with a text."""
    held_here = 0 if offloaded else law.all_key_values
    on_host = device.type == "cuda"
    leaving = LEAVING_LAYERS * law.key_value
    kept_token = law.token - law.key_value + (leaving if on_host else law.all_key_values)
    least, most = int(room * HELD_BESIDE_KEPT), limits.held_tokens * held_here
    held = min(most, max(least, room - limits.tokens * kept_token))
    text_token = max(law.all_key_values + law.key_value, law.residual)
    kept, written = (room - held) // kept_token, (room - held) // text_token
    if on_host:
        free = int(available_memory(torch.device("cpu")) * FREE_SHARE * share)
        free -= limits.held_tokens * law.all_key_values * offloaded + law.host * limits.max_tokens
        kept = min(kept, free // (PINNED_ROUNDING * max(law.all_key_values, 1)))
    kept_end = law.states / text_token
    row_tokens = replace(limits, kept_end=kept_end).row_tokens
    kept = int(min(kept, written - whole_steps(text_tokens) - row_tokens))
    if kept < LEAST_KEPT:
        return limits
    return replace(
        limits,
        kept_tokens=kept,
        kept_held_tokens=held // held_here if held_here else limits.held_tokens,
        kept_end=kept_end,
        written_tokens=written,
    )


def keep_or_again(limits: Limits, *, chunk_tokens: int, least_tokens: int, texts_of: TextsOf) -> KeepOrAgain:
    """Whether packs are made so that they can be kept.

    A pack costs its tokens and `PACK_OVERHEAD`, and one of less than `least_tokens` as much as one of so many, because
    it waits for weights. Packs that can be kept are taken where scoring all prompts in them costs no more than scoring
    them in packs of the usual size and reading those again, in small packs, that are wanted: all, or `SOME_SHARE`.
    """
    kept, usual = limits.kept_tokens, limits.tokens
    if not kept:
        return KeepOrAgain(False, "K,V of all layers do not fit for any prompt with a text: no text is written")
    if texts_of == "later":
        return KeepOrAgain(False, "which prompts are written on is known only when others are scored")
    if kept >= usual:
        return KeepOrAgain(True, f"K,V of all layers fit for packs of {usual:,} tokens")

    def cost(tokens: int) -> float:
        return max(tokens, least_tokens) / tokens + PACK_OVERHEAD * chunk_tokens / tokens

    small, large = cost(kept), cost(usual)
    again = small * (1.0 if texts_of == "all" else SOME_SHARE)
    if small <= large + again:
        return KeepOrAgain(True, f"packs are cut to {kept:,} tokens, not {usual:,}: K,V of all layers fit for so many")
    return KeepOrAgain(
        False,
        f"K,V of all layers fit for packs of {kept:,} tokens: scoring all prompts in such packs takes about "
        f"{small / large:.2f} times as long as in packs of {usual:,}; reading those again that are wanted takes less",
    )
