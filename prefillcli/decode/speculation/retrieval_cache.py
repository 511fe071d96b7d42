"""Which tokens of a prompt a retrieval cache keeps (TriForce, arXiv 2404.11912, section 4.1).

A layer's keys are cut into chunks. The newest token's query is scored against the mean key of each chunk, and the best
chunks stay. The queries that share a K,V head vote together. The first chunk and the latest tokens always stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

LATEST = 64  # tokens that always stay
LATEST_SHARE = 0.25  # of the budget, at most


def latest_chunks(budget: int, chunk: int) -> int:
    """How many of the latest chunks always stay, at least one."""
    return max(1, min(LATEST, int(budget * LATEST_SHARE)) // chunk)


def saves(tokens: int, budget: int, chunk: int) -> bool:
    """Whether something is left out of a prompt of so many tokens, and the budget holds what always stays."""
    return tokens > budget and budget // chunk > latest_chunks(budget, chunk) + 2


def chosen_tokens(keys: Tensor, query: Tensor, budget: int, chunk: int) -> Tensor:
    """The tokens that stay for each K,V head, int64 [kv heads, kept], ascending; at most `budget`.

    `keys` [kv heads, tokens, width] are a prompt's, more than the budget, and `query` [heads, width] the newest one's,
    both after position encoding.
    """
    heads, tokens, width = keys.shape
    chunks, rest = divmod(tokens, chunk)
    most = (budget - rest) // chunk
    always = min(latest_chunks(budget, chunk), most - 1)
    votes = query.view(heads, -1, width).sum(dim=1, dtype=torch.float32)
    scored = keys[:, chunk : (chunks - always) * chunk]
    means = scored.reshape(heads, -1, chunk, width).mean(dim=2, dtype=torch.float32)
    best = (means @ votes.unsqueeze(-1)).squeeze(-1).topk(most - 1 - always, dim=1).indices + 1
    first = torch.zeros(heads, 1, dtype=torch.long, device=keys.device)
    latest = torch.arange(chunks - always, chunks, device=keys.device).expand(heads, -1)
    kept = torch.cat([first, best.sort(dim=1).values, latest], dim=1)
    within = (kept.unsqueeze(-1) * chunk + torch.arange(chunk, device=keys.device)).flatten(1)
    behind = torch.arange(chunks * chunk, tokens, device=keys.device).expand(heads, -1)
    return torch.cat([within, behind], dim=1)


def gathered(states: Tensor, tokens: Tensor) -> Tensor:
    """These tokens [kv heads, kept] of K or V [kv heads, tokens, width]."""
    return states.gather(1, tokens.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
