"""The forest of shared prefixes of some prompts.

Sorting the token sequences makes neighbours share as much as any two prompts can; the longest common prefixes of
neighbours are then the compressed trie. Over prompts in another order the same walk gives the sharing that this order
offers (each prompt with the one before it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
# The numbers that are compared: token ids, or `keys_with_positions` for prompts with their own positions.
KeyArray = npt.NDArray[np.integer[Any]]

_UNMARKED = (1 << 30) - 1  # the bits of a position without its mark

#: Share of the trie's tokens that may be computed more than once, where that saves splitting prompts at every
#: chance overlap of a token or two.
DISSOLVE_SHARE = 0.01


@dataclass(slots=True, eq=False)
class TrieNode:
    """A run of tokens shared by the same prompts: `tokens[start:end]` of prompt number `prompt`.

    `ending` are the numbers of the prompts that end with this node.
    """

    prompt: int
    start: int
    end: int
    parent: TrieNode | None
    children: list[TrieNode] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.end - self.start


def keys_with_positions(tokens: TokenArray, positions: TokenArray | None, variant: int = 0) -> KeyArray:
    """One int64 for each token, its position (None: 0, 1, 2, ...) and the number of the variant that reads it, below
    256. After equal keys, equal keys have equal K,V."""
    if positions is None:
        positions = np.arange(len(tokens), dtype=np.int32)
    # Position from bit 39, with its mark from the highest bit (`plan.marked_positions`), variant from bit 31, token
    # below.
    marked = positions.astype(np.int64) >> 30 << 24
    return ((positions & _UNMARKED) + marked << 39) | np.int64(variant << 31) | tokens


def token_order(prompts: Sequence[KeyArray]) -> list[int]:
    """The order that sorts `prompts` lexicographically; equal prompts stay in their order."""
    # Big-endian bytes compare as the unsigned numbers do.
    keys = [tokens.astype(f">u{tokens.itemsize}").tobytes() for tokens in prompts]
    return sorted(range(len(prompts)), key=keys.__getitem__)


def common_prefix(a: KeyArray, b: KeyArray) -> int:
    """Number of leading tokens that `a` and `b` share."""
    n = min(len(a), len(b))
    step = 64  # most neighbours differ early or not at all: look closely first, then in growing strides
    at = 0
    while at < n:
        differs = a[at : min(at + step, n)] != b[at : min(at + step, n)]
        if differs.any():
            return at + int(differs.argmax())
        at += step
        step *= 4
    return n


def build_forest(prompts: Sequence[KeyArray], order: Sequence[int]) -> list[TrieNode]:
    """The compressed trie of `prompts`, taken in `order`, as its roots.

    Every prompt ends at the end of one node (`ending`). In `token_order` every distinct prefix is one node and
    the tokens of all nodes together are the unique trie tokens.
    """
    roots: list[TrieNode] = []
    path: list[TrieNode] = []  # the nodes of the previous prompt, root first
    previous: KeyArray | None = None
    for number in order:
        tokens = prompts[number]
        shared = common_prefix(previous, tokens) if previous is not None else 0
        while path and path[-1].start >= shared:
            path.pop()
        if path and path[-1].end > shared:
            parent = path[-1].parent
            path[-1] = split_node(path[-1], shared, parent.children if parent else roots)
        if shared < len(tokens):
            node = TrieNode(number, shared, len(tokens), path[-1] if path else None)
            (path[-1].children if path else roots).append(node)
            path.append(node)
        path[-1].ending.append(number)
        previous = tokens
    return roots


def split_node(node: TrieNode, at: int, siblings: list[TrieNode], place: int = -1) -> TrieNode:
    """Cut `node`, which is `siblings[place]`, at token position `at`; return the upper part, which takes its place."""
    upper = TrieNode(node.prompt, node.start, at, node.parent, [node])
    siblings[place] = upper
    node.start = at
    node.parent = upper
    return upper


def every_node(roots: Sequence[TrieNode]) -> list[TrieNode]:
    """All nodes of a forest, parents before their children."""
    nodes, stack = [], list(roots)
    while stack:
        nodes.append(stack.pop())
        stack.extend(nodes[-1].children)
    return nodes


def forest_tokens(roots: Sequence[TrieNode]) -> int:
    """Tokens in all nodes: those that one pass over the forest computes."""
    return sum(node.length for node in every_node(roots))


def dissolve_small_nodes(
    roots: list[TrieNode], share: float = DISSOLVE_SHARE, fixed: Container[int] = ()
) -> list[TrieNode]:
    """Give the cheapest inner nodes' tokens back to their children, for at most `share` more tokens in all.

    Nodes whose id() is in `fixed` stay.

    Prompts overlap by chance in a few tokens; every such node is one more attention call for each of its
    descendants. Dissolving the node costs `length * (branches - 1)` more tokens.
    """
    budget = int(forest_tokens(roots) * share)
    heap: list[tuple[int, int, TrieNode]] = []
    serial = 0

    def cost(node: TrieNode) -> int:
        branches = len(node.children) + bool(node.ending)
        return node.length * (branches - 1)

    def push(node: TrieNode) -> None:
        nonlocal serial
        if node.children and id(node) not in fixed:
            serial += 1
            heapq.heappush(heap, (cost(node), serial, node))

    for node in every_node(roots):
        push(node)

    gone: set[int] = set()
    while heap and heap[0][0] <= budget:
        price, _, node = heapq.heappop(heap)
        if id(node) in gone or price != cost(node):
            continue  # its price has changed since; the newer entry counts
        budget -= price
        gone.add(id(node))
        heirs = node.children
        if node.ending:
            heirs = [TrieNode(node.prompt, node.start, node.end, node.parent, ending=node.ending), *heirs]
        for heir in heirs:
            heir.parent = node.parent
            heir.start = node.start
            push(heir)
        siblings = node.parent.children if node.parent else roots
        at = siblings.index(node)
        siblings[at : at + 1] = heirs
        if node.parent:
            push(node.parent)
    return roots


def split_ends(
    roots: list[TrieNode],
    behind: Callable[[Sequence[int]], int],
    room: int,
    *,
    fixed: Container[int] = (),
    whole: bool = False,
) -> None:
    """Let prompts that end at the same node, with more than `room` tokens `behind` them, end at several, in place.

    Each of these nodes is the last token alone, so that the tokens before it can be held; with `whole`, and for nodes
    whose id() is in `fixed`, it is a copy of the node.
    """
    for node in every_node(roots):
        groups: list[list[int]] = []
        for prompt in node.ending:
            if groups and behind([*groups[-1], prompt]) <= room:
                groups[-1].append(prompt)
            else:
                groups.append([prompt])
        if len(groups) < 2:
            continue
        if whole or id(node) in fixed or node.length == 1:
            siblings = node.parent.children if node.parent else roots
            ends = [TrieNode(node.prompt, node.start, node.end, node.parent, ending=group) for group in groups[1:]]
            at = siblings.index(node) + 1
            siblings[at:at] = ends
            node.ending = groups[0]
        else:
            node.end -= 1
            ends = [TrieNode(node.prompt, node.end, node.end + 1, node, ending=group) for group in groups]
            ends[0].children, node.children, node.ending = node.children, ends, []
            for child in ends[0].children:
                child.parent = ends[0]


# How many prompts share each part of a forest.
