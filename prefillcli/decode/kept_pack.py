"""K,V of all layers, and the states behind the reads, of a pack that is written on after it was scored.

While a pack is walked each layer hands over what is needed of it. Once the scores say which reads are wanted, `select`
gives what lies on their paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.held_parts import KeyValue
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.own_cache import OwnCacheLayer
from prefillcli.prefill.walk_state import WalkState

States = tuple[LinearAttentionLayer, ...]
Run = tuple[int, int, int]
"""Tokens `start:end` of a buffer, and the number of tokens before the first on its path."""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer's part of some rows: K,V [1, kv heads, tokens, width] each, None where it does not attend; and for each
    row the states of its recurrent modules behind the row's prompt."""

    keys_values: KeyValue | None
    states: list[States]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What is kept of the prompts of some rows, one for each wanted read, in the order in which they were asked for.

    `paths` are the runs of the layers' buffers that a row sees, root first. A row's prompt has `lengths` tokens; the
    last one stands at the position of that number in `positions`.
    """

    paths: list[list[Run]]
    lengths: list[int]
    positions: list[int]
    layers: list[KeptLayer]


@dataclass(frozen=True, slots=True)
class _TakenLayer:
    """A layer as it was walked: its K,V buffer, where each node of the whole pack begins in it, and the states."""

    keys_values: KeyValue | None
    starts: dict[int, int]
    states: dict[int, States]  # behind the reads' nodes


class KeptPack:
    """What the layers of a walk leave of `pack`. `layers` is how many the model has."""

    def __init__(self, pack: Pack, layers: int) -> None:
        self._pack = pack
        self._tree = Tree(pack)
        self._count = layers
        self._layers: list[_TakenLayer] = []

    def take(self, index: int, state: WalkState, attention: ForestAttention) -> None:
        """Take over layer `index`, which all chunks have passed. The attention gets new room for the next one."""
        starts = {node: state.tree.held + at for node, at in zip(state.nodes, state.tree.offsets, strict=False)}
        states: dict[int, States] = {}
        if not isinstance(state.recurrence, OwnCacheLayer) and state.recurrence:
            states = {state.nodes[node]: state.recurrence.end_of(node) for node, _ in state.pack.reads}
        both = attention.take_keys_values() if attention.attended else None
        self._layers.append(_TakenLayer(both, starts, states))

    def has(self, read: int) -> bool:
        """Whether all layers have passed what this read of the pack sees."""
        if len(self._layers) < self._count:
            return False
        end, last = self._pack.reads[read][0], self._layers[-1]
        stateful = all(end in layer.states for layer in self._layers if layer.states)
        return stateful and all(node in last.starts for node in self._path(end))

    def end_of(self, read: int) -> int:
        """The node that a read ends. In the order of these numbers, reads that share most stand side by side."""
        return self._pack.reads[read][0]

    def parts_of(self, read: int) -> dict[int, int]:
        """The parts of what a read sees, by a number that other reads know them by too, with their tokens."""
        path = self._path(self.end_of(read))
        lengths = {node: self._pack.offsets[node + 1] - self._pack.offsets[node] for node in path}
        held = self._pack.attach[path[0]]
        return {-1 - number: self._pack.held[number].length for number in held} | lengths

    def select(self, reads: Sequence[int]) -> KeptRows:
        """What lies on the paths of these reads, which `has` has: numbers in `pack.reads`, some may come twice."""
        ends = [self._pack.reads[read][0] for read in reads]
        nodes = sorted({node for end in ends for node in self._path(end)})
        held = sorted({run for node in nodes if self._pack.parents[node] < 0 for run in self._tree.attach[node]})
        lengths = {node: self._pack.offsets[node + 1] - self._pack.offsets[node] for node in nodes}
        sizes = [run[1] - run[0] for run in held] + [lengths[node] for node in nodes]
        begins = np.cumsum([0, *sizes]).tolist()
        places: dict[int | Run, int] = dict(zip([*held, *nodes], begins, strict=False))
        paths = []
        for end in ends:
            path = self._path(end)
            runs = [(places[run], places[run] + run[1] - run[0], run[2]) for run in self._tree.attach[path[0]]]
            runs += [(places[node], places[node] + lengths[node], self._pack.starts[node]) for node in path]
            paths.append([run for run in runs if run[0] < run[1]])
        layers = []
        for layer in self._layers:
            sources = [(run[0], run[1]) for run in held]
            sources += [(layer.starts[node], layer.starts[node] + lengths[node]) for node in nodes]
            states = [layer.states[end] for end in ends] if layer.states else [() for _ in ends]
            layers.append(KeptLayer(_picked(layer.keys_values, sources), states))
        last = [self._pack.offsets[end + 1] - 1 for end in ends]
        depths, positions = self._tree.depths[last], self._tree.positions[last]
        return KeptRows(paths, (depths + 1).tolist(), positions.tolist(), layers)

    def release(self) -> None:
        """Let go of everything."""
        self._layers.clear()

    def _path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        path = [node]
        while (parent := self._pack.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]


def _picked(both: KeyValue | None, runs: list[tuple[int, int]]) -> KeyValue | None:
    """Some runs of a layer's tokens, one behind the other; the buffers themselves where that is all of them."""
    if both is None:
        return None
    joined: list[tuple[int, int]] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))

    def pick(whole: Tensor) -> Tensor:
        if joined == [(0, whole.shape[2])]:
            return whole
        return torch.cat([whole[:, :, start:end] for start, end in joined], dim=2)

    return pick(both[0]), pick(both[1])
