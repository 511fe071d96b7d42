"""What PyTorch's varlen flash attention is documented to compute, in explicit scores on any device.

The alignment of masks, the +inf of empty rows and where sequences start and end are those of `mha_varlen_fwd` in
PyTorch's `flash_api.cpp`, of flash-attention's `block_info.h` (a sequence's keys start at `cu_seqlens_k[i]`, and there
are `seqused_k[i]` of them) and of its `mask.h`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from prefillcli.walk import cuda_kernels
from prefillcli.walk.cuda_kernels import SequenceTable


def flash_by_definition(
    query: Tensor, key: Tensor, value: Tensor, table: SequenceTable, scale: float
) -> tuple[Tensor, Tensor]:
    """`varlen.flash_sequences` in float32, one sequence after the other."""
    check_arguments(query, key, value, table)
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    groups = query.shape[1] // key.shape[1]
    out = torch.full_like(query, math.nan)
    lse = torch.full((query.shape[1], len(query)), math.nan)
    edges, starts, lengths = (x.tolist() for x in (table.queries, table.keys, table.lengths))
    left, right = (math.inf if side < 0 else side for side in table.sides)
    for first, end, start, length in zip(edges[:-1], edges[1:], starts[:-1], lengths, strict=True):
        queries = end - first
        at = torch.arange(queries)[:, None] + length - queries
        keys = torch.arange(length)[None, :]
        hidden = (keys < at - left) | (keys > at + right)
        seen = slice(start, start + length)
        k, v = (x[seen].transpose(0, 1).repeat_interleave(groups, dim=0) for x in (key, value))
        scores = (query[first:end].transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
        found = torch.logsumexp(scores, dim=-1)
        lse[:, first:end] = torch.where(found == -math.inf, math.inf, found)
        out[first:end] = (torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v).transpose(0, 1)
    return out.to(dtype), lse


def check_arguments(query: Tensor, key: Tensor, value: Tensor, table: SequenceTable) -> None:
    """What the operator checks, and what it takes on trust."""
    count = len(table.lengths)
    assert query.dim() == key.dim() == 3
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2]
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert len(table.queries) == len(table.keys) == count + 1
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (table.queries, table.keys, table.lengths))
    edges = table.queries.diff()
    assert table.queries[0] == 0
    assert table.queries[-1] == len(query) == table.end - table.first
    assert 0 < edges.min() <= edges.max() == table.most_queries
    assert table.lengths.min() >= 0
    assert table.lengths.max() <= table.most_keys
    assert (table.keys[:-1] + table.lengths <= len(key)).all()
    assert bool((table.lengths == 0).any()) <= table.gaps


class Calls:
    """Stands for the operator, and counts its calls."""

    def __init__(self) -> None:
        self.tables: list[SequenceTable] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, table: SequenceTable, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.tables.append(table)
        return flash_by_definition(query, key, value, table, scale)


def by_sequences(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Send attention on the CPU the way that it goes on CUDA, in any dtype and width of heads."""
    calls = Calls()
    monkeypatch.setattr(cuda_kernels, "flash_sequences", calls)
    monkeypatch.setattr(cuda_kernels, "fits_flash", lambda query, value: True)
    return calls
