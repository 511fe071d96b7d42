"""What layers keep of nodes that later packs hold: their K,V, and the states of recurrent modules behind them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.pack import Held, Key, Pack
from prefillcli.prefill.layer_past import LayerPast, Path, moved

KeyValue = tuple[Tensor, Tensor]


class HeldPart(NamedTuple):
    """One layer's part of a node of `tokens` tokens."""

    tokens: int
    keys_values: KeyValue | None  # [1, kv heads, tokens, width] each; None of a layer without attention
    states: tuple[LinearAttentionLayer, ...] | tuple[LayerPast] = ()  # of each recurrent module, or the own cache's


class HeldParts:
    """The parts of every layer, by `Held.key`. They stay on `place`."""

    def __init__(self, layers: int, place: torch.device) -> None:
        self._layers: list[dict[Key, HeldPart]] = [{} for _ in range(layers)]
        self._place = place

    def clear(self) -> None:
        """Drop everything."""
        for parts in self._layers:
            parts.clear()

    def holds(self, key: Key) -> bool:
        """Whether every layer has its part of this node."""
        return all(key in parts for parts in self._layers)

    def drop_others(self, keep: Set[Key], layer: int | None = None) -> None:
        """Drop what is not to be kept, of one layer or of all."""
        for parts in self._layers if layer is None else [self._layers[layer]]:
            for key in parts.keys() - keep:
                del parts[key]

    def put(self, layer: int, key: Key, part: HeldPart) -> None:
        """Keep a copy of a layer's part of a node."""
        both = part.keys_values
        if both is not None:
            both = both[0].to(self._place, copy=True), both[1].to(self._place, copy=True)
        states = part.states
        if states and isinstance(states[0], LayerPast):
            states = (moved(states[0], self._place),)
        self._layers[layer][key] = part._replace(keys_values=both, states=states)

    def keys_values(self, layer: int, pack: Pack) -> list[KeyValue]:
        """A layer's K,V of the nodes that a pack holds; none of a layer without attention."""
        found = [(node, self._layers[layer][node.key].keys_values) for node in pack.held]
        return [_cut(both, node) for node, both in found if both is not None]

    def states(self, layer: int, pack: Pack) -> Mapping[int, tuple[LinearAttentionLayer, ...]]:
        """The states that a pack's roots begin behind in a layer, by root. Raises ValueError."""
        found = {}
        for root, above in enumerate(pack.attach):
            if not above:
                continue
            last = pack.held[above[-1]]
            part = self._layers[layer][last.key]
            if part.states:
                _refuse_cut(last, part)
                found[root] = part.states
        return found

    def paths(self, layer: int, pack: Pack) -> Mapping[int, Path]:
        """What the model's own cache keeps in a layer of the paths that a pack's roots begin behind, by root. Raises
        ValueError."""
        found = {}
        for root, above in enumerate(pack.attach):
            nodes = [pack.held[number] for number in above]
            parts = [self._layers[layer][node.key] for node in nodes]
            for node, part in zip(nodes, parts, strict=True):
                _refuse_cut(node, part)
            if parts:
                found[root] = tuple(part.states[0] for part in parts if isinstance(part.states[0], LayerPast))
        return found


def _refuse_cut(node: Held, part: HeldPart) -> None:
    if node.offset or node.length != part.tokens:
        raise ValueError("a node that is held has a state at its end alone")


def _cut(both: KeyValue, node: Held) -> KeyValue:
    part = slice(node.offset, node.offset + node.length)
    return both[0][:, :, part], both[1][:, :, part]
