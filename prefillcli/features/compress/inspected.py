"""What `prefill inspect` shows of a compressed prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefillcli.core.request import Request, Tick
from prefillcli.data.rows import Prompt
from prefillcli.features.compress.base import ImportanceEstimate
from prefillcli.features.compress.compressor import Compressor, why_in_full, why_no_rate
from prefillcli.features.compress.selection import tails
from prefillcli.features.compress.settings import Compression
from prefillcli.report.inspection import ReadPrompt, TokenReason


def inspected(
    compressor: Compressor,
    prompts: Sequence[Prompt],
    shared: Sequence[int],
    number: int,
    tick: Tick,
) -> ReadPrompt:
    """What a window's compression makes of its prompt `number`. The others have so many tokens in `shared` with it."""
    prompt, compression = prompts[number], compressor.settings
    keeps = compressor.keeps(prompts)
    if keeps[number] is None:
        why_not = why_no_rate(prompts, keeps, number, compressor.keep, compression, compressor.worth)
        return ReadPrompt.whole(prompt, why_not)
    related = [other for other, common in enumerate(shared) if common]
    relatives, common = [prompts[other] for other in related], [shared[other] for other in related]
    rates = [keeps[other] for other in related]
    own = related.index(number)
    near = [tokens >= min(compression.select_chunk, len(prompt.tokens)) for tokens in common]
    if compression.per_row:
        near = [at == own for at in range(len(related))]
    requests, estimates = _select(compressor, relatives, rates, near, tick)
    ends = tails([each.tokens for each in relatives], rates, compression)
    neighbours = [
        Neighbour(len(relatives[at].tokens), ends[at], estimates[at].importance is None, common[at])
        for at in range(len(related))
        if at != own and not compression.per_row
    ]
    why = why_kept(requests[own], ends[own], neighbours, compression)
    return ReadPrompt(requests[own], estimates[own].importance, why, estimates[own].voters, why_in_full(requests[own]))


def _select(
    compressor: Compressor,
    prompts: Sequence[Prompt],
    keeps: Sequence[float | None],
    near: Sequence[bool],
    tick: Tick,
) -> tuple[list[Request], list[ImportanceEstimate]]:
    """Requests of prompts that share their first tokens, and the estimates they follow from.

    The importance of those that are not `near` has no say in what is kept of the row: they share no whole chunk with
    it, or every row is selected by itself. The draft is spared them. Where they are compressed they still are so.
    """
    asked = [keep if close else None for keep, close in zip(keeps, near, strict=True)]
    estimates = compressor.estimate(prompts, asked, tick)
    for at, prompt in enumerate(prompts):
        if keeps[at] is not None and not near[at]:
            estimates[at] = ImportanceEstimate(np.zeros(len(prompt.tokens), np.float32))
    return compressor.select(prompts, keeps, estimates), estimates


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
