"""Attention in bfloat16 as matrix products, for CPUs that are much faster at those than at a flash kernel.

The scores of some queries and keys are one product, small enough to stay in a core's cache; then 2 to their power, and
a second product with the values. Two things make that exact enough in bfloat16 and cheap:

- Softmax does not change when a query's scores are all moved by the same number. Subtracting the mean key from all
  keys does that, and leaves scores around 0, where bfloat16 is densest; the log-sum-exp is moved back in float32.
- A score is at most the length of its query times the longest key. Where that bound cannot overflow float32's
  exponents, which are bfloat16's too, no maximum is looked for and subtracted.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

ROWS = 512  # queries at a time, those of all heads of a K,V head together
SCORES = ROWS * 1024  # of a K,V head at a time
SAFE = 80.0  # 2 to the power of it, summed over a million keys and weighed with values, is within float32
FEWEST = {False: (32, 256), True: (128, 128)}  # queries and keys, causal or not: with fewer, flash is as fast


def products_pay(query: Tensor, key: Tensor, *, causal: bool) -> bool:
    """Whether this is faster than the flash kernel on this CPU."""
    queries, keys = FEWEST[causal]
    enough = query.shape[2] >= queries and key.shape[2] >= keys and query.shape[0] == 1
    return enough and query.dtype == torch.bfloat16 and _fast_products()


@cache
def _fast_products() -> bool:
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not tell
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention: the output and its log-sum-exp, shaped as in `attention.attend`.

    Copies the keys. All tensors are of one dtype; bfloat16 is what it is made for. `causal` needs as many keys as
    queries.
    """
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.view(batch, kv_heads, groups, queries, -1).flatten(0, 1)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    centre = key.mean(dim=1, keepdim=True, dtype=torch.float32)
    key = (key - centre).mul_(scale * math.log2(math.e)).to(key.dtype)
    safe = _longest(query) * _longest(key) <= SAFE
    out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    lse = torch.empty(query.shape[:-1], dtype=torch.float32)
    step = max(ROWS // groups, 1)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = slice(0, rows.stop if causal else key.shape[1])
        out[:, :, rows], lse[:, :, rows] = _rows(query[:, :, rows], key[:, seen], value[:, seen], safe, causal)
    lse += torch.matmul(query.float(), centre.transpose(1, 2).unsqueeze(1)).squeeze(3).mul_(scale)
    return out.view(batch, heads, queries, -1), lse.view(batch, heads, queries)


def _rows(query: Tensor, key: Tensor, value: Tensor, safe: bool, causal: bool) -> tuple[Tensor, Tensor]:
    """For queries `[heads, groups, tokens, width]` and K,V `[heads, tokens, width]`.

    `causal`: the queries' tokens are the last of the keys'. Scores are binary logarithms, the log-sum-exp is natural.
    """
    heads, groups, tokens, _ = query.shape
    stacked = query.flatten(1, 2)
    out = torch.zeros(heads, groups * tokens, value.shape[-1])
    total = torch.zeros(heads, groups * tokens)
    top = torch.zeros_like(total, dtype=query.dtype) if safe else torch.full_like(total, -math.inf, dtype=query.dtype)
    keys = key.shape[1]
    whole = keys - tokens if causal else keys  # of these every query sees all
    step = max(SCORES // (groups * tokens), 1)
    parts = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    for start, end in [*parts, (whole, keys)] if causal else parts:
        scores = torch.bmm(stacked, key[:, start:end].transpose(1, 2))
        triangle = scores.view(heads, groups, tokens, -1) if start >= whole else None
        if not safe:
            if triangle is not None:
                triangle.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
            higher = torch.maximum(top, scores.amax(dim=-1))
            fade = torch.exp2((top - higher).float())
            out.mul_(fade.unsqueeze(-1))
            total.mul_(fade)
            scores.sub_(higher.unsqueeze(-1))
            top = higher
        scores.exp2_()
        if triangle is not None:
            triangle.tril_()
        total.add_(scores.sum(dim=-1))
        out.add_(torch.bmm(scores, value[:, start:end]))
    out.div_(total.unsqueeze(-1))
    lse = torch.log2(total).add_(top).mul_(math.log(2))
    return out.to(query.dtype).view(*query.shape[:-1], -1), lse.view(query.shape[:-1])


def _longest(vectors: Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).max())
