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

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from prefillcli.prefill.attention_paths import may_take
from prefillcli.runtime.compiled import load_compiled, share_openmp

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


# Attention of a chunk over its forest as one call of a compiled kernel, on CPUs with AVX512-BF16.
#
# `forest_attention.cpp` computes what the products do, but writes no scores to memory. A tile of keys is scored,
# raised to powers of two and multiplied with its values while it is in a core's cache. Tiles follow from the depths
# of keys, so a query's result has the same bits in every pack and chunk, with any number of threads. It needs a C++
# compiler at the first start. Without one, on other processors, or where it does not agree with explicit scores, it
# is not used.


LANES = 64  # queries of all heads of a K,V head in one block, as in the source
WIDEST = 256  # numbers of a head, as in the source
_SOURCE = ("prefillcli.prefill", "forest_attention.cpp")
_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma", "-ffp-contract=off")

BlockArray = npt.NDArray[np.int64]


class ForestKernel:
    """The compiled kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.prefill_forest_attention
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [*[pointer] * 6, number, pointer, pointer, number, *[ctypes.c_float] * 2, number]
        self._call.restype = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: BlockArray,
        runs: BlockArray,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attention of `query` [1, heads, tokens, width] over runs of `key` and `value` [1, kv heads, keys, width].

        `blocks` int64 [blocks, 5]: the first query and how many there are, its depth, and which of the runs it sees
        (first and end); at most `LANES` queries of all heads of a K,V head. `runs` int64 [runs, 3]: keys (start and
        end) and the depth of the first; those of a block go on where the one before ends. A query sees keys up to its
        own depth, and with a sliding `window` those of the last so many depths. Written are `out`
        [1, heads, tokens, width] and the natural log-sum-exp of the scaled scores `lse` float32 [1, heads, tokens].
        """
        sizes = np.array(
            [
                query.shape[1], key.shape[1], query.shape[3], value.shape[3], window or 0,
                *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], *out.stride()[1:3], lse.stride(1),
            ],
            np.int64,
        )  # fmt: skip
        tensors = (each.data_ptr() for each in (query, key, value, out, lse))
        arrays = (each.ctypes.data for each in (runs, sizes))
        threads = torch.get_num_threads()
        how = scale * math.log2(math.e), softcap or 0.0, query.dtype == torch.bfloat16
        self._call(*tensors, blocks.ctypes.data, len(blocks), *arrays, threads, *how)


def takes(query: Tensor, value: Tensor, kv_heads: int) -> bool:
    """Whether the kernel computes attention of these shapes and dtypes, where it is there."""
    if query.device.type != "cpu" or query.dtype not in (torch.bfloat16, torch.float32):
        return False
    widths = query.shape[3], value.shape[3]
    return (
        query.stride(3) == value.stride(3) == 1
        and query.shape[1] % kv_heads == 0
        and query.shape[1] // kv_heads <= LANES
        and max(widths) <= WIDEST
        and not any(width % 16 for width in widths)
    )


@cache
def compiled_kernel() -> ForestKernel | None:
    """The kernel, if this machine can compile and run it."""
    if not has_kernel_instructions() or not share_openmp("torch"):
        return None
    library = load_compiled(*_SOURCE, _FLAGS)
    return None if library is None else ForestKernel(library)


def forest_kernel() -> ForestKernel | None:
    """The kernel, if it is there and is not ruled out."""
    return compiled_kernel() if may_take("kernel", torch.device("cpu")) else None


def has_kernel_instructions() -> bool:
    """Whether the processor has what the kernel is compiled for."""
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not tell
    return all(able.get(name) for name in ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"))
