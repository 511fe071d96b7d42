"""Cutting a forest into packs under limits, with a cache of prefixes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prefillcli.plan.blocks import NO_COVER, Block, Cover
from prefillcli.plan.pack import Held, Key, Limits, Pack
from prefillcli.plan.queue import Queue
from prefillcli.plan.trie import TokenArray, TrieNode

HELD_PACKS = 16
"""Packs after which nothing is held and shared prefixes are computed again: what a resumed run may have to repeat."""


def cut_packs(
    queue: Queue,
    prompts: Sequence[TokenArray],
    limits: Limits,
    positions: Sequence[TokenArray | None],
    cover: Cover = NO_COVER,
    adapters: Sequence[str | None] | None = None,
) -> list[Pack]:
    """Fill packs with the prompts of the queue as they come. `positions` and `adapters` as in `make_plan`.

    Every prompt is answered in exactly one pack. A prompt longer than `limits.tokens` gets a pack of its own; the
    caller keeps out prompts longer than `limits.max_tokens`. Between packs the prefix cache keeps nodes that waiting
    prompts begin with, those used last before others. What `cover` says lies in blocks is read from these; a block is
    computed in a pack of its own before the first one that reads it, unless it is given.
    """
    return _Cutter(queue, prompts, limits, positions, cover, adapters or [None] * len(prompts)).cut()


def given_packs(
    blocks: Sequence[Block],
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    adapters: Sequence[str | None],
) -> list[Pack]:
    """The packs of given blocks, the first of a plan, for a run that does not have their K,V any more."""
    keep = frozenset(block.key for block in blocks)
    numbers = {block.key: number for number, block in enumerate(blocks)}
    return [_block_pack(block, numbers, keep, prompts, positions, adapters) for block in blocks]


class _OpenPack:
    """A pack being filled. Of the nodes that lie in blocks those that its prompts begin with are held."""

    def __init__(self, cover: Cover, limits: Limits, held: Sequence[TrieNode] = ()) -> None:
        self._cover = cover
        self.held = {id(node): node for node in held}
        self.held_tokens = limits.held_size(node.length for node in held)  # outside of blocks
        self.added: dict[int, TrieNode] = {}
        self.ends: list[TrieNode] = []
        self.blocks: dict[str, Block] = {}
        self.tokens = 0
        self.read_tokens = 0

    def missing(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        """The nodes of a path to compute: its end in any case, since K,V alone give no answer."""
        *above, end = path
        at_hand = (self.added, self.held, self._cover.nodes)
        nodes = [node for node in above if not any(id(node) in each for each in at_hand)]
        return nodes if id(end) in self.added else [*nodes, end]

    def kept_with(self, path: Sequence[TrieNode]) -> tuple[int, int]:
        """Tokens of the pack with this prompt, held ones included, and nodes that its prompts end at."""
        new = [*self.missing(path), *(node for node in path[:-1] if self._covers(node) and id(node) not in self.held)]
        held = sum(node.length for node in self.held.values())
        return self.tokens + held + sum(node.length for node in new), len(self.ends) + 1

    def _covers(self, node: TrieNode) -> bool:
        return id(node) in self._cover.nodes

    def add(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        """Take a prompt in; returns the nodes that are computed for it."""
        new = self.missing(path)
        self.added.update((id(node), node) for node in new)
        self.held.update((id(node), node) for node in path[:-1] if id(node) in self._cover.nodes)
        self.blocks |= self._cover.blocks_above(path)
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
        cover: Cover,
        adapters: Sequence[str | None],
    ) -> None:
        self._queue = queue
        self._prompts = prompts
        self._limits = limits
        self._positions = positions
        self._cover = cover
        self._adapters = adapters
        self._carried = {block.key for block in cover.blocks.carried}
        self._at_hand = {block.key: block for block in cover.blocks.given}  # when the pack being filled begins
        self._block_packs = {key: number for number, key in enumerate(self._at_hand)}  # the pack that computes each
        self._first_index = len(self._at_hand)
        self._packs: list[Pack] = []
        self._answering = 0  # of these packs
        self._open = _OpenPack(cover, limits)
        self._used: dict[int, int] = {}  # id(node) -> when a prompt used it last, counted in prompts
        self._keys: dict[int, tuple[int, int]] = {}  # id(node) -> the pack that computed it last, and its number there
        self._charged = {id(node) for node in cover.within(self._at_hand)}  # nodes in blocks

    def cut(self) -> list[Pack]:
        taken = 0
        self._queue.held(self._cover.within(self._at_hand))
        while self._queue:
            path = _path(self._queue.next())
            if self._open.added and not self._fits(path):
                path = self._begin_pack()
            self._queue.take()
            self._queue.computed(self._open.add(path))
            taken += 1
            self._used.update((id(node), taken) for node in path)
        if self._open.added:
            self._add_pack([], self._blocks_left())
        return self._packs

    def _fits(self, path: Sequence[TrieNode]) -> bool:
        filled, limits = self._open, self._limits
        if self._adapters[path[-1].prompt] != self._adapters[filled.ends[0].prompt]:
            return False
        if limits.read_tokens is not None and filled.read_tokens + path[-1].end > limits.read_tokens:
            return False
        tokens = filled.tokens + sum(node.length for node in filled.missing(path))
        blocks = self._at_hand | filled.blocks | self._cover.blocks_above(path)
        blocks_held = self._held_size(blocks)
        room = limits.held_tokens - blocks_held
        # Room for what is held now, and for this path behind it.
        above = limits.held_size(node.length for node in path[:-1] if id(node) not in self._cover.nodes)
        held = max(filled.held_tokens, min(above, room)) + blocks_held
        return (
            tokens <= limits.tokens
            and filled.held_tokens <= room
            and self._most(tokens, blocks) + held * limits.held_cost <= limits.max_tokens
            and (not limits.kept_packs or limits.kept_size(*filled.kept_with(path)) <= limits.kept_tokens)
        )

    def _begin_pack(self) -> list[TrieNode]:
        """Close the pack; return the path that the new one begins with."""
        blocks = self._blocks_left()
        covered = self._cover.within(blocks)
        keep = self._cache(self._held_size(blocks))
        self._queue.held([*covered, *keep])
        path = _path(self._queue.next())  # with other nodes at hand it may be another one
        while keep and not self._fits_alone(path, keep, blocks):
            keep.remove(next((node for node in reversed(keep) if node not in path), keep[-1]))
        self._queue.held([*covered, *keep])
        self._add_pack(keep, blocks)
        self._at_hand = blocks
        self._open = _OpenPack(self._cover, self._limits, keep)
        return path

    def _cache(self, blocks_held: int) -> list[TrieNode]:
        """The nodes whose K,V stay: the most recently used first, parents before their children."""
        limits, filled = self._limits, self._open
        if self._answering % HELD_PACKS == HELD_PACKS - 1:
            return []
        room = float(limits.held_tokens)
        if limits.held_cost:
            room = min(room, (limits.max_tokens - filled.tokens) / limits.held_cost)
        room -= blocks_held
        useful = [
            node
            for node in (filled.held | filled.added).values()
            if id(node) not in self._cover.nodes and self._queue.awaits(node)
        ]
        useful.sort(key=lambda node: (-self._used[id(node)], node.start))
        keep: list[TrieNode] = []
        kept = set(self._cover.nodes)
        for node in useful:
            size = limits.held_size([node.length])
            if size <= room and (node.parent is None or id(node.parent) in kept):
                keep.append(node)
                kept.add(id(node))
                room -= size
        return keep

    def _fits_alone(self, path: Sequence[TrieNode], held: Sequence[TrieNode], blocks: dict[str, Block]) -> bool:
        filled, limits = _OpenPack(self._cover, self._limits, held), self._limits
        tokens = sum(node.length for node in filled.missing(path))
        blocks = blocks | self._cover.blocks_above(path)
        stays = filled.held_tokens + self._held_size(blocks)
        alone, with_held = limits.kept_size(path[-1].end, 1), limits.kept_size(*filled.kept_with(path))
        if limits.kept_packs and alone <= limits.kept_tokens < with_held:
            return False
        most = self._most(tokens, blocks)
        return stays <= limits.held_tokens and most + stays * limits.held_cost <= limits.max_tokens

    def _most(self, tokens: int, blocks: Mapping[str, Block]) -> int:
        """Tokens of the largest pack, if these blocks have to be there for one of `tokens`."""
        return max([tokens, *(block.length for key, block in blocks.items() if key not in self._block_packs)])

    def _held_size(self, blocks: Mapping[str, Block]) -> int:
        return self._limits.held_size(block.length for block in blocks.values())

    def _blocks_left(self) -> dict[str, Block]:
        """The blocks at hand that are so after the open pack too: later prompts or the next window begin with them."""
        awaited = {block.key for node, block in self._cover.nodes.values() if self._queue.awaits(node)}
        return {
            key: block
            for key, block in (self._at_hand | self._open.blocks).items()
            if key in awaited or key in self._carried
        }

    def _add_pack(self, keep: Sequence[TrieNode], blocks: Mapping[str, Block]) -> None:
        """Close the pack, with the blocks that it computes in packs before it."""
        filled = self._open
        held = {self._keys[name] for name in filled.held if name not in self._cover.nodes}
        at_hand = held | self._at_hand.keys()
        for key, block in filled.blocks.items():
            if key not in self._block_packs:
                self._block_packs[key] = self._first_index + len(self._packs)
                at_hand |= {key}
                keep_now, numbers = frozenset(at_hand), self._block_packs
                of_prompts = self._prompts, self._positions, self._adapters
                self._packs.append(_block_pack(block, numbers, keep_now, *of_prompts))
        self._packs.append(self._pack(keep, blocks))
        self._answering += 1

    def _pack(self, keep: Sequence[TrieNode], blocks: Mapping[str, Block]) -> Pack:
        filled, index = self._open, self._first_index + len(self._packs)
        nodes = sorted(filled.added.values(), key=self._queue.number)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        at_hand = sorted(filled.held.values(), key=lambda node: id(node) not in self._cover.nodes)  # blocks first
        held_numbers = {id(node): number for number, node in enumerate(at_hand)}
        held = tuple(self._held(node) for node in at_hand)
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
            keep=frozenset(self._keys[id(node)] for node in keep) | blocks.keys(),
            adapter=self._adapters[filled.ends[0].prompt],
        )

    def _held(self, node: TrieNode) -> Held:
        """A node of the open pack that is held; the first that is of a block which was computed here is charged."""
        if id(node) not in self._cover.nodes:
            key = self._keys[id(node)]
            return Held(key, key[0], node.start, node.length)
        _, block = self._cover.nodes[id(node)]
        charged = id(node) not in self._charged
        self._charged.add(id(node))
        return Held(
            block.key, self._block_packs[block.key], node.start, node.length, node.start - block.start, charged
        )


def _block_pack(
    block: Block,
    packs: Mapping[str, int],
    keep: frozenset[Key],
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    adapters: Sequence[str | None],
) -> Pack:
    """What computes a block behind those before it. `packs` are the numbers of the packs of all of them."""
    *before, _ = block.chain
    return Pack(
        index=packs[block.key],
        tokens=prompts[block.prompt][block.start : block.end],
        positions=_positions(block, positions[block.prompt]),
        offsets=[0, block.length],
        starts=[block.start],
        parents=[-1],
        attach=[tuple(range(len(before)))],
        reads=[],
        held=tuple(Held(each.key, packs[each.key], each.start, each.length) for each in before),
        keep=keep,
        block=block.key,
        adapter=adapters[block.prompt],
    )


def _path(node: TrieNode) -> list[TrieNode]:
    """The node and its ancestors, root first."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _positions(node: TrieNode | Block, positions: TokenArray | None) -> TokenArray:
    if positions is None:
        return np.arange(node.start, node.end, dtype=np.int32)
    return positions[node.start : node.end]
