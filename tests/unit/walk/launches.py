"""Operators that attention calls on CUDA a layer, and those for which the host waits. Tensors are fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workloads import prompts_with_histories, short_rows
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.walk.attention import longest_batched
from prefillcli.walk.forest import ForestAttention
from prefillcli.walk.layout import Chunk, LastTokens, Tree, split_evenly
from tests.unit.walk.fake_cuda import DEVICE, OperatorCounts, fake_cuda

CHUNK = 8192
HEADS, KV_HEADS, WIDTH = 32, 8, 128  # an 8B model's
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class LaunchCase:
    """Prompts in one pack, and how a layer attends."""

    prompts: Callable[[], list[TokenArray]]
    window: int | None = None
    softcap: float | None = None


def _short() -> list[TokenArray]:
    return short_rows(400, 20, 160, VOCABULARY)


LAUNCH_CASES: dict[str, LaunchCase] = {
    "400 short rows": LaunchCase(_short),
    "400 short rows, window of 128": LaunchCase(_short, window=128),
    "400 short rows, soft cap": LaunchCase(_short, softcap=50.0),
    "2 users x 40 posts": LaunchCase(lambda: prompts_with_histories(2, 40, 4_000, 150, VOCABULARY)),
}


def layer_counts(case: LaunchCase, *, reads: bool = False, dtype: torch.dtype = torch.bfloat16) -> OperatorCounts:
    """What attention of one layer calls for all chunks of a pack, or for the `reads` of its last layer.

    The layer is not the first, which also copies the tables to the device.
    """
    (pack,) = make_plan(case.prompts(), Limits(10**7, 10**7)).packs
    tree, total = Tree(pack), len(pack.tokens)
    batched = longest_batched(DEVICE, dtype)
    with fake_cuda() as counts:
        chunks = [Chunk(tree, start, end, DEVICE, batched) for start, end in split_evenly(total, CHUNK)]
        last = LastTokens(tree, np.array(sorted(pack.offsets[node + 1] - 1 for node, _ in pack.reads)), DEVICE)
        with ForestAttention(pack.held_tokens + total) as attention:
            for _ in range(2):
                counts.launches.clear()
                counts.waits.clear()
                attention.start_layer(())
                for chunk in chunks:
                    attention.chunk(chunk)
                    _call(attention, chunk.end - chunk.start, case, dtype)
                if reads:
                    counts.launches.clear()
                    counts.waits.clear()
                    attention.last_tokens(last)
                    _call(attention, len(last.nodes), case, dtype)
    return counts


def _call(attention: ForestAttention, tokens: int, case: LaunchCase, dtype: torch.dtype) -> None:
    def projected(heads: int) -> Tensor:
        return torch.empty(1, tokens, heads, WIDTH, dtype=dtype, device=DEVICE).transpose(1, 2)

    query, key, value = (projected(heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    how: dict[str, Any] = {"scaling": WIDTH**-0.5, "sliding_window": case.window, "softcap": case.softcap}
    attention(nn.Module(), query, key, value, None, **how)
