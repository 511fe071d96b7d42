"""Packs: the forest cut into pieces that the engine walks one after the other.

A pack is a forest in depth-first order, flat: its nodes' tokens stand one after the other, children behind their
parent. Prompts of later packs that begin with the same nodes take their K,V from a cache of bounded size, or compute
them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefillcli.plan.queue import Queue
from prefillcli.plan.trie import TokenArray, TrieNode

HELD_PACKS = 16
"""Packs after which nothing is held and shared prefixes are computed again: what a resumed run may have to repeat."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits one pack.

    `tokens` is the size aimed at; `max_tokens` what the memory budget allows at all, where a held token costs
    `held_cost` computed ones (it keeps every layer's K,V). `held_tokens` is the size of the prefix cache: tokens whose
    K,V may be kept between packs; 0 means that prefixes are computed again. `read_tokens` bounds the tokens that a
    pack's prompts see, each prompt counted whole; a prompt that has more gets a pack of its own.
    """

    tokens: int
    max_tokens: int
    held_tokens: int = 0
    held_cost: float = 0.0
    read_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A node whose K,V come from an earlier pack: `length` tokens, with `start` tokens before them on their path.

    `key` names the pack that computed it and its number there.
    """

    key: tuple[int, int]
    start: int
    length: int


@dataclass(slots=True)
class Pack:
    """One pass over the model. Nodes are in depth-first order; all arrays have one entry a node.

    `tokens` int32 [n] are the tokens to compute, node after node: node i is `tokens[offsets[i]:offsets[i + 1]]`, with
    `starts[i]` tokens before it on its path; `positions` int32 [n] are their positions in the whole prompt.
    `parents[i]` is a node's number, or -1 for a root, which sees the held nodes `attach[i]`, root first.
    `reads[k] = (node, prompts)`: at the end of this node these prompts are answered; in the order of the schedule.
    """

    index: int
    tokens: TokenArray
    positions: TokenArray
    offsets: list[int]
    starts: list[int]
    parents: list[int]
    attach: list[tuple[int, ...]]
    reads: list[tuple[int, tuple[int, ...]]]
    held: tuple[Held, ...] = ()
    keep: frozenset[tuple[int, int]] = frozenset()
    """Keys of the nodes, held or its own, whose K,V later packs hold."""

    @property
    def prompts(self) -> list[int]:
        """The prompts answered here."""
        return [prompt for _, prompts in self.reads for prompt in prompts]

    @property
    def held_tokens(self) -> int:
        """Tokens whose K,V come from earlier packs."""
        return sum(node.length for node in self.held)

    @property
    def needs(self) -> set[int]:
        """The packs that computed what is held."""
        return {node.key[0] for node in self.held}


def cut_packs(
    queue: Queue, prompts: Sequence[TokenArray], limits: Limits, positions: Sequence[TokenArray | None]
) -> list[Pack]:
    """Fill packs with the prompts of the queue as they come. `positions` as in `make_plan`.

    Every prompt is answered in exactly one pack. A prompt longer than `limits.tokens` gets a pack of its own; the
    caller keeps out prompts longer than `limits.max_tokens`. Between packs the prefix cache keeps nodes that waiting
    prompts begin with, those used last before others.
    """
    return _Cutter(queue, prompts, limits, positions).cut()


class _OpenPack:
    """A pack being filled."""

    def __init__(self, held: Sequence[TrieNode] = ()) -> None:
        self.held = {id(node): node for node in held}
        self.held_tokens = sum(node.length for node in held)
        self.added: dict[int, TrieNode] = {}
        self.ends: list[TrieNode] = []
        self.tokens = 0
        self.read_tokens = 0

    def missing(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        """The nodes of a path to compute: its end in any case, since K,V alone give no answer."""
        *above, end = path
        nodes = [node for node in above if id(node) not in self.added and id(node) not in self.held]
        return nodes if id(end) in self.added else [*nodes, end]

    def add(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        """Take a prompt in; returns the nodes that are computed for it."""
        new = self.missing(path)
        self.added.update((id(node), node) for node in new)
        self.ends.append(path[-1])
        self.tokens += sum(node.length for node in new)
        self.read_tokens += path[-1].end
        return new


class _Cutter:
    def __init__(
        self,
        queue: Queue,
        prompts: Sequence[TokenArray],
        limits: Limits,
        positions: Sequence[TokenArray | None],
    ) -> None:
        self._queue = queue
        self._prompts = prompts
        self._limits = limits
        self._positions = positions
        self._packs: list[Pack] = []
        self._open = _OpenPack()
        self._used: dict[int, int] = {}  # id(node) -> when a prompt used it last, counted in prompts
        self._keys: dict[int, tuple[int, int]] = {}  # id(node) -> the pack that computed it last, and its number there

    def cut(self) -> list[Pack]:
        taken = 0
        while self._queue:
            path = _path(self._queue.next())
            if self._open.added and not self._fits(path):
                path = self._begin_pack()
            self._queue.take()
            self._queue.computed(self._open.add(path))
            taken += 1
            self._used.update((id(node), taken) for node in path)
        if self._open.added:
            self._packs.append(self._pack([]))
        return self._packs

    def _fits(self, path: Sequence[TrieNode]) -> bool:
        filled, limits = self._open, self._limits
        if limits.read_tokens is not None and filled.read_tokens + path[-1].end > limits.read_tokens:
            return False
        tokens = filled.tokens + sum(node.length for node in filled.missing(path))
        # Room for what is held now, and for this path behind it.
        held = min(max(filled.held_tokens, path[-1].start), limits.held_tokens)
        return tokens <= limits.tokens and tokens + held * limits.held_cost <= limits.max_tokens

    def _begin_pack(self) -> list[TrieNode]:
        """Close the pack; return the path that the new one begins with."""
        keep = self._cache()
        self._queue.held(keep)
        path = _path(self._queue.next())  # with other nodes at hand it may be another one
        while keep and not self._fits_alone(path, keep):
            keep.remove(next((node for node in reversed(keep) if node not in path), keep[-1]))
        self._queue.held(keep)
        self._packs.append(self._pack(keep))
        self._open = _OpenPack(keep)
        return path

    def _cache(self) -> list[TrieNode]:
        """The nodes whose K,V stay: the most recently used first, parents before their children."""
        limits, filled = self._limits, self._open
        if len(self._packs) % HELD_PACKS == HELD_PACKS - 1:
            return []
        room = float(limits.held_tokens)
        if limits.held_cost:
            room = min(room, (limits.max_tokens - filled.tokens) / limits.held_cost)
        useful = [node for node in (filled.held | filled.added).values() if self._queue.awaits(node)]
        useful.sort(key=lambda node: (-self._used[id(node)], node.start))
        keep: list[TrieNode] = []
        kept: set[int] = set()
        for node in useful:
            if node.length <= room and (node.parent is None or id(node.parent) in kept):
                keep.append(node)
                kept.add(id(node))
                room -= node.length
        return keep

    def _fits_alone(self, path: Sequence[TrieNode], held: Sequence[TrieNode]) -> bool:
        filled = _OpenPack(held)
        tokens = sum(node.length for node in filled.missing(path))
        return tokens + filled.held_tokens * self._limits.held_cost <= self._limits.max_tokens

    def _pack(self, keep: Sequence[TrieNode]) -> Pack:
        filled, index = self._open, len(self._packs)
        nodes = sorted(filled.added.values(), key=self._queue.number)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        held_numbers = {name: number for number, name in enumerate(filled.held)}
        held = tuple(Held(self._keys[name], node.start, node.length) for name, node in filled.held.items())
        self._keys.update((id(node), (index, number)) for number, node in enumerate(nodes))
        parents, attach = [], []
        for node in nodes:
            # A held node may be computed again for a prompt that ends there. What is below it reads the held one: the
            # nodes of the pack that do so already need not follow it.
            inside = node.parent is not None and id(node.parent) in numbers and id(node.parent) not in filled.held
            parents.append(numbers[id(node.parent)] if inside else -1)
            above = [] if inside or node.parent is None else _path(node.parent)
            attach.append(tuple(held_numbers[id(each)] for each in above))
        offsets = [0]
        for node in nodes:
            offsets.append(offsets[-1] + node.length)
        return Pack(
            index=index,
            tokens=np.concatenate([self._prompts[node.prompt][node.start : node.end] for node in nodes]),
            positions=np.concatenate([_positions(node, self._positions[node.prompt]) for node in nodes]),
            offsets=offsets,
            starts=[node.start for node in nodes],
            parents=parents,
            attach=attach,
            reads=[(numbers[id(end)], tuple(end.ending)) for end in filled.ends],
            held=held,
            keep=frozenset(self._keys[id(node)] for node in keep),
        )


def _path(node: TrieNode) -> list[TrieNode]:
    """The node and its ancestors, root first."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _positions(node: TrieNode, positions: TokenArray | None) -> TokenArray:
    if positions is None:
        return np.arange(node.start, node.end, dtype=np.int32)
    return positions[node.start : node.end]
