"""Blocks: the shared prefix at a window's end, cut into pieces whose K,V the next window finds again.

Every block is computed in a pack of its own, behind the blocks before it. So its K,V are the same bits whichever
window computes them, and a plan need not know which one did. What a window hands to the next are digests, not K,V.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from prefillcli.plan.pack import Limits
from prefillcli.plan.state_steps import floor_to
from prefillcli.plan.trie import KeyArray, TokenArray, TrieNode, common_prefix, keys_with_positions, split_node
from prefillcli.plan.whole_nodes import split_whole, whole_lengths

BLOCK_TOKENS = 1024
"""A prefix that is shorter is not handed to the next window."""
SMALLEST_PART = 8
"""The blocks at a prefix's end are halves, quarters and so on of a block, down to one part in so many."""

CarriedBlock = tuple[int, str]
"""Where a block ends in its prompts, and its key."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tokens `start:end` of prompt number `prompt`, behind the block `before`.

    `key` is a digest of all tokens up to `end`, of their positions, of where the blocks before it end, and of the
    adapter that reads them.
    """

    key: str
    prompt: int
    start: int
    end: int
    before: Block | None

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def chain(self) -> list[Block]:
        """The blocks up to this one, root first."""
        blocks = [self]
        while (before := blocks[-1].before) is not None:
            blocks.append(before)
        return blocks[::-1]


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of a window, each tuple one path, root first.

    `given` are those that the window before has handed on; the first prompt begins with them. `carried` are handed to
    the next window; the last prompt begins with them. Blocks that are in both are the same objects.
    """

    given: tuple[Block, ...] = ()
    carried: tuple[Block, ...] = ()

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The keys of the last given and the last carried block, which tell all."""
        last, end = (blocks[-1].key if blocks else None for blocks in (self.given, self.carried))
        return last, end


def find_blocks(
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    shared: Sequence[int],
    room: int,
    carried: Sequence[CarriedBlock],
    block_tokens: int,
    limits: Limits,
    adapters: tuple[str | None, str | None] = (None, None),
) -> WindowBlocks:
    """The blocks of a window of `prompts`.

    `shared` says how many first tokens the last prompt shares with others, ascending. `carried` are the blocks of the
    window before. All blocks together take at most `room` held tokens by the `limits`. A prompt's last token is in
    none: it has to be computed for the answer. `adapters` are those of the first and the last prompt.
    """
    first, last = (keys_with_positions(prompts[at], positions[at]) for at in (0, -1))
    given: list[Block] = []
    for end, key in carried:
        if end >= len(first) or end + limits.node_tokens * (len(given) + 1) > room:
            break
        block = _next_block(first, 0, given, end, adapters[0])
        if block.key != key:
            break
        given.append(block)
    same = min(common_prefix(first, last), len(last) - 1) if adapters[0] == adapters[1] else 0
    chain = [block for block in given if block.end <= same]
    ends = [floor_to(min(end, len(last) - 1), limits.state_step) for end in shared]
    if chain or any(end >= block_tokens for end in ends):
        room -= limits.held_size(block.length for block in given)
        at = chain[-1].end if chain else 0
        for length in _lengths_up_to(ends, at, room, block_tokens, limits):
            at += length
            chain.append(_next_block(last, len(prompts) - 1, chain, at, adapters[1]))
    return WindowBlocks(tuple(given), tuple(chain))


def shared_ends(roots: Sequence[TrieNode], keys: Sequence[KeyArray], prompt: int, *, whole: bool = False) -> list[int]:
    """How many first tokens `prompt` shares with others: where nodes on its path end, ascending.

    With `whole`, where others end it is one token less: that is all that is computed again for them.
    """
    ends: list[int] = []
    siblings: Sequence[TrieNode] = roots
    at = 0
    while siblings and at < len(keys[prompt]):
        node = siblings[_place(siblings, keys, prompt, at)]
        at = node.end
        ends.append(at - 1 if whole and node.ending else at)
        siblings = node.children
    return ends if len(node.ending) + len(node.children) > 1 else ends[:-1]


@dataclass(frozen=True, slots=True)
class Cover:
    """Which nodes of a forest lie in which block: `nodes` by their id()."""

    blocks: WindowBlocks
    nodes: Mapping[int, tuple[TrieNode, Block]]

    def blocks_above(self, path: Sequence[TrieNode]) -> dict[str, Block]:
        """The blocks that the end of a path sees, by their keys, root first."""
        found = (self.nodes[id(node)][1] for node in path[:-1] if id(node) in self.nodes)
        return {block.key: block for block in found}

    def within(self, keys: Container[str]) -> list[TrieNode]:
        """The nodes in the blocks of these keys."""
        return [node for node, block in self.nodes.values() if block.key in keys]


NO_COVER = Cover(WindowBlocks(), {})


def cover_nodes(
    roots: list[TrieNode], keys: Sequence[KeyArray], blocks: WindowBlocks, *, whole: bool = False
) -> Cover:
    """Split the nodes under `blocks` at the ends of these; with `whole` each block becomes one node."""
    nodes: dict[int, tuple[TrieNode, Block]] = {}
    for chain, prompt in ((blocks.given, 0), (blocks.carried, len(keys) - 1)):
        if whole:
            split = split_whole(roots, prompt, [block.end for block in chain])
            nodes.update((id(node), (node, block)) for node, block in zip(split, chain, strict=True))
        else:
            nodes |= _cover(roots, keys, chain, prompt)
    return Cover(blocks, nodes)


def order_siblings(roots: list[TrieNode], cover: Cover) -> None:
    """Put what begins with given blocks first and with carried ones last, so that none is held for long."""
    carried = {block.key for block in cover.blocks.carried}
    for node, block in cover.nodes.values():
        siblings = node.parent.children if node.parent is not None else roots
        siblings.remove(node)
        siblings.insert(len(siblings) if block.key in carried else 0, node)


def _cover(
    roots: list[TrieNode], keys: Sequence[KeyArray], blocks: Sequence[Block], prompt: int
) -> dict[int, tuple[TrieNode, Block]]:
    """As `cover_nodes`, on the path of one prompt.

    A node where other prompts end is split before its last token too: that is all that is computed again for them.
    """
    found: dict[int, tuple[TrieNode, Block]] = {}
    siblings, at = roots, 0
    for block in blocks:
        while at < block.end:
            place = _place(siblings, keys, prompt, at)
            node = siblings[place]
            cut = min(block.end, node.end)
            if cut == node.end and node.ending and cut - at > 1:
                cut -= 1
            if cut < node.end:
                node = split_node(node, cut, siblings, place)
            found[id(node)] = node, block
            siblings, at = node.children, cut
    return found


def _lengths_up_to(ends: Sequence[int], at: int, room: int, block_tokens: int, limits: Limits) -> Iterator[int]:
    """Lengths of the blocks behind token `at`, cut at each of the `ends`: the next window may share but the first."""
    smallest = max(block_tokens // SMALLEST_PART, 1)
    if limits.whole_nodes:
        yield from whole_lengths(ends, at, room, smallest, limits.node_tokens, limits.state_step)
        return
    for end in ends:
        for length in _lengths(min(end - at, room), block_tokens):
            yield length
            at, room = at + length, room - length


def _lengths(tokens: int, block_tokens: int) -> Iterator[int]:
    """Lengths of the blocks of so many tokens: whole ones, then ever smaller ones; a small rest is left over."""
    smallest = max(block_tokens // SMALLEST_PART, 1)
    while tokens >= smallest:
        length = block_tokens
        while length > tokens:
            length = max(length // 2, smallest)
        yield length
        tokens -= length


def _next_block(keys: KeyArray, prompt: int, before: Sequence[Block], end: int, adapter: str | None) -> Block:
    """The block behind `before` on the path of a prompt with these `keys_with_positions`, read by this adapter."""
    last = before[-1] if before else None
    start = last.end if last is not None else 0
    digest = blake2b((last.key if last is not None else adapter or "").encode(), digest_size=16)
    digest.update(keys[start:end].astype("<i8").tobytes())
    return Block(digest.hexdigest(), prompt, start, end, last)


def _place(siblings: Sequence[TrieNode], keys: Sequence[KeyArray], prompt: int, at: int) -> int:
    """Which of the nodes that begin at token `at` is on the path of `prompt`."""
    token = keys[prompt][at]
    return next(place for place, node in enumerate(siblings) if keys[node.prompt][at] == token)
