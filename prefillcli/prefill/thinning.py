"""Prompts that go on after a layer with some of their tokens, at the positions that these had."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from prefillcli.plan.pack import Pack
from prefillcli.plan.trie import TrieNode, build_forest, token_order
from prefillcli.prefill.forest import ForestAttention, UnsupportedModelError, WatchedLayer
from prefillcli.prefill.layout import IntArray, Tree
from prefillcli.prefill.leaving import Remainder
from prefillcli.prefill.walk_state import WalkState


class Thinned(NamedTuple):
    """What goes on of a read: the numbers of its `tokens` in the pack, ascending, its last token among them.

    `reason` says why a prompt that was to be thinned goes on whole; None if it was not, or if it is thinner now.
    """

    tokens: IntArray
    reason: str | None = None


class ThinningRule(Protocol):
    """Chooses after a layer which tokens go on. A pack that it is used on holds nothing of other packs.

    It goes by the prompts that a pack reads, and can be pickled.
    """

    @property
    def layer(self) -> int:
        """After this layer, by its number, or the next that attends, tokens are left behind. It is not the last."""

    def of(self, prompts: Collection[int]) -> ThinningRule:
        """What of it concerns these prompts. The others go on whole."""

    def watched(self, pack: Pack, tree: Tree) -> Sequence[int]:
        """The tokens whose queries it wants to see in that layer, ascending numbers in the pack.

        A pack of which it wants to see none goes on whole.
        """

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> Sequence[Thinned]:
        """What goes on of each read of the pack. `layer` has all keys, and the queries of the `watched` tokens."""


def watch_for(rule: ThinningRule, layer: int, layers: int, state: WalkState, attention: ForestAttention) -> None:
    """Let the attention keep the queries that the rule wants to see in `layer`, which is next, of so many `layers`.

    Layers without attention have none, so the rule sees those of the first layer from its own on that attends. Raises
    UnsupportedModelError if only the last layer is left.
    """
    watched = rule.watched(state.pack, state.tree) if layer >= rule.layer else ()
    if len(watched) and layer == layers - 1:
        raise UnsupportedModelError("no layer attends between the one that is to choose tokens and the last")
    attention.watch(watched)


def thin_pack(pack: Pack, kept: Sequence[IntArray]) -> Remainder:
    """The forest of what goes on of each read of `pack`; reads share what they keep of a prefix up to the first token
    that one of them lacks. Behind it a token is there once for each of them. A node has the number of the one before
    in which it ends.

    Raises ValueError if a read loses its last token, or if the pack holds something of other packs, or for them.
    """
    if pack.held or pack.keep:
        raise ValueError("a pack that is thinned holds nothing of other packs and nothing for them")
    ends = [pack.offsets[node + 1] - 1 for node, _ in pack.reads]
    if any(not len(own) or own[-1] != end for own, end in zip(kept, ends, strict=True)):
        raise ValueError("a read goes on with its last token")
    reads_of_node: dict[int, list[int]] = {}
    runs: list[IntArray] = []
    starts: list[int] = []
    parents: list[int] = []
    stack: list[tuple[TrieNode, int]] = [(root, -1) for root in reversed(build_forest(kept, token_order(kept)))]
    while stack:
        node, parent = stack.pop()
        number = len(runs)
        runs.append(kept[node.prompt][node.start : node.end])
        starts.append(node.start)
        parents.append(parent)
        reads_of_node[number] = node.ending
        stack.extend((child, number) for child in reversed(node.children))
    end_of = {read: node for node, reads in reads_of_node.items() for read in reads}
    tokens: IntArray = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    thin = Pack(
        index=pack.index,
        tokens=pack.tokens[tokens],
        positions=pack.positions[tokens],
        offsets=[0, *np.cumsum([len(run) for run in runs], dtype=np.int64).tolist()],
        starts=starts,
        parents=parents,
        attach=[()] * len(runs),
        reads=[(end_of[read], prompts) for read, (_, prompts) in enumerate(pack.reads)],
    )
    nodes = [bisect_right(pack.offsets, int(run[-1])) - 1 for run in runs]
    return Remainder(thin, nodes, tokens)
