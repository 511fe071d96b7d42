"""Attention in bfloat16 as matrix products, for CPUs that are much faster at those than at a flash kernel.

The scores of some queries and keys are one product, small enough to stay in a core's cache; then 2 to their power, and
a second product with the values. Two things make that exact enough in bfloat16 and cheap:

- Softmax does not change when a query's scores are all moved by the same number. Subtracting one vector from all keys
  of a layer (`Shift`) does that. A mean key leaves scores around 0, where bfloat16 is densest. The scale goes into the
  keys in the same step.
- A score is at most the length of its query times the longest key. Where that bound cannot overflow float32's
  exponents, which are bfloat16's too, no maximum is searched for and subtracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from prefillcli.prefill.attention_paths import may_take

ROWS = 512  # queries at a time, those of all heads of a K,V head together
SCORES = ROWS * 1024  # of a K,V head at a time
TOGETHER = 4 * SCORES  # of all sequences and heads at a time
LOG2_E = math.log2(math.e)
ROW_STEP, KEY_STEP = 16, 64  # rows and keys of a product are multiples of these
MOVED_KEYS = 4096  # at a time, in float32
SAFE = 80.0  # 2 to the power of it, summed over a million keys and weighed with values, is within float32
FEWEST_SCORES, FEWEST_KEYS = 8192, 32  # of all sequences, of one head: with fewer, the flash kernel is as fast


@dataclass(slots=True)
class Shift:
    """How keys of a layer are moved and scaled: `factor * key + offset`, the latter float32 [1, kv heads, 1, width].

    A query's product with a moved key is its score as a binary logarithm, less a number that is the same for all keys.
    All parts of a query's attention must be over keys with the same shift: log-sum-exps are of the moved scores.
    """

    factor: float
    offset: Tensor
    key: float = 0.0  # length of the longest moved key
    query: float = 0.0  # of the longest query

    @classmethod
    def of(cls, key: Tensor, scale: float) -> Shift:
        """The shift that brings the mean of these keys to 0. Scores are `scale` times a product."""
        factor = scale * LOG2_E
        return cls(factor, key.mean(dim=2, keepdim=True, dtype=torch.float32).mul_(-factor))

    def include(self, key: Tensor | None = None, query: Tensor | None = None) -> None:
        """Take note of keys and queries that attention will be called with."""
        for part in () if key is None else torch.split(key, MOVED_KEYS, dim=2):
            self.key = max(self.key, _longest(self.moved(part)))
        if query is not None:
            self.query = max(self.query, _longest(query))

    def moved(self, key: Tensor) -> Tensor:
        """A copy of the keys, rounded once: a bfloat16 addition would round the factor, too."""
        return torch.add(self.offset, key, alpha=self.factor).to(key.dtype)

    @property
    def safe(self) -> bool:
        """Whether no power of a moved score overflows."""
        return self.query * self.key <= SAFE

    def taken(self, query: Tensor) -> Tensor:
        """By how much moving the keys has lowered the queries' scores, float32 `[1, heads, tokens]`."""
        offset = self.offset.repeat_interleave(query.shape[1] // self.offset.shape[1], dim=1)
        return torch.matmul(query.float(), offset.transpose(2, 3)).squeeze(3).mul_(-math.log(2))


def fast_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products are what this device is fast at: bfloat16 on a CPU with instructions for it."""
    cpu = device.type == "cpu" and dtype == torch.bfloat16
    return cpu and has_bfloat16_instructions() and may_take("products", device)


@cache
def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies matrices of bfloat16 by itself."""
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not tell
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def products_pay(query: Tensor, key: Tensor) -> bool:
    """Whether this is faster than the flash kernel, for tensors that have a `Shift`."""
    keys = key.shape[0] * key.shape[2]
    return keys >= FEWEST_KEYS and keys * query.shape[2] >= FEWEST_SCORES


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, safe: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention over moved keys: the output and its log-sum-exp, shaped as in `attention.attend`.

    All tensors are of one dtype; bfloat16 is what it is made for. `causal` needs as many keys as queries. `safe`: no
    power of a score overflows.
    """
    batch, heads, queries = query.shape[:3]
    kv_heads, keys = key.shape[1:3]
    groups = heads // kv_heads
    query = query.view(batch, kv_heads, groups, queries, -1)
    out = torch.empty(batch, queries, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32)
    out_rows, lse_rows = (x.view(batch, kv_heads, groups, *x.shape[2:]) for x in (out, lse))
    rows = max(ROWS // groups, 1)
    sequences = max(TOGETHER // (heads * min(rows, queries) * min(keys, SCORES // ROWS)), 1)
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        for start in range(0, queries, rows):
            at = slice(start, min(start + rows, queries))
            seen = slice(0, at.stop if causal else keys)
            part = _rows(query[some, :, :, at], key[some, :, seen], value[some, :, seen], safe, causal)
            torch.div(part.values, part.total.unsqueeze(-1), out=out_rows[some, :, :, at])
            lse_rows[some, :, :, at] = part.lse
    return out, lse


class _Part(NamedTuple):
    """For queries `[sequences, heads, groups, tokens]`: weighted sum of values, total weight, log-sum-exp."""

    values: Tensor
    total: Tensor
    lse: Tensor


def _rows(query: Tensor, key: Tensor, value: Tensor, safe: bool, causal: bool) -> _Part:
    """For queries `[sequences, heads, groups, tokens, width]` and K,V `[sequences, heads, tokens, width]`.

    `causal`: the queries' tokens are the last of the keys'. Scores are binary logarithms. All shapes are rounded up,
    because the library keeps what it prepares for each shape of a product.
    """
    *shape, width = query.shape
    groups, tokens = shape[2:]
    rows = round_up(tokens, ROW_STEP)
    stacked = _padded(query, rows).reshape(-1, groups * rows, width)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    keys = key.shape[1]
    whole = keys - tokens if causal else keys  # of these every query sees all
    step = max(SCORES // (groups * rows), 1)
    parts = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    sums: tuple[Tensor, Tensor] | None = None
    top = torch.zeros((), dtype=query.dtype)
    for start, end in [*parts, (whole, keys)] if causal else parts:
        diagonal = start >= whole
        length = rows if diagonal else round_up(end - start, KEY_STEP)
        # Contiguous: else the product makes a transposed copy, which takes a fifth of its time.
        scores = torch.bmm(stacked, _padded(key[:, start:end], length).contiguous().transpose(1, 2))
        triangle = scores.view(len(stacked), groups, rows, -1) if diagonal else None
        if triangle is None:
            scores[..., end - start :].fill_(-math.inf)
        elif not safe:
            triangle.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
        if not safe:
            highest = scores.amax(dim=-1)
            if sums:
                highest = torch.maximum(top, highest)
                fade = torch.exp2((top - highest).float())
                sums = sums[0] * fade.unsqueeze(-1), sums[1] * fade
            top = highest
            scores.sub_(top.unsqueeze(-1))
        scores.exp2_()
        if triangle is not None:
            triangle.tril_()
        part = torch.bmm(scores, _padded(value[:, start:end], length)), scores.sum(dim=-1)
        sums = (sums[0].float().add_(part[0]), sums[1].float().add_(part[1])) if sums else part
    if sums is None:
        raise ValueError("no keys to attend over")
    values, total = sums
    lse = torch.log2(total.float()).add_(top).mul_(math.log(2))
    padded = (*shape[:3], rows)
    return _Part(*(x.view(*padded, *x.shape[2:])[:, :, :, :tokens] for x in (values, total, lse)))


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def _padded(states: Tensor, tokens: int) -> Tensor:
    """`[..., tokens, width]`, with zeros behind."""
    return functional.pad(states, (0, 0, 0, tokens - states.shape[-2])) if tokens > states.shape[-2] else states


def _longest(vectors: Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).max())
