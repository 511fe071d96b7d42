"""Blocks: the shared prefix at a window's end, cut into pieces whose K,V the next window finds again.

Every block is computed in its own pack, after the blocks before it. So its K,V are the same bits whichever window
computes them, and a plan need not know which one did. A window hands digests to the next one, not K,V.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from prefillcli.plan.pack import Limits
from prefillcli.plan.trie import (
    KeyArray,
    TokenArray,
    TrieNode,
    common_prefix,
    every_node,
    keys_with_positions,
    split_node,
)

# Nodes that end at multiples of a step, so that recurrent layers read every path in the same pieces.
#
# A recurrent layer's result for a token depends, in its last bits, on where the layer was interrupted before. With a
# step, interruptions are at multiples of it only, whatever other prompts share. So the few tokens between such a depth
# and a branch are computed again for each prompt below the branch.


def floor_to(depth: int, step: int) -> int:
    """The largest multiple of `step` up to `depth`; with `step` 0 the depth itself."""
    return depth - depth % step if step else depth


def align_nodes(roots: list[TrieNode], step: int) -> None:
    """Let every node with children end at a multiple of `step`, in place.

    Tokens after the last multiple go to the nodes below. A prompt that ended there gets its own node.
    """
    lists: list[tuple[list[TrieNode], TrieNode | None]] = [(roots, None)]
    while lists:
        siblings, parent = lists.pop()
        at = 0
        while at < len(siblings):
            node = siblings[at]
            cut = floor_to(node.end, step)
            if not node.children or cut == node.end:
                at += 1
                lists.append((node.children, node))
                continue
            below = node.children
            if node.ending:
                below.insert(0, TrieNode(node.prompt, node.start, node.end, node, ending=node.ending))
            if cut > node.start:
                node.end, node.ending = cut, []
                at += 1
                lists.append((below, node))
            else:  # it has no tokens left
                siblings[at : at + 1] = below
            for each in below:
                each.start = max(cut, node.start)
                each.parent = node if cut > node.start else parent


# Blocks that are used whole or not at all: each becomes one node of the forest.
#
# The state of a recurrent layer can be continued only after the last token that it has seen. So prompts that leave a
# block in its middle do not read it: they get their own nodes from its beginning.


# No block is shorter than the smallest block divided by this: prompts share a few tokens by chance.
NEAR_SHARE = 8


def whole_lengths(
    ends: Sequence[int], at: int, room: int, smallest: int, node_tokens: int, step: int = 0
) -> Iterator[int]:
    """Lengths of the blocks after token `at`: one up to each of the `ends`, as long as there is room.

    A block takes its own tokens and `node_tokens` of the room. A last one of less than `smallest` tokens is not worth
    its states. With a `step`, `at`, the `ends` and the lengths are all multiples of it.
    """
    ends = [end for end in ends if end > at]
    while ends and ends[-1] - max([at, *ends[:-1]]) < smallest:
        ends.pop()
    for end in ends:
        length = floor_to(min(end - at, room - node_tokens), step)
        if end - at <= smallest // NEAR_SHARE:
            continue
        if length < min(smallest, end - at):
            return
        yield length
        at, room = at + length, room - length - node_tokens
        if at < end:
            return


def split_whole(roots: list[TrieNode], prompt: int, ends: Sequence[int]) -> list[TrieNode]:
    """Make the path of `prompt` end one node at each of the `ends`, ascending; returns these nodes.

    Prompts that end within such a node, or leave it before its end, are taken out of it and share their common
    prefixes with one another.
    """
    found: list[TrieNode] = []
    end_node = next(node for node in every_node(roots) if prompt in node.ending)
    start = 0
    for end in ends:
        path = []
        step: TrieNode | None = end_node
        while step is not None and step.end > start:
            path.append(step)
            step = step.parent
        inside = [node for node in reversed(path) if node.start < end]
        if inside[-1].end > end:
            siblings = _siblings(roots, inside[-1])
            inside[-1] = split_node(inside[-1], end, siblings, siblings.index(inside[-1]))
        alone = len(inside) == 1 and not inside[0].ending
        found.append(inside[0] if alone else _take_out(roots, inside, prompt))
        start = end
    return found


def _take_out(roots: list[TrieNode], inside: Sequence[TrieNode], prompt: int) -> TrieNode:
    # One node instead of those `inside` (each the child of the one before), for prompts that continue after the last.
    first, last = inside[0], inside[-1]
    whole = TrieNode(prompt, first.start, last.end, first.parent, last.children)
    for child in whole.children:
        child.parent = whole
    last.children = []
    _siblings(roots, first).append(whole)
    for node in reversed(inside):
        siblings = _siblings(roots, node)
        if not node.ending and not node.children:
            siblings.remove(node)
        elif not node.ending and len(node.children) == 1:
            (child,) = node.children
            child.start, child.parent = node.start, node.parent
            siblings[siblings.index(node)] = child
    return whole


def _siblings(roots: list[TrieNode], node: TrieNode) -> list[TrieNode]:
    return roots if node.parent is None else node.parent.children


BLOCK_TOKENS = 1024  # a shorter prefix is not handed to the next window
# The blocks at a prefix's end are halves, quarters and so on of a block, down to one part in this many.
SMALLEST_PART = 8

CarriedBlock = tuple[int, str]  # depth of a block's end in its prompts, and the block's key


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tokens `start:end` of prompt number `prompt`, after the block `before`.

    `key` is a digest of all tokens up to `end`, of their positions, of the ends of the blocks before it, and of the
    variant that reads them.
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

    `given` are those from the window before; the first prompt begins with them. `carried` go to the next window; the
    last prompt begins with them. Blocks in both are the same objects.
    """

    given: tuple[Block, ...] = ()
    carried: tuple[Block, ...] = ()

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The keys of the last given and the last carried block, which identify all others."""
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
    variants: tuple[str | None, str | None] = (None, None),
) -> WindowBlocks:
    """The blocks of a window of `prompts`.

    `shared` are the lengths of the prefixes that the last prompt shares with others, ascending. `carried` are the
    blocks of the window before. All blocks together take at most `room` held tokens by the `limits`. A prompt's last
    token is in no block: it has to be computed for the answer. `variants` are those of the first and the last prompt.
    """
    first, last = (keys_with_positions(prompts[at], positions[at]) for at in (0, -1))
    given: list[Block] = []
    for end, key in carried:
        if end >= len(first) or end + limits.node_tokens * (len(given) + 1) > room:
            break
        block = _next_block(first, 0, given, end, variants[0])
        if block.key != key:
            break
        given.append(block)
    same = min(common_prefix(first, last), len(last) - 1) if variants[0] == variants[1] else 0
    chain = [block for block in given if block.end <= same]
    ends = [floor_to(min(end, len(last) - 1), limits.state_step) for end in shared]
    if chain or any(end >= block_tokens for end in ends):
        room -= limits.held_size(block.length for block in given)
        at = chain[-1].end if chain else 0
        for length in _lengths_up_to(ends, at, room, block_tokens, limits):
            at += length
            chain.append(_next_block(last, len(prompts) - 1, chain, at, variants[1]))
    return WindowBlocks(tuple(given), tuple(chain))


def shared_ends(roots: Sequence[TrieNode], keys: Sequence[KeyArray], prompt: int, *, whole: bool = False) -> list[int]:
    """The lengths of the prefixes that `prompt` shares with others: the ends of nodes on its path, ascending.

    With `whole`, a prefix where other prompts end is one token shorter: only this token is computed again for them.
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
    """The block in which each node of a forest lies: `nodes` by their id()."""

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
    """Split the nodes in `blocks` at the blocks' ends; with `whole` each block becomes one node."""
    nodes: dict[int, tuple[TrieNode, Block]] = {}
    for chain, prompt in ((blocks.given, 0), (blocks.carried, len(keys) - 1)):
        if whole:
            split = split_whole(roots, prompt, [block.end for block in chain])
            nodes.update((id(node), (node, block)) for node, block in zip(split, chain, strict=True))
        else:
            nodes |= _cover(roots, keys, chain, prompt)
    return Cover(blocks, nodes)


def order_siblings(roots: list[TrieNode], cover: Cover) -> None:
    """Put nodes that begin with given blocks first and those that begin with carried ones last, so that no block is
    held for long."""
    carried = {block.key for block in cover.blocks.carried}
    for node, block in cover.nodes.values():
        siblings = node.parent.children if node.parent is not None else roots
        siblings.remove(node)
        siblings.insert(len(siblings) if block.key in carried else 0, node)


def _cover(
    roots: list[TrieNode], keys: Sequence[KeyArray], blocks: Sequence[Block], prompt: int
) -> dict[int, tuple[TrieNode, Block]]:
    # As `cover_nodes`, on the path of one prompt. A node where other prompts end is also split before its last token:
    # only this token is computed again for them.
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
    # Lengths of the blocks after token `at`, cut at each of the `ends`: the next window may share only the first.
    smallest = max(block_tokens // SMALLEST_PART, 1)
    if limits.whole_nodes:
        yield from whole_lengths(ends, at, room, smallest, limits.node_tokens, limits.state_step)
        return
    for end in ends:
        for length in _lengths(min(end - at, room), block_tokens):
            yield length
            at, room = at + length, room - length


def _lengths(tokens: int, block_tokens: int) -> Iterator[int]:
    # Lengths of the blocks of this many tokens: full ones, then ever smaller ones; a small rest is left over.
    smallest = max(block_tokens // SMALLEST_PART, 1)
    while tokens >= smallest:
        length = block_tokens
        while length > tokens:
            length = max(length // 2, smallest)
        yield length
        tokens -= length


def _next_block(keys: KeyArray, prompt: int, before: Sequence[Block], end: int, variant: str | None) -> Block:
    # The block after `before` on the path of a prompt with these `keys_with_positions`, read by this variant.
    last = before[-1] if before else None
    start = last.end if last is not None else 0
    digest = blake2b((last.key if last is not None else variant or "").encode(), digest_size=16)
    digest.update(keys[start:end].astype("<i8").tobytes())
    return Block(digest.hexdigest(), prompt, start, end, last)


def _place(siblings: Sequence[TrieNode], keys: Sequence[KeyArray], prompt: int, at: int) -> int:
    # The one of the nodes beginning at token `at` that is on the path of `prompt`.
    token = keys[prompt][at]
    return next(place for place, node in enumerate(siblings) if keys[node.prompt][at] == token)
