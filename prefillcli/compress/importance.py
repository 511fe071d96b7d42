"""Importance: how much the draft's queries attend to each token of a prompt.

For each layer, head and query: softmax in float32 of the query's scores over the prompt's keys, smoothed by average
pooling over tokens. Then the maximum over layers and heads is taken (SpecPrefill, section 3.2; pooling and its order
as in the authors' code), and the queries are combined: by the best rank that any of them gives, by their mean as in
the paper, or by their maximum. Layers whose window does not span the whole prompt have no vote, and neither have
layers without attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from prefillcli.compress.base import Float32Array
from prefillcli.compress.overlap import Overlap
from prefillcli.compress.settings import Reduce
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.key_window import oldest_key

SCORE_BYTES = 64 << 20  # float32 scores at a time


@dataclass(slots=True)
class PromptQueries:
    """A prompt and the queries that vote on its tokens.

    `path` says where its keys lie, as (start, end) runs. Query i is row `queries[i]` of a watched layer. It sees the
    first `sees[i]` of the keys; a window counts from its depth `depths[i]`.
    """

    path: list[tuple[int, int]]
    queries: list[int]
    sees: list[int]
    depths: list[int]
    votes: Tensor | None = field(default=None, init=False)  # float32 [queries, tokens], the largest so far
    voters: list[int] = field(default_factory=list, init=False)  # numbers of the layers that have voted

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.path)


def last_tokens(path: list[tuple[int, int]], count: int) -> list[int]:
    """The last `count` tokens of a path, or all."""
    tokens: list[int] = []
    for start, end in reversed(path):
        tokens = list(range(max(start, end - (count - len(tokens))), end)) + tokens
        if len(tokens) == count:
            break
    return tokens


def last_queries(path: list[tuple[int, int]], queries: list[int]) -> PromptQueries:
    """The queries of the prompt's own last tokens, in the rows `queries`: each sees the tokens up to itself."""
    tokens = sum(end - start for start, end in path)
    depths = list(range(tokens - len(queries), tokens))
    return PromptQueries(path, queries, [depth + 1 for depth in depths], depths)


def add_votes(layer: WatchedLayer, prompts: Sequence[PromptQueries], pool: int) -> None:
    """Let a layer vote on the tokens of every prompt. `pool` is the width of the pooling, an odd number; 1: none."""
    window = layer.scoring.window
    for prompt in prompts:
        if oldest_key(window, max(prompt.depths)) <= 0:
            _vote(layer, prompt, pool)
            prompt.voters.append(layer.number)


def _vote(layer: WatchedLayer, prompt: PromptQueries, pool: int) -> None:
    keys, scoring, tokens = layer.keys, layer.scoring, prompt.tokens
    kv_heads, width = keys.shape[0], keys.shape[2]
    queries = layer.queries[:, torch.as_tensor(prompt.queries, device=keys.device)]
    grouped = queries.float().reshape(kv_heads, -1, width)  # the query heads of a K,V head are neighbours
    hidden = None
    if min(prompt.sees) < tokens:
        sees = torch.as_tensor(prompt.sees, device=keys.device).repeat(queries.shape[0] // kv_heads)
        hidden = torch.arange(tokens, device=keys.device)[None, :] >= sees[:, None]
    at_once = max(1, SCORE_BYTES // (4 * grouped.shape[1] * tokens))
    for head in range(0, kv_heads, at_once):
        heads = slice(head, head + at_once)
        parts = [grouped[heads] @ keys[heads, start:end].float().transpose(1, 2) for start, end in prompt.path]
        scores = torch.cat(parts, dim=-1).mul_(scoring.scale)
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        shares = torch.softmax(scores, dim=-1)
        if pool > 1:
            shares = _average(shares, pool)
        votes = shares.view(-1, len(prompt.queries), tokens).amax(dim=0)
        prompt.votes = votes if prompt.votes is None else torch.maximum(prompt.votes, votes)


def _average(shares: Tensor, width: int) -> Tensor:
    """Mean over the `width` neighbours of each number in the last dimension, zeros beyond its ends.

    Like torch's avg_pool1d with padding, but from sums of 1, 2, 4, ... neighbours: several times faster on the CPU.
    """
    tokens = shares.shape[-1]
    run = F.pad(shares, (width // 2, width // 2))
    total = torch.zeros_like(shares)
    size, start = 1, 0
    while size <= width:
        if width & size:
            total += run[..., start : start + tokens]
            start += size
        if 2 * size <= width:
            run = run[..., :-size] + run[..., size:]
        size *= 2
    return total.div_(width)


def importance(
    prompt: PromptQueries, reduce: Reduce, chunk: int, overlap: Overlap | None = None
) -> Float32Array | None:
    """The importance of each token, float32 [tokens]; None where no layer had a vote.

    With an `overlap` it is that of another tokenizer's tokens, and chunks are of those.

    `rank`: every query ranks the chunks of `chunk` tokens by their mean votes, and a token's importance is 1 over the
    best rank that any query gives its chunk. A query that attends a little to many tokens then counts as much as one
    that attends to a single token. `mean` and `max` combine the votes themselves. Votes that are not finite stay so.
    """
    votes = prompt.votes
    if votes is None:
        return None
    if overlap is not None:
        votes = overlap.spread(votes)
    if reduce == "rank" and bool(votes.isfinite().all()):
        means = torch.stack([part.mean(dim=1) for part in torch.split(votes, chunk, dim=1)], dim=1)
        order = means.argsort(dim=1, descending=True, stable=True)
        ascending = torch.arange(1, order.shape[1] + 1, device=order.device)
        places = torch.empty_like(order).scatter_(1, order, ascending.expand_as(order))
        reduced = (1.0 / places.amin(dim=0)).repeat_interleave(chunk)[: votes.shape[1]]
    else:
        reduced = votes.amax(dim=0) if reduce == "max" else votes.mean(dim=0)
    found: Float32Array = reduced.float().cpu().numpy()
    return found
