"""Reads that leave between two layers, with the tokens that no other read needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from prefillcli.plan.pack import Pack
from prefillcli.prefill.layout import IntArray

ExitRule = Callable[[int, Sequence[int], Tensor], Sequence[int]]
"""Called after each layer but the last: the layer's number, the reads still on their way (numbers in `pack.reads`,
ascending), and the residual stream at their last tokens, [reads, hidden]. Returns those of the reads that go on,
ascending. One that is left out is decided: no further layer is computed for it, and it gets no logits."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a pack.

    `pack` counts its nodes anew and keeps nothing; `nodes` are the numbers that they had before, `tokens` int64 [n]
    those of its tokens, both ascending.
    """

    pack: Pack
    nodes: list[int]
    tokens: IntArray


def remainder(pack: Pack, reads: Sequence[int], kept_nodes: Sequence[int]) -> Remainder:
    """The nodes of `pack` on the paths of these `reads` (numbers in `pack.reads`) and of `kept_nodes`.

    Kept are the nodes whose K,V later packs hold: they go through every layer even if their reads have left.
    """
    needed: set[int] = set()
    for end in [*(pack.reads[read][0] for read in reads), *kept_nodes]:
        node = end
        while node >= 0 and node not in needed:
            needed.add(node)
            node = pack.parents[node]
    nodes = sorted(needed)
    number = {node: at for at, node in enumerate(nodes)} | {-1: -1}
    runs = [np.arange(pack.offsets[node], pack.offsets[node + 1], dtype=np.int64) for node in nodes]
    tokens: IntArray = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    left = Pack(
        index=pack.index,
        tokens=pack.tokens[tokens],
        positions=pack.positions[tokens],
        offsets=[0, *np.cumsum([len(run) for run in runs], dtype=np.int64).tolist()],
        starts=[pack.starts[node] for node in nodes],
        parents=[number[pack.parents[node]] for node in nodes],
        attach=[pack.attach[node] for node in nodes],
        reads=[(number[pack.reads[read][0]], pack.reads[read][1]) for read in reads],
        held=pack.held,
    )
    return Remainder(left, nodes, tokens)
