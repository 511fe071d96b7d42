"""A pack on its way through the layers: where they come from, which reads leave, and which tokens stay behind."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from prefillcli.plan.account import LayersDone
from prefillcli.plan.pack import Pack
from prefillcli.plan.trie import TrieNode, build_forest, token_order
from prefillcli.prefill.forest import ForestAttention, UnsupportedModelError, WatchedLayer
from prefillcli.prefill.layer_calls import LayerCall
from prefillcli.prefill.layout import Chunk, IntArray, Tree
from prefillcli.prefill.own_cache import OwnCacheLayer
from prefillcli.prefill.recurrent import LayerRecurrence


@dataclass(slots=True)
class WalkState:
    """A pack on its way through the layers.

    Reads that have left are not in it any more; what only they needed goes on until the rest is laid out anew.
    """

    whole: Pack  # as it was before the first layer
    pack: Pack  # what is left of it
    reads: Sequence[int]  # number of each of its reads in the whole pack, ascending
    nodes: Sequence[int]  # of each of its nodes
    done: LayersDone  # of the whole pack's nodes
    tree: Tree
    tokens: Tensor
    chunks: list[Chunk]
    calls: list[list[LayerCall]]  # of each chunk, of each layer
    hidden: Tensor  # the residual stream, [1, tokens, hidden]
    keep_ends: bool = False  # the states behind the reads are asked for
    recurrence: LayerRecurrence | OwnCacheLayer = field(init=False)  # of the layer that is computed

    @property
    def held_nodes(self) -> list[int]:
        """The nodes of what is left that later packs hold."""
        return [bisect_left(self.nodes, node) for node in self.whole.kept_nodes]

    @property
    def asked_nodes(self) -> list[int]:
        """The nodes of what is left whose last states are asked for."""
        return self.held_nodes + ([node for node, _ in self.pack.reads] if self.keep_ends else [])

    @property
    def last_tokens(self) -> IntArray:
        """The token that each read ends with."""
        return np.asarray([self.pack.offsets[node + 1] - 1 for node, _ in self.pack.reads], dtype=np.int64)


class Keeper(Protocol):
    """Keeps what layers leave behind, for what follows a walk."""

    def take(self, index: int, state: WalkState, attention: ForestAttention) -> None:
        """Take over what layer `index` leaves, which all chunks have passed and last tokens were read of."""


# Where the walk takes its layers from.


class LayerSource(Protocol):
    """A model's decoder layers. The walk uses one at a time, in ascending order, once for each pass over the model."""

    def __len__(self) -> int: ...

    def use(self, index: int) -> AbstractContextManager[nn.Module]:
        """Layer `index` with its weights on the walk's device. They are not needed any more once the context ends."""

    def end_pass(self) -> None:
        """No further layer is used in this pass; the next pass begins with the first. Also while one is in use."""


class ResidentLayers:
    """Layers whose weights are all on the device already."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def use(self, index: int) -> Iterator[nn.Module]:
        yield self._layers[index]

    def end_pass(self) -> None: ...


REGROUP_LAYERS = 0.05  # what laying out a token anew takes, in layers of a token, where it was not measured


# Reads that leave between two layers, with the tokens that no other read needs.


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


# Prompts that go on after a layer with some of their tokens, at the positions that these had.


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
