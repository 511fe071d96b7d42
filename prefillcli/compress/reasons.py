"""Why a prompt is read in full, and why a token of a compressed one is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from prefillcli.compress.compressor import WorthCompressing
from prefillcli.compress.fallbacks import FALLBACK, FALLBACKS, is_fallback
from prefillcli.compress.selection import Request, full_prefixes
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import Prompt

TokenReason = Literal["first", "last", "chosen", "shared", "dropped", "full"]
"""Why a token is kept or dropped."""


def why_no_rate(
    prompts: Sequence[Prompt],
    keeps: Sequence[float | None],
    number: int,
    keep: float,
    compression: Compression,
    worth: WorthCompressing,
) -> str:
    """Why prompt `number` has no keep rate in `keeps`, as `Compressor.keeps` decides. `keep` is the job's rate."""
    prompt = prompts[number]
    tokens, own = len(prompt.tokens), keep if prompt.keep is None else prompt.keep
    if prompt.specprefill is False:
        return "its column specprefill is false"
    if prompt.keep is not None and prompt.keep >= 1:
        return "its column keep is 1"
    if own >= 1:
        return "--keep is 1"
    if tokens <= compression.keep_first + compression.tail:
        return (
            f"of its {tokens:,} tokens the first {compression.keep_first:,} and last {compression.tail:,} stay anyway"
        )
    if not worth(tokens, own):
        return f"its {tokens:,} tokens {worth.why_not(tokens, own)}"
    in_full = [keep is None and other != number for other, keep in enumerate(keeps)]
    reach = full_prefixes([each.tokens for each in prompts], in_full)[number]
    return (
        f"other rows are read in full and compute its first {reach:,} tokens anyway; the {tokens - reach:,} behind "
        f"them {worth.why_not(tokens - reach, own)}"
    )


def why_in_full(request: Request) -> str | None:
    """Why a prompt that has a keep rate is read in full after all; None if it is compressed."""
    if request.compressed:
        return None
    if is_fallback(request.method):
        return f"{request.method}: {FALLBACKS[request.method.removeprefix(FALLBACK)].meaning}"
    return "the chosen tokens, the first and last ones and those that other rows keep are all tokens of it"


def why_kept(request: Request, tail: int, others: Sequence[Neighbour], compression: Compression) -> list[TokenReason]:
    """Why each token of a prompt is kept or dropped.

    Its last `tail` tokens are always kept; `others` are the prompts that are compressed together with it.
    """
    tokens = len(request.prompt.tokens)
    if request.kept is None:
        return ["full"] * tokens
    why = np.full(tokens, "chosen", dtype=object)
    for other in others:
        begin = 0 if other.in_full else max(other.tokens - other.tail, 0)  # always kept, as its own end
        why[begin : other.shared] = "shared"
    why[max(tokens - tail, 0) :] = "last"
    why[: compression.keep_first] = "first"
    dropped = np.ones(tokens, dtype=bool)
    dropped[request.kept] = False
    why[dropped] = "dropped"
    found: list[TokenReason] = why.tolist()
    return found


class Neighbour(NamedTuple):
    """A prompt that is compressed together with another one.

    It has so many `tokens`, of which the last `tail` are always kept; the two have the first `shared` in common.
    """

    tokens: int
    tail: int
    in_full: bool
    shared: int
