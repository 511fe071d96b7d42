"""Reads that leave between two layers, with the tokens that no other read needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from prefillcli.plan.pack import Pack
from prefillcli.prefill.layout import IntArray

REGROUP_LAYERS = 0.05  # what laying out a token anew takes, in layers of a token, where it was not measured


class ExitRule(Protocol):
    """Which reads of a pack leave between two layers.

    `regroup_cost` is what laying out the rest of a pack anew takes for each of its tokens, in layers of a token; until
    it pays, tokens that nobody needs any more go on with the others. With 0 they never do.
    """

    @property
    def layers(self) -> Collection[int]:
        """The layers at which it is asked, counted from 0. The last one does not count: nothing is left to save."""

    @property
    def regroup_cost(self) -> float: ...

    def peeks(self, layer: int) -> bool:
        """Whether it is asked before the layer is computed for all tokens.

        Then the last tokens alone go through it first. Its K,V are computed twice for what goes on.
        """

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        """Which of the `reads` go on, ascending.

        `reads` are numbers in `pack.reads`, ascending, of those that are undecided; `before` and `after` the residual
        stream at their last tokens before and after the layer, [reads, hidden]. One that is left out is decided: it is
        not asked about again, and it gets no logits. A rule that returns all of them only looks on.
        """


def going_on(rule: ExitRule, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> list[int]:
    """What a rule says, in order. Raises ValueError if reads go on that have left."""
    going = sorted(rule(layer, reads, before, after))
    if not set(going) <= set(reads):
        raise ValueError("an exit rule lets reads go on that have left")
    return going


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a pack.

    `pack` counts its nodes anew and keeps nothing; `nodes` are the numbers that they had before, `tokens` int64 [n]
    those of its tokens. Both are ascending where tokens leave with the reads that needed them.
    """

    pack: Pack
    nodes: list[int]
    tokens: IntArray

    @property
    def in_order(self) -> bool:
        """Whether no token is behind the place that it had."""
        return bool((np.diff(self.tokens) > 0).all())


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
