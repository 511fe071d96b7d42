"""Which tokens of a prompt the draft's queries look at.

Per layer and head: softmax in float32 of a query's scores over the prompt's keys, smoothed by average pooling over
tokens. Then the maximum over layers and heads (SpecPrefill, section 3.2; pooling and its order as in the authors'
code), and over the queries the best rank that any of them gives, or as in the paper their mean, or their maximum.
Layers whose sliding window does not reach over the whole prompt have no vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from prefillcli.compress.base import FloatArray
from prefillcli.compress.settings import Reduce
from prefillcli.prefill.forest import WatchedLayer

SCORE_BYTES = 64 << 20  # float32 scores at a time


@dataclass(slots=True)
class PromptQueries:
    """A prompt and the queries that vote on its tokens.

    `path` is where its keys lie, as (start, end) runs. Query i is row `queries[i]` of a watched layer's. It sees the
    first `sees[i]` of the keys and stands at depth `depths[i]`, which tells what a sliding window lets it see.
    """

    path: list[tuple[int, int]]
    queries: list[int]
    sees: list[int]
    depths: list[int]
    votes: Tensor | None = field(default=None, init=False)  # float32 [queries, tokens], largest so far

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.path)


def add_votes(layer: WatchedLayer, prompts: Sequence[PromptQueries], pool: int) -> None:
    """Let a layer vote on every prompt's tokens. `pool` is the odd width of the pooling; 1 is none."""
    window = layer.scoring.window
    for asked in prompts:
        if window is None or window > max(asked.depths):
            _vote(layer, asked, pool)


def _vote(layer: WatchedLayer, asked: PromptQueries, pool: int) -> None:
    keys, scoring, tokens = layer.keys, layer.scoring, asked.tokens
    kv_heads, width = keys.shape[0], keys.shape[2]
    queries = layer.queries[:, torch.as_tensor(asked.queries, device=keys.device)]
    grouped = queries.float().reshape(kv_heads, -1, width)  # the query heads of a K,V head follow one another
    hidden = None
    if min(asked.sees) < tokens:
        sees = torch.as_tensor(asked.sees, device=keys.device).repeat(queries.shape[0] // kv_heads)
        hidden = torch.arange(tokens, device=keys.device)[None, :] >= sees[:, None]
    at_once = max(1, SCORE_BYTES // (4 * grouped.shape[1] * tokens))
    for head in range(0, kv_heads, at_once):
        heads = slice(head, head + at_once)
        parts = [grouped[heads] @ keys[heads, start:end].float().transpose(1, 2) for start, end in asked.path]
        scores = torch.cat(parts, dim=-1).mul_(scoring.scale)
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        shares = torch.softmax(scores, dim=-1)
        if pool > 1:
            shares = _average(shares, pool)
        votes = shares.view(-1, len(asked.queries), tokens).amax(dim=0)
        asked.votes = votes if asked.votes is None else torch.maximum(asked.votes, votes)


def _average(shares: Tensor, width: int) -> Tensor:
    """Mean over the `width` neighbours of each number in the last dimension, zeros beyond its ends.

    As torch's avg_pool1d with padding, from sums of 1, 2, 4, ... neighbours: several times faster on the CPU.
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


def importance(asked: PromptQueries, reduce: Reduce, chunk: int) -> FloatArray | None:
    """Importance of each token, float32 [tokens]; None where no layer had a vote.

    `rank`: every query puts the chunks of `chunk` tokens in order by their mean votes, and a token's importance is 1
    over the best place that any query gives its chunk. A query that looks a little at much then counts as much as one
    that looks at one token alone. `mean` and `max` are of the votes themselves. What is not finite stays so.
    """
    votes = asked.votes
    if votes is None:
        return None
    if reduce == "rank" and bool(votes.isfinite().all()):
        means = torch.stack([part.mean(dim=1) for part in torch.split(votes, chunk, dim=1)], dim=1)
        order = means.argsort(dim=1, descending=True, stable=True)
        ascending = torch.arange(1, order.shape[1] + 1, device=order.device)
        places = torch.empty_like(order).scatter_(1, order, ascending.expand_as(order))
        reduced = (1.0 / places.amin(dim=0)).repeat_interleave(chunk)[: asked.tokens]
    else:
        reduced = votes.amax(dim=0) if reduce == "max" else votes.mean(dim=0)
    found: FloatArray = reduced.float().cpu().numpy()
    return found
